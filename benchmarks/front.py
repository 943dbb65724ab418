"""What the OpenAI front and the recorder cost: conversations of four calls against an engine that answers at once.

    python benchmarks/front.py [--json FILE]

The agents are the vendors' own clients (``openai``, ``anthropic``) in a process of their own, over real HTTP. Each conversation
has a system prompt, two tools, three tool calls with their results, and an answer. The figure is the processor time of the
front's process, all its threads, divided by the calls: reading and parsing, the chat template, tokens in and out, the hop to the
run's event loop, the recorder, the answer's JSON, opening the episode and making rows of it. The clients' time is not in it.
The ratio ``<dialect>/256`` is the cost of a call among 256 conversations divided by the cost among one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

DIALECTS = ("chat", "responses", "messages")
TURNS = 4
SYSTEM = (
    "You answer questions about the weather and about numbers. Use the tools where you can, one call at a time, and say in one "
    "short sentence how you found what you found. Never guess a temperature: ask for it. Give temperatures in whole degrees. "
) * 2
QUESTION = (
    "Is it warmer in Lisbon, in Oslo or in Kyoto today, and by how many degrees is the warmest above the mean of the three?"
)
RESULT = json.dumps({"city": "Lisbon", "temperature": 21, "unit": "celsius", "wind": "north-west, 4", "updated": "11:40"})
FUNCTIONS = {
    "weather": ("The weather of a city now.", {"city": "name of the city", "unit": "celsius or fahrenheit"}),
    "calculate": ("The value of an arithmetic expression.", {"expression": "such as (1 + 2) / 3"}),
}
CALL = 'I ask for the next city.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Lisbon", "unit": "celsius"}}\n</tool_call>'
ANSWER = (
    "Lisbon is the warmest with 21 degrees, which is 6 above the mean of the three; I asked for each city and worked it out."
)
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}

# Tools

You may call functions. They are within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

For each call return <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (loop.first and tools and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


# -- the front's process -----------------------------------------------------------------------------------------------


def make_tokenizer() -> Any:
    """A byte-level BPE of 8,000 tokens, as pretrained models have them, learned from the documentation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from rollwright.data.tokenizer import load_tokenizer

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [path.read_text() for path in sorted((Path(__file__).parent.parent / "docs").glob("*.md"))]
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return load_tokenizer(tokenizer)


async def measure(dialect: str, together: int, conversations: int) -> dict[str, Any]:
    """Run the conversations, ``together`` at once; the front's processor time."""
    from instant_engine import InstantEngine

    from rollwright.inference.front.openai_front import OpenAIFront
    from rollwright.inference.request import ModelRequest, ModelResponse
    from rollwright.rollout.sample_engine import SampleEngine
    from rollwright.rollout.seeds import SampleName

    tokenizer = make_tokenizer()
    texts = [CALL] * (TURNS - 1) + [ANSWER]
    outputs = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]

    class ToolEngine(InstantEngine):
        """Three tool calls and an answer in each conversation, without waiting."""

        def __init__(self) -> None:
            self.turns: Counter[str] = Counter()
            self.context_length = 4096

        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            await asyncio.sleep(0)  # as any real engine, it gives way to others once
            tokens = outputs[self.turns[request.rid] % TURNS]
            self.turns[request.rid] += 1
            count = len(tokens)
            return ModelResponse(
                request.input_ids, list(tokens), [-0.5] * count, [0] * count, stop_match=tokens[-1], rid=request.rid
            )

    engine, loop = ToolEngine(), asyncio.get_running_loop()
    with OpenAIFront(tokenizer, "policy") as front:

        def opened(count: int) -> list[Any]:
            names = [SampleName(number, 0) for number in range(count)]
            return [front.episode(SampleEngine(engine, name, run_seed=1, loop=loop)) for name in names]

        async def run(count: int) -> tuple[float, float, list[Any]]:
            command = [sys.executable, __file__, "--client", dialect, str(together)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            client = await asyncio.create_subprocess_exec(*command, **pipes, limit=1 << 24)
            assert client.stdin is not None
            assert client.stdout is not None
            await client.stdout.readline()  # it has imported what it needs
            processor, wall = time.process_time(), time.perf_counter()
            episodes = opened(count)
            keys = [(episode.base_url, episode.api_key) for episode in episodes]
            client.stdin.write(json.dumps(keys).encode() + b"\n")
            if await client.stdout.readline() != b"done\n":
                raise SystemExit("the client failed; its traceback is above.")
            rows = [row for episode in episodes for row in episode.experiences(reward=1.0)]
            processor, wall = time.process_time() - processor, time.perf_counter() - wall
            await client.wait()
            for episode in episodes:
                episode.close()
            return processor, wall, rows

        await run(min(together, 8))  # first uses: compiled templates, types, connections
        processor, wall, rows = await run(conversations)
    assert len(rows) == conversations, f"{len(rows)} sequences of {conversations} conversations"
    calls = conversations * TURNS
    return {
        "dialect": dialect,
        "at once": together,
        "calls": calls,
        "cpu ms/call": round(processor / calls * 1e3, 3),
        "wall ms/call": round(wall / calls * 1e3, 3),
        "tokens of a conversation": len(rows[0]),
    }


# -- the agents' process -----------------------------------------------------------------------------------------------


def parameters(fields: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": text} for name, text in fields.items()}
    return {"type": "object", "properties": properties, "required": [next(iter(fields))]}


async def chat(client: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": parameters(fields)}}
        for name, (text, fields) in FUNCTIONS.items()
    ]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools, temperature=0.7)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls or []]
    assert message.content == ANSWER


