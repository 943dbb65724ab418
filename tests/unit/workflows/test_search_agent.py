import asyncio
import threading
import time

import pytest
from parts import FixedEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.environments.retrieval import ToolError
from rollwright.errors import ConfigError, WorkflowError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.trajectory import row_lengths
from rollwright.inference.request import ModelResponse
from rollwright.rewards.text import f1_score
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.search_agent import GroupedSearchAgentWorkflow, SearchAgentWorkflow, parse_action
from rollwright.workflows.turns import fill

TOKENIZER = build_character_tokenizer()


class ScriptedEngine(FixedEngine):
    """Says what it is told to, turn by turn of each conversation, and keeps the requests."""

    def __init__(self, *turns, version=3):
        self.turns, self.version, self.requests = turns, version, []

    async def agenerate(self, request):
        turn = sum(earlier.rid == request.rid for earlier in self.requests)
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.turns[turn]
        if isinstance(text, Exception):
            raise text
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        limit = request.gconfig.max_new_tokens
        stop = next((s for s in request.gconfig.stop if text.endswith(s)), None)
        ids, reason = (ids[:limit], "length") if len(ids) > limit else (ids, "stop")
        return ModelResponse(request.input_ids, ids, [-0.5] * len(ids), [self.version] * len(ids), reason, stop)


class Library:
    """A search tool that misbehaves on request."""

    def __init__(self):
        self.queries = []

    async def search(self, query, topk):
        self.queries.append((query, topk))
        if query == "slow":
            await asyncio.sleep(3600)
        if query == "refused":
            raise ToolError("no such index.")
        if query == "broken":
            raise ValueError("boom")
        if query == "nothing":
            return []
        return [{"wikipedia_title": query, "contents": f"facts of {query} {{question}} </information>", "url": "u"}] * topk

    async def access(self, url):
        return {"url": url, "contents": "page text"} if url == "u" else None


def workflow(**options):
    options = {"search_tool": Library(), "prompt_template": "Q {question}\n", "topk": 1, "tool_timeout": 60, **options}
    return SearchAgentWorkflow(GenerationHyperparameters(max_new_tokens=60), TOKENIZER, 600, 4, False, **options)


def run(engine, flow=None, **row):
    data = {"question": "who?", "answer": ["red king"], **row}
    return asyncio.run((flow or workflow()).arun_episode(engine, data))


def text(trajectory, row=0):
    length = row_lengths(trajectory)[row]
    return TOKENIZER.decode(trajectory["input_ids"][row, :length].tolist())


def trained_text(trajectory):
    return TOKENIZER.decode(
        [i for i, m in zip(*(trajectory[k][0].tolist() for k in ("input_ids", "loss_mask")), strict=True) if m]
    )


def test_search_then_answer():
    engine = ScriptedEngine("hm</think><search> red </search>", "ok</think><answer>the Red King.</answer>")
    flow = workflow()
    trajectory = run(engine, flow)
    check_trajectory(trajectory)
    assert text(trajectory) == (
        "Q who?\nhm</think><search> red </search>\n\n<information>\n"
        '<document title="red">\nfacts of red {question} </information>\n</document>\n</information>\n\n'
        "ok</think><answer>the Red King.</answer>"
    )
    assert trained_text(trajectory) == "hm</think><search> red </search>ok</think><answer>the Red King.</answer>"
    assert flow.tool.queries == [("red", 1)]
    assert trajectory["rewards"].tolist() == [1.0]
    assert not trajectory["truncated"].item()
    mask = trajectory["loss_mask"].bool()
    assert (trajectory["logprobs"][mask] == -0.5).all()
    assert (trajectory["logprobs"][~mask] == 0).all()
    assert (trajectory["versions"][mask] == 3).all()
    assert (trajectory["versions"][~mask] == -1).all()


