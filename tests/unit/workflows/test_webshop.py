import asyncio

import pytest
from parts import FixedEngine, played

from rollwright.config.tasksets import TasksetConfig
from rollwright.data.tokenizer import ASCII, build_word_tokenizer
from rollwright.environments.shop.shop import shop
from rollwright.environments.shop.tasks import vocabulary, worked_steps
from rollwright.errors import PromptTooLongError, WorkflowError
from rollwright.inference.request import ModelResponse
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.webshop import SYSTEM_PROMPT, parse_action

TOKENIZER = build_word_tokenizer(vocabulary(), characters=ASCII)
SHOP = {"seed": 1, "products": 200, "goals": 60, "page_size": 5}


class ScriptedEngine(FixedEngine):
    def __init__(self, replies):
        self.replies, self.prompts = list(replies), []

    async def agenerate(self, request):
        self.prompts.append(TOKENIZER.decode(request.input_ids))
        reply = self.replies.pop(0) if self.replies else "<action>click[nothing]</action>"
        if isinstance(reply, Exception):
            raise reply
        ids = [*TOKENIZER.encode(reply, add_special_tokens=False), TOKENIZER.eos_token_id]
        return ModelResponse(request.input_ids, ids, [-0.1] * len(ids), [0] * len(ids), rid=request.rid)


def visit(engine, session_id=3, **arguments):
    taskset = TasksetConfig(workflow="webshop_workflow", workflow_args={"shop": SHOP, **arguments})

    return asyncio.run(played(taskset, {"session_id": session_id}, engine, TOKENIZER))


def test_a_visit_is_one_experience_whose_trained_tokens_are_the_replies():
    actions = [action for _, action in worked_steps(shop(**SHOP), 3)]
    replies = [f"<think>look</think><action>{action}</action>" for action in actions]
    engine = ScriptedEngine(replies)
    [experience], trajectory = visit(engine)
    assert experience.reward == 1.0
    assert experience.metrics == {"steps": len(actions), "bought": 1.0, "invalid_actions": 0}
    mask = trajectory["loss_mask"][0].bool()
    assert TOKENIZER.decode(trajectory["input_ids"][0][mask], skip_special_tokens=True) == "".join(replies)
    assert SYSTEM_PROMPT in engine.prompts[0]
    assert "Possible: search[words]" in engine.prompts[0]
    for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False):
        assert later.startswith(earlier)


def test_without_a_purchase_the_reward_is_negative_and_the_steps_are_bounded():
    engine = ScriptedEngine([])
    [experience], _ = visit(engine, max_steps=4)
    assert experience.reward == -0.1
    assert len(engine.prompts) == 4
    assert experience.metrics["invalid_actions"] == 4


def test_what_is_wrong_with_an_action_is_told():
    engine = ScriptedEngine(["mug please", "<action>click[b0001]</action>", "<action>search[mug]</action>"])
    visit(engine, max_steps=4)
    assert "Give one action between <action> and </action>." in engine.prompts[1]
    assert "This action is not available here." in engine.prompts[2]
    assert "results" in engine.prompts[3]


def test_a_full_context_ends_the_visit_with_what_was_said():
    [experience], _ = visit(ScriptedEngine(["<action>search[mug]</action>", PromptTooLongError("full")]))
    assert experience.reward == -0.1
    with pytest.raises(PromptTooLongError):
        visit(ScriptedEngine([PromptTooLongError("full")]))


def test_own_prompt_and_bare_pages():
    engine = ScriptedEngine(["<action>search[mug]</action>"])
    visit(engine, system_prompt="", show_actions=False, max_steps=2)
    assert engine.prompts[0].startswith("<|user|>Instruction: find a ")
    assert "Possible" not in engine.prompts[1]


def test_wrong_arguments_and_sessions_are_named():
    with pytest.raises(WorkflowError, match="has no argument steps"):
        visit(ScriptedEngine([]), steps=3)
    with pytest.raises(WorkflowError, match="names no shop session"):
        visit(ScriptedEngine([]), session_id="abc")


def test_the_last_well_formed_action_counts():
    assert parse_action("<action>search[a]</action> no <action>click[b]</action>") == "click[b]"
    assert parse_action("<action>dance[a]</action>") is None
    assert parse_action("search[a]") is None


def test_it_is_registered():
    assert WORKFLOWS.get("webshop_workflow").__name__ == "WebShopWorkflow"
