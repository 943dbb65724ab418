"""MultiTurnWorkflow, apart from any executor: when it stops, what it says between turns, which tokens it trains."""

import asyncio

import pytest

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import ConfigError, PromptTooLongError, WorkflowError
from rollwright.inference.request import ModelResponse
from rollwright.workflows.multi_turn import MultiTurnWorkflow

GCONFIG = GenerationHyperparameters(max_new_tokens=16)
TASK = {"messages": [{"role": "user", "content": "6*7="}], "answer": "42"}


class Answers:
    """Gives one answer after the other; one that ends with "…" is cut by its length limit."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.requests = []

    async def agenerate(self, request):
        self.requests.append(request)
        text = self.texts[len(self.requests) - 1]
        if text is None:
            raise PromptTooLongError("no room")
        tokens = self.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        if not text.endswith("…"):
            tokens.append(self.tokenizer.eos_token_id)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=tokens,
            output_logprobs=[-0.5] * len(tokens),
            output_versions=[0] * len(tokens),
            stop_reason="length" if text.endswith("…") else "stop",
            rid=request.rid,
        )

    def get_version(self):
        return 0


async def exact(prompt, completion, prompt_ids, completion_ids, answer):
    return float(completion.strip() == answer)


def run(workflow, engine):
    return asyncio.run(workflow.arun_episode(engine, TASK))


def sampled(tokenizer, row):
    return tokenizer.decode(row["input_ids"][0][row["loss_mask"][0].bool()], skip_special_tokens=True)


def test_it_stops_at_the_right_answer_with_the_discount_of_its_turn(tokenizer):
    engine = Answers(tokenizer, "40", "41", "42", "43")
    row = run(MultiTurnWorkflow(exact, GCONFIG, tokenizer, max_turns=5, turn_discount=0.5), engine)
    assert len(engine.requests) == 3
    assert row["rewards"].tolist() == [0.25]
    assert sampled(tokenizer, row) == "404142"
    assert len({request.rid for request in engine.requests}) == 1  # one conversation, one server


def test_each_turn_goes_on_from_the_tokens_before_as_the_template_would(tokenizer):
    engine = Answers(tokenizer, "40", "42")
    run(MultiTurnWorkflow(exact, GCONFIG, tokenizer, feedback_message="no"), engine)
    whole = [*TASK["messages"], {"role": "assistant", "content": "40"}, {"role": "user", "content": "no"}]
    text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(engine.requests[1].input_ids, skip_special_tokens=False) == text


def test_tokens_that_encoding_would_not_give_are_kept_as_they_were_sampled(tokenizer):
    pieces = build_character_tokenizer(pieces=["42", "4x"])
    one, two = pieces.encode("4", add_special_tokens=False), pieces.encode("x", add_special_tokens=False)
    assert pieces.encode("4x", add_special_tokens=False) != one + two

    class Unusual(Answers):
        async def agenerate(self, request):
            response = await super().agenerate(request)
            if len(self.requests) == 1:
                response.output_tokens = [*one, *two, pieces.eos_token_id]
                response.output_logprobs, response.output_versions = [-0.5] * 3, [0] * 3
            return response

    engine = Unusual(pieces, "4x", "42")
    row = run(MultiTurnWorkflow(exact, GCONFIG, pieces), engine)
    first = engine.requests[0].input_ids
    assert engine.requests[1].input_ids[len(first) : len(first) + 3] == [*one, *two, pieces.eos_token_id]
    assert row["input_ids"][0, len(first) : len(first) + 2].tolist() == [*one, *two]


def test_feedback_may_depend_on_the_answer(tokenizer):
    engine = Answers(tokenizer, "40", "42")
    workflow = MultiTurnWorkflow(
        exact, GCONFIG, tokenizer, feedback_fn=lambda completion, reward, data: f"{completion} is not {data['answer'][0]}2"
    )
    run(workflow, engine)
    assert "40 is not 42" in tokenizer.decode(engine.requests[1].input_ids)


def test_feedback_may_take_time_and_has_to_be_text(tokenizer):
    async def judge(completion, reward, data):
        await asyncio.sleep(0)
        return f"not {completion}"

    engine = Answers(tokenizer, "40", "42")
    run(MultiTurnWorkflow(exact, GCONFIG, tokenizer, feedback_fn=judge), engine)
    assert "not 40" in tokenizer.decode(engine.requests[1].input_ids)
    silent = MultiTurnWorkflow(exact, GCONFIG, tokenizer, feedback_fn=lambda completion, reward, data: None)
    with pytest.raises(WorkflowError, match="feedback_fn gave a NoneType"):
        run(silent, Answers(tokenizer, "40", "42"))


def test_a_cut_answer_is_closed_before_the_feedback_and_flagged_only_at_the_end(tokenizer):
    engine = Answers(tokenizer, "4…", "42")
    row = run(MultiTurnWorkflow(exact, GCONFIG, tokenizer), engine)
    assert row["truncated"].tolist() == [False]
    closed = tokenizer.decode(engine.requests[1].input_ids, skip_special_tokens=False)
    whole = [*TASK["messages"], {"role": "assistant", "content": "4"}]
    assert closed.startswith(tokenizer.apply_chat_template(whole, tokenize=False))
    assert run(MultiTurnWorkflow(exact, GCONFIG, tokenizer, max_turns=1), Answers(tokenizer, "4…"))["truncated"].tolist() == [
        True
    ]


def test_a_full_context_ends_the_conversation_but_a_prompt_too_long_is_an_error(tokenizer):
    row = run(MultiTurnWorkflow(exact, GCONFIG, tokenizer), Answers(tokenizer, "40", None))
    assert row["truncated"].tolist() == [True]
    assert sampled(tokenizer, row) == "40"
    with pytest.raises(PromptTooLongError):
        run(MultiTurnWorkflow(exact, GCONFIG, tokenizer), Answers(tokenizer, None))


def test_a_template_that_rewrites_history_is_refused(tokenizer):
    rewriting = build_character_tokenizer(
        chat_template="{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    with pytest.raises(WorkflowError, match=r"turn 2: the chat template of .* changes earlier turns"):
        run(MultiTurnWorkflow(exact, GCONFIG, rewriting), Answers(rewriting, "40", "42"))


def test_settings_out_of_range_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"max_turns=0"):
        MultiTurnWorkflow(exact, GCONFIG, tokenizer, max_turns=0)