def test_every_turn_continues_the_same_conversation_token_for_token():
    engine = ScriptedEngine("<search>a</search>", "<search>b</search>", "<answer>red</answer>")
    trajectory = run(engine)
    assert len({request.rid for request in engine.requests}) == 1
    for request in engine.requests:
        assert trajectory["input_ids"][0, : len(request.input_ids)].tolist() == request.input_ids
        assert {"</search>", "</answer>"} <= set(request.gconfig.stop)
    assert trajectory["rewards"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("slow", "took longer than 0.05 seconds"),
        ("refused", "The search failed: no such index."),
        ("broken", "The search failed: ValueError: boom"),
        ("nothing", "Nothing was found."),
        ("", "The search was empty."),
    ],
)
def test_what_goes_wrong_with_a_tool_is_text_for_the_model(query, message):
    flow = workflow(tool_timeout=0.05) if query == "slow" else workflow()
    trajectory = run(ScriptedEngine(f"<search>{query}</search>", "<answer>red king</answer>"), flow)
    assert message in text(trajectory)
    assert message not in trained_text(trajectory)
    assert trajectory["rewards"].item() == 1.0


def test_a_closing_tag_that_nothing_opened_is_told():
    assert "The search was empty" in text(run(ScriptedEngine("red</search>", "<answer>x</answer>")))


def test_without_a_tool_the_agent_is_told():
    trajectory = run(ScriptedEngine("<search>a</search>", "<answer>red king</answer>"), workflow(search_tool=None))
    assert "No search engine is connected." in text(trajectory)


def test_access_only_where_it_is_offered():
    turns = ["<access>u</access>", "<access>v</access>", "<answer>red king</answer>"]
    offered = run(ScriptedEngine(*turns), workflow(enable_access=True))
    assert "page text" in text(offered)
    assert "There is no page at this address." in text(offered)
    engine = ScriptedEngine(*turns)
    refused = run(engine)
    assert "page text" not in text(refused)
    assert "</access>" not in engine.requests[0].gconfig.stop
    assert "<access>" in workflow(enable_access=True, prompt_template=None).prompt_template
    assert "<access>" not in workflow(prompt_template=None).prompt_template


def test_an_episode_ends_without_an_answer_at_each_of_its_limits():
    ended = run(ScriptedEngine("no idea"))
    assert ended["rewards"].item() == 0.0
    assert not ended["truncated"].item()
    cut = run(ScriptedEngine("x" * 100))
    assert cut["truncated"].item()
    assert int(cut["loss_mask"].sum()) == 60
    flow = workflow()
    out_of_turns = run(ScriptedEngine(*["<search>a</search>"] * 4), flow)
    assert out_of_turns["rewards"].item() == 0.0
    assert len(flow.tool.queries) == 3  # nobody would have read what a fourth had found
    assert out_of_turns["loss_mask"][0, -1] == 1


def test_the_token_budget_holds_and_tool_text_is_cut_to_leave_room_for_an_answer():
    flow = workflow()
    flow.max_tokens = 130
    engine = ScriptedEngine("<search>a</search>", "<answer>red king</answer>")
    trajectory = run(engine, flow)
    assert trajectory["input_ids"].shape[1] <= 130
    assert trajectory["rewards"].item() == 1.0
    shown = text(trajectory)
    assert '\n\n<information>\n<document title="a' in shown
    assert "\n</information>\n\n<answer>" in shown
    assert "facts of" not in shown
    flow.max_tokens = 60
    assert run(ScriptedEngine("<search>a</search>", "<answer>red king</answer>"), flow)["truncated"].item()


def test_tools_may_be_plain_and_are_then_called_in_a_thread():
    class Plain:
        def search(self, query, topk):
            time.sleep(0.01)
            threads.append(threading.current_thread())
            return [{"title": query, "contents": None}] * topk

    threads = []
    shown = text(
        run(ScriptedEngine("<search>a</search>", "<answer>red king</answer>"), workflow(search_tool=Plain(), tool_timeout=30))
    )
    assert '<document title="a">' in shown
    assert threads[0] is not threading.main_thread()
    with pytest.raises(ConfigError, match=r"Plain has no access\(url\)"):
        workflow(search_tool=Plain(), enable_access=True)