async def responses(client: Any) -> None:
    tools = [
        {"type": "function", "name": name, "description": text, "parameters": parameters(fields)}
        for name, (text, fields) in FUNCTIONS.items()
    ]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        answer = await client.responses.create(model="policy", instructions=SYSTEM, input=items, tools=tools, temperature=0.7)
        items += [item.to_dict() for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
    assert answer.output_text == ANSWER


async def messages(client: Any) -> None:
    tools = [
        {"name": name, "description": text, "input_schema": parameters(fields)} for name, (text, fields) in FUNCTIONS.items()
    ]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        answer = await client.messages.create(
            model="policy", max_tokens=500, system=SYSTEM, messages=history, tools=tools, extra_body={"temperature": 0.7}
        )
        history.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
        used = [block.id for block in answer.content if block.type == "tool_use"]
        history.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": each, "content": RESULT} for each in used]}
        )
    assert answer.content[-1].text == ANSWER


async def act(dialect: str, together: int) -> None:
    """Run the conversations that come on standard input, ``together`` at once."""
    import anthropic
    import openai

    package: Any = anthropic if dialect == "messages" else openai
    async with package.DefaultAsyncHttpxClient(timeout=600, trust_env=False, verify=False) as http_client:
        print("ready", flush=True)
        keys = json.loads(sys.stdin.readline())
        slots = asyncio.Semaphore(together)

        async def converse(base_url: str, api_key: str) -> None:
            settings = {"api_key": api_key, "http_client": http_client, "max_retries": 0}
            async with slots:
                if dialect == "messages":
                    await messages(anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), **settings))
                else:
                    await globals()[dialect](openai.AsyncOpenAI(base_url=base_url, **settings))

        await asyncio.gather(*(converse(*key) for key in keys))
    print("done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write results and ratios to this file")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each line; the one of the least processor time is shown"
    )
    parser.add_argument("--one", nargs=3, metavar=("DIALECT", "TOGETHER", "CONVERSATIONS"), help="one run; its figures as JSON")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(act(arguments.client[0], int(arguments.client[1])))
        return
    if arguments.one:
        dialect, together, conversations = arguments.one
        print(json.dumps(asyncio.run(measure(dialect, int(together), int(conversations)))))
        return

    from report import Report

    report = Report(f"OpenAI front and recorder: {TURNS} calls a conversation")
    for dialect in DIALECTS:
        cost = {}
        for together, conversations in ((1, 64), (256, 256)):
            command = [sys.executable, __file__, "--one", dialect, str(together), str(conversations)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            found = [
                json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)
                for _ in range(arguments.repeats)
            ]
            best = min(found, key=lambda figures: figures["cpu ms/call"])
            cost[together] = best["cpu ms/call"]
            report.row(**best)
        report.ratio(f"{dialect}/256", cost[256] / cost[1])
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
