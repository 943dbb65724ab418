import asyncio

import pytest
from parts import FixedEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import ConfigError
from rollwright.experience.contract import check_trajectory
from rollwright.inference.request import ModelResponse
from rollwright.workflows.tool_integrated import SYSTEM_PROMPT, ToolIntegratedWorkflow, parse_script

pytestmark = pytest.mark.usefixtures("bubblewrap")

TOKENIZER = build_character_tokenizer()


class ScriptedEngine(FixedEngine):
    version = 1

    def __init__(self, *turns):
        self.turns, self.requests = list(turns), []

    async def agenerate(self, request):
        self.requests.append(request)
        said = TOKENIZER.encode(self.turns.pop(0), add_special_tokens=False)
        ids = said[: request.gconfig.max_new_tokens]
        reason = "length" if len(ids) < len(said) else "stop"
        return ModelResponse(request.input_ids, ids, [-0.5] * len(ids), [1] * len(ids), reason)


def run(*turns, **options):
    options = {"max_tokens": 2000, "script_timeout": 60.0, **options}
    workflow = ToolIntegratedWorkflow("arithmetic_reward", GenerationHyperparameters(max_new_tokens=200), TOKENIZER, **options)
    engine = ScriptedEngine(*turns)
    data = {"messages": [{"role": "user", "content": "17*23?"}], "answer": "391"}
    trajectory = asyncio.run(workflow.arun_episode(engine, data))
    check_trajectory(trajectory)
    mask = trajectory["loss_mask"][0].bool()
    ids = trajectory["input_ids"][0]
    return trajectory, TOKENIZER.decode(ids), TOKENIZER.decode(ids[mask]), engine


def test_a_script_is_run_and_its_output_read_but_not_trained():
    turns = ("let me see <python>\nprint(17*23)\n</python>", "<answer>391</answer>")
    trajectory, text, trained, engine = run(*turns)
    assert "\n<output>\n391\n</output>\n" in text
    assert trained == "".join(turns)
    assert trajectory["rewards"].item() == 1.0
    assert "</python>" in engine.requests[0].gconfig.stop
    assert SYSTEM_PROMPT in text


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("print(1); 1/0", "1\nZeroDivisionError: division by zero"),
        ("x = 1", "The script printed nothing."),
        ("while True: pass", "The script was stopped after 0.5 seconds."),
        ("def (", "SyntaxError"),
        ("print('y' * 500)", "yyy\n...\nyyy"),
        ("\n    for n in range(2):\n        print(n)\n    ", "0\n1"),
    ],
)
def test_what_goes_wrong_in_a_script_is_text_for_the_model(script, shown):
    limit = {"max_output_characters": 6} if "500" in script else {"script_timeout": 0.5} if "while" in script else {}
    _, text, trained, _ = run(f"<python>{script}</python>", "<answer>391</answer>", **limit)
    assert shown in text
    assert shown not in trained


def test_the_turns_and_tokens_are_bounded():
    _, _, _, engine = run(*["<python>print(1)</python>"] * 5, max_turns=2)
    assert len(engine.requests) == 2
    trajectory, _, _, _ = run("<python>print('z' * 400)</python>", "<answer>391</answer>", max_tokens=300)
    assert trajectory["input_ids"].shape[1] == 300
    assert trajectory["truncated"].item()


def test_with_python_switched_off_the_model_is_told():
    trajectory, text, trained, _ = run("<python>print(17*23)</python>", "<answer>391</answer>", run_scripts=False)
    assert "\n<output>\nPython is switched off.\n</output>\n" in text
    assert "switched off" not in trained
    assert trajectory["rewards"].item() == 1.0


def test_output_is_shown_as_the_template_says():
    _, text, _, _ = run("<python>print('{output}')</python>", "<answer>391</answer>", output_template="<o>{output}</o>")
    assert text.endswith("</python><o>{output}</o><answer>391</answer>")


def test_episodes_are_dumped_readable(tmp_path):
    run("<python>print(17*23)</python>", "<answer>391</answer>", dump_dir=str(tmp_path))
    (dumped,) = (tmp_path / "1").glob("task-*.txt")
    lines = dumped.read_text().splitlines()
    assert lines[:4] == ["reward: 1.0", "turns: 2", "scripts: 1", "failed_scripts: 0"]
    assert lines[4].startswith("tokens: ")
    assert "<python>print(17*23)</python>⟦" in lines
    assert lines[-1] == "⟧<answer>391</answer>"


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError):
        run("x", max_turns=0)
    with pytest.raises(ConfigError, match=r"script_limits has memory; it may hold memory_bytes"):
        run("x", script_limits={"memory": 1})
    with pytest.raises(ConfigError, match=r"output_template has no \{output\}"):
        run("x", output_template="<o>")


def test_parsing():
    assert parse_script("a<python>1</python> b <python>2\n</python>") == "2"
    assert parse_script("<python>1</python> and then text") is None
    assert parse_script("1</python>") == ""
    assert parse_script("<python>\n  if 1:\n    2\n  </python>") == "if 1:\n  2"


def test_long_output_leaves_room_for_an_answer():
    turns = ("<python>print('z' * 400)</python>", "<answer>391</answer>")
    trajectory, text, _, _ = run(*turns, max_tokens=330)
    assert trajectory["input_ids"].shape[1] <= 330
    assert trajectory["rewards"].item() == 1.0
    assert "zz\n</output>\n<answer>" in text
    assert text.count("z") < 400