def test_documents_that_cannot_be_shown_are_a_failed_call():
    class Odd:
        async def search(self, query, topk):
            return ["text instead of a document"]

    assert "The search failed: DataError: a document has no 'contents' (it is str)" in text(
        run(ScriptedEngine("<search>a</search>", "<answer>x</answer>"), workflow(search_tool=Odd()))
    )


def test_an_empty_answer_is_none():
    get_tracker("empty_answer").export(reset=True)
    run(ScriptedEngine("red</answer>"), workflow(rollout_stat_scope="empty_answer"))
    assert get_tracker("empty_answer").export(reset=True)["empty_answer/answered"] == 0.0


def test_a_plain_answer_text_and_several_accepted_answers():
    assert run(ScriptedEngine("<answer>red king</answer>"), answer="red king")["rewards"].item() == 1.0
    assert run(ScriptedEngine("<answer>blue</answer>"), answer=["x", "blue"])["rewards"].item() == 1.0
    assert run(ScriptedEngine("<answer> </answer>"))["rewards"].item() == 0.0
    with pytest.raises(WorkflowError, match="no 'question'"):
        asyncio.run(workflow().arun_episode(ScriptedEngine("x"), {"prompt": "a"}))


def test_braces_in_questions_and_templates_are_text():
    engine = ScriptedEngine("<answer>red king</answer>")
    trajectory = run(engine, workflow(prompt_template="{json: 1} {question} {}\n"), question="what is {contents}?")
    assert text(trajectory).startswith("{json: 1} what is {contents}? {}\n")


def test_a_group_is_one_sample_of_several_rows():
    flow = GroupedSearchAgentWorkflow(
        GenerationHyperparameters(max_new_tokens=60), TOKENIZER, 600, 4, 3, False, search_tool=Library(), topk=1
    )
    engine = ScriptedEngine("<search>a</search>", "<answer>red king</answer>")
    trajectory = asyncio.run(flow.arun_episode(engine, {"question": "who?", "answer": ["red king"]}))
    check_trajectory(trajectory)
    assert trajectory["rewards"].tolist() == [1.0] * 3
    assert len({request.rid for request in engine.requests}) == 3


def test_a_failing_member_ends_its_group():
    flow = GroupedSearchAgentWorkflow(GenerationHyperparameters(), TOKENIZER, group_size=2, search_tool=Library())
    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(flow.arun_episode(ScriptedEngine(RuntimeError("gone")), {"question": "q", "answer": "a"}))


def test_a_reward_function_of_ones_own_sees_prompt_completion_and_row():
    seen = {}

    async def reward(prompt, completion, prompt_ids, completion_ids, hops, **_columns):
        seen.update(prompt=prompt, completion=completion, hops=hops)
        return 0.25

    trajectory = run(ScriptedEngine("<search>a</search>", "<answer>x</answer>"), workflow(reward_fn=reward), hops=2)
    assert trajectory["rewards"].item() == 0.25
    assert seen["prompt"] == "Q who?\n"
    assert seen["completion"].endswith("<answer>x</answer>")
    assert seen["hops"] == 2


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"prompt_template has no \{question\}"):
        workflow(prompt_template="hello")
    with pytest.raises(ConfigError, match="search tool 'nonsense' was not found"):
        workflow(search_tool={"nonsense": 1})


def test_parsing():
    assert parse_action("<search>a</search> x <search> b\nc </search>", ("search",)) == ("search", "b\nc")
    assert parse_action("<search>a</search>", ("answer",)) is None
    assert parse_action("<search>a</search><answer>b</answer>") == ("answer", "b")
    assert parse_action("nothing") is None
    assert parse_action("<access>u</access>", ("search", "answer")) is None
    assert fill("{a}{b}", a="{b}", b="x") == "{b}x"


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [("James Bond", "james bond", 1.0), ("The Red King!", "red king", 1.0), ("James Smith", "James Bond", 0.5), ("", "x", 0.0),
     ("b b c", "b c c", 2 / 3), ("b c", "b b c", 0.8)],
)  # fmt: skip
def test_f1(prediction, truth, score):
    assert f1_score(prediction, truth) == pytest.approx(score)
