"""Dumps: readable, written beside the event loop, and never the end of a sample."""

import asyncio
import threading
from pathlib import Path

from rollwright.inference.request import ModelResponse
from rollwright.workflows.episode import dump_sample, task_name
from rollwright.workflows.multi_turn import MultiTurnWorkflow
from rollwright.workflows.turns import TokenSequence


async def test_a_slow_disk_does_not_hold_up_the_event_loop(tmp_path, monkeypatch):
    loop_went_on = threading.Event()

    write_text = Path.write_text

    def slow_write(*args, **kwargs):
        assert loop_went_on.wait(60)
        return write_text(*args, **kwargs)

    monkeypatch.setattr(Path, "write_text", slow_write)
    dumping = asyncio.create_task(dump_sample(tmp_path, version=3, task="t", sections={"prompt": "6*7="}))
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert not dumping.done()
    loop_went_on.set()
    path = await dumping
    assert path is not None
    assert "6*7=" in path.read_text()


async def test_where_the_disk_fails_the_sample_does_not(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert await dump_sample(tmp_path / "file", version=0, task="t", sections={}) is None


async def test_names_of_tasks_are_made_file_names(tmp_path):
    path = await dump_sample(
        tmp_path, version=3, task="a/b c?" + "x" * 200, sections={"one": "1", "two": "2"}, facts={"reward": 1}
    )
    assert path is not None
    assert path.parent == tmp_path / "3"
    assert path.name.startswith("a_b_c_xxx")
    assert len(path.name) < 100
    assert [line for line in path.read_text().splitlines() if "-" not in line] == ["reward: 1", "one", "1", "two", "2"]
    assert [task_name(task) for task in ({"query_id": "q", "id": 1}, {"id": 1}, {"ordinal": 0}, {})] == ["q", 1, 0, "task"]


async def test_a_sequence_says_which_of_its_tokens_were_sampled(tmp_path):
    class Letters:
        eos_token_id = pad_token_id = None

        def decode(self, ids, skip_special_tokens=False):
            return "".join(chr(ord("a") + token) for token in ids)

    sequence = TokenSequence([0, 1])
    sequence.append_response(ModelResponse([0, 1], [2, 3], [-1.0, -1.0], [5, 6]))
    sequence.append_context([4])
    workflow = MultiTurnWorkflow("exact_match_reward", None, Letters(), dump_dir=str(tmp_path))
    row = await workflow.end(sequence, {"id": 9}, 0.5)
    assert row["rewards"] == 0.5
    (path,) = tmp_path.glob("*/*.txt")
    assert path.parent.name == "5"
    assert [line for line in path.read_text().splitlines() if "---" not in line] == [
        "reward: 0.5",
        "tokens: 5, 2 of them sampled",
        "prompt",
        "ab",
        "episode",
        "cd⟦e⟧",
    ]
