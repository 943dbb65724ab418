"""A transcript shows each message once, each tool call as one card, and each agent, branch and side conversation in a lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.records import DurableResult, pack_value
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.experience.recorder import Recorder
from rollwright.inference.front.side_conversations import SIDE_CONVERSATION
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.viewer.reading import chat_of, lanes_of, plain_call
from rollwright.viewer.transcript import OPEN_TURNS, transcript

START, END = "<|im_start|>", "<|im_end|>\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
PNG = "data:image/png;base64,iVBORw0KGgo="


def said(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}"


class Told:
    """Writes an episode in text: each character is a token.

    Args:
        path: directory of the journal.
        task: the task.
    """

    def __init__(self, path: Any, task: dict[str, Any] | None = None) -> None:
        self.path, self.task, self.now = path, task, 1000.0
        self.journal = Journal(path)
        self.writer, self.recorder = EpisodeWriter(self.journal), Recorder()
        facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
        self.writer.begin(ordinal=0, index=0, task=None, task_error="", **facts)

    def ask(self, prompt: str, answer: str, conversation: str = "a", **metadata: str) -> None:
        request = ModelRequest(input_ids=list(map(ord, prompt)), rid=conversation)
        request.metadata |= metadata
        output = list(map(ord, answer))
        response = ModelResponse(output_tokens=output, output_logprobs=[-1.0] * len(output), output_versions=[0] * len(output))
        times = {"started": self.now, "finished": self.now + 1}
        self.writer.call(self.recorder.record(request, response, **times))
        self.now += 1

    def tool(self, name: str, value: Any, error: list[str] | None = None) -> None:
        self.now += 0.5
        packed = None if error else pack_value(value)
        self.journal.write(DurableResult(0, name, 1, "recorded", packed, error, None, self.now, 0.25))

    def read(self, lane: int | None = None) -> dict[str, Any]:
        self.writer.end("failed", "")
        self.journal.close()
        episode = next(read_episodes(self.path))
        sample = {"calls": [plain_call(each) for each in episode.calls], "task": self.task, "lanes": lanes_of(episode)}
        sample["messages"] = chat_of(episode, lambda ids: "".join(map(chr, np.array(ids).tolist())))
        return transcript(sample, lane=lane)


def texts(turn: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["text"]) for message in turn["messages"]]


def test_a_tool_call_is_one_card_with_arguments_result_and_seconds(tmp_path):
    told = Told(tmp_path)
    prompt = said("system", "Be brief.") + said("user", "1+1?") + f"{START}assistant\n"
    told.ask(prompt, f"<think>I add.</think>Let me see.\n{CALL}{END}")
    told.tool("tool add", {"sum": "the sum is 2"})
    prompt += f"<think>I add.</think>Let me see.\n{CALL}{END}" + said("tool", "the sum is 2") + f"{START}assistant\n"
    told.ask(prompt, f"It is 2.{END}")
    told.tool("reward right", 1.0)
    first, second = told.read()["turns"]
    assert (first["number"], second["number"]) == (1, 2)
    assert texts(first) == [("system", "Be brief."), ("user", "1+1?"), ("assistant", "Let me see.")]
    reply = first["messages"][-1]
    assert reply["reasoning"] == "I add."
    (card,) = reply["cards"]
    assert (card["name"], card["arguments"], card["about"], card["seen"]) == ("add", '{"a": 2}', "250 ms", "the sum is 2")
    assert texts(second) == [("assistant", "It is 2."), ("reward", "1.0")]  # the result is not told twice


@pytest.mark.parametrize(
    ("asked", "shown", "arguments"),
    [
        ("<search>height of the Eiffel tower</search>", "I look.", "height of the Eiffel tower"),
        ("```python\nprint(1)\n```", "I look.", "print(1)"),
    ],
)
def test_calls_that_a_workflow_reads_itself_are_cards_too(tmp_path, asked, shown, arguments):
    told = Told(tmp_path)
    told.ask("Question: ", f"I look.\n{asked}")
    told.tool("search tool", ["330 metres", False])
    told.ask(f"Question: I look.\n{asked}\n<information>330 metres</information>\n", "<answer>330</answer>")
    first, second = told.read()["turns"]
    assert texts(first) == [("prompt", "Question: "), ("assistant", shown)]
    (card,) = first["messages"][-1]["cards"]
    assert (card["name"], card["arguments"], card["seen"]) == (
        "search tool",
        arguments,
        "<information>330 metres</information>",
    )
    assert texts(second) == [("assistant", "<answer>330</answer>")]


def test_what_users_say_again_is_shown_again(tmp_path):
    told, prompt = Told(tmp_path), said("user", "Guess.") + f"{START}assistant\n"
    for guess in ("1", "2"):
        told.ask(prompt, guess + END)
        prompt += guess + END + said("user", "Wrong.") + f"{START}assistant\n"
    told.ask(prompt, "3" + END)
    turns = told.read()["turns"]
    assert [texts(turn) for turn in turns] == [
        [("user", "Guess."), ("assistant", "1")],
        [("user", "Wrong."), ("assistant", "2")],
        [("user", "Wrong."), ("assistant", "3")],
    ]


def test_a_history_that_was_rendered_again_is_shown_once(tmp_path):
    """Agents send all messages with each request, often without the reasoning of earlier ones."""
    told = Told(tmp_path)
    opening = f"{START}assistant\n"
    told.ask(said("user", "Plan.") + opening, f"<think>hm</think>A.{END}")
    told.ask(said("user", "Plan.") + said("assistant", "A.") + said("user", "Go.") + opening, f"B.{END}")
    turns = told.read()["turns"]
    assert [texts(turn) for turn in turns] == [[("user", "Plan."), ("assistant", "A.")], [("user", "Go."), ("assistant", "B.")]]


def test_agents_branches_and_side_conversations_have_lanes(tmp_path):
    told, prompt = Told(tmp_path), said("user", "Who begins?") + f"{START}assistant\n"
    told.ask(prompt, f"I do.{END}", "a", agent="policy", role="first")
    told.ask(prompt, f"No, I.{END}", "b", agent="rival")
    told.ask(said("user", "Title?"), f"A game{END}", "c", **{SIDE_CONVERSATION: "title"})
    told.ask(prompt, f"Third.{END}", "d", agent="rival")
    found = told.read()
    assert [lane["name"] for lane in found["lanes"]] == ["policy (first)", "rival 1", "title", "rival 2"]
    assert found["lanes"][1]["about"] == f"shares {len(prompt)} tokens with request 1"
    assert [lane["turns"] for lane in found["lanes"]] == [1, 1, 1, 1]
    assert [turn["lane"] for turn in found["turns"]] == ["policy (first)", "rival 1", "title", "rival 2"]
    assert "not trained" in found["turns"][2]["messages"][-1]["about"]


def test_one_lane_long_transcripts_and_images(tmp_path):
    told = Told(tmp_path, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": PNG}}]}]})
    for number in range(OPEN_TURNS + 2):
        told.ask(
            said("user", f"{number}?") + f"{START}assistant\n", f"{number}{END}", "even" if number % 2 == 0 else f"odd {number}"
        )
    found = told.read()
    assert found["turns"][0]["messages"][0]["images"] == [PNG]
    assert sum(len(message["images"]) for turn in found["turns"] for message in turn["messages"]) == 1
    assert [turn["is_open"] for turn in found["turns"]] == [True] * 6 + [False] * 2 + [True] * 6
