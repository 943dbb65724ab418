"""Opponents that are drawn by the results of earlier games: what is learned when, and the same after a kill."""

import random
from typing import Any

import pytest
from parts import FixedEngine

from rollwright import RolloutConfig
from rollwright.config.sections import JournalConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.environments.games import Nim
from rollwright.environments.games.nim import NimPosition
from rollwright.experience.journal.writing import Journal
from rollwright.inference.request import ModelResponse
from rollwright.rollout.executor import RolloutExecutor
from rollwright.workflows.self_play import SelfPlayWorkflow

TOKENIZER = build_character_tokenizer("0123456789 ab")
GAME = {"name": "nim", "heaps": 2, "largest": 4}


class NimPlayer(FixedEngine):
    """Plays the best move with the given probability, else a random one; the request's seed decides."""

    def __init__(self, skill):
        self.skill = skill

    async def agenerate(self, request):
        text = TOKENIZER.decode(request.input_ids, skip_special_tokens=False)
        position = NimPosition(tuple(map(int, text.rpartition("<|user|>")[2].partition("<|end|>")[0].split())))
        game, dice = Nim(2, 4), random.Random(request.seed)
        best = game.best_moves(position) if dice.random() < self.skill else []
        output = TOKENIZER.encode(dice.choice(best or game.moves(position)) + "<|end|>", add_special_tokens=False)
        facts = {"output_logprobs": [-0.5] * len(output), "output_versions": [self.version] * len(output)}
        return ModelResponse(input_tokens=list(request.input_ids), output_tokens=output, stop_reason="stop", **facts)


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """A pool whose version of step 1 plays at random, and that of step 2 perfectly."""
    skills = {}
    for step, skill in ((1, 0.0), (2, 1.0)):
        path = tmp_path / "checkpoints" / f"step-{step:06d}"
        path.mkdir(parents=True)
        skills[str(path)] = NimPlayer(skill)
    monkeypatch.setattr("rollwright.workflows.opponents.Opponents.engine", lambda self, path: skills[path])
    return tmp_path / "checkpoints"


class Trainer:
    """The loop of a run without training, which can be killed and resumed."""

    def __init__(self, versions, journal=None):
        self.checkpoint: Any = None
        pool = {"directory": str(versions), "choose": "win_rate", "share": 1.0, "decay": 1.0}
        self.workflow_of = lambda: SelfPlayWorkflow({"max_new_tokens": 4}, TOKENIZER, GAME, pool=pool)
        self.journal_directory: Any = journal
        self.rows = [{"heaps": [1 + n % 4, 1 + (n // 4) % 4], "ordinal": n} for n in range(1000)]
        self.opponents = {}  # step -> the opponent of each row, in the order of the batch
        self.games = {}  # step -> games of the pool after it

    def live(self, steps, killed_after=None):
        """Make the steps up to ``steps``; a kill leaves the journal as it is, after a batch was taken and before it was trained."""
        engine, first, state = NimPlayer(0.5), 0, None
        if self.checkpoint is not None:
            first, state = self.checkpoint
        engine.version = 2 + first
        engine.set_version = lambda version: setattr(engine, "version", version)
        journal = None if self.journal_directory is None else Journal(self.journal_directory, JournalConfig())
        config = RolloutConfig(sandbox="none", dynamic_filter="no_variance", max_head_offpolicyness=0)
        executor = RolloutExecutor(engine, config, seed=3, deterministic=True, batch_size=3, journal=journal)
        if state is not None:
            executor.load_state_dict(state)
            executor.recall([str(self.journal_directory)])
        workflow, source = self.workflow_of(), iter(self.rows[0 if state is None else state["next_ordinal"] :])
        for step in range(first + 1, steps + 1):
            batch = executor.prepare_batch(source, workflow, group_size=4, batch_size=3)
            self.opponents[step] = [name for name in batch["agent"] if name != "policy"]
            self.games[step] = dict(workflow.opponents.games)
            if step == killed_after:
                if journal is not None:
                    journal._is_closed = True
                break
            engine.set_version(2 + step)
            executor.set_version(2 + step)
            if step % 2 == 0:
                self.checkpoint = step, executor.state_dict()
                if journal is not None:
                    journal.checkpoint(step, executor.frontier)
        executor.destroy()
        if journal is not None:
            journal.close()
        return executor


def test_hard_opponents_come_to_be_drawn_more_often(versions):
    trainer = Trainer(versions)
    executor = trainer.live(12)
    games = trainer.games[12]
    assert games["step-000001"][1] / games["step-000001"][0] > games["step-000002"][1] / games["step-000002"][0]
    drawn = [name for step in range(5, 13) for name in trainer.opponents[step]]
    assert drawn.count("step-000002") > 1.5 * drawn.count("step-000001")
    assert executor.counters()["groups/dropped/no_variance"] > 5  # in no batch, but the pool knows their games
    assert sum(count for count, _ in games.values()) >= 4 * (12 * 3 + 5)


def test_a_run_that_is_killed_and_resumed_draws_the_same_opponents_and_keeps_its_win_rates(versions, tmp_path):
    whole = Trainer(versions)
    whole.live(10)
    assert {name for names in whole.opponents.values() for name in names} == {"step-000001", "step-000002"}
    cut = Trainer(versions, tmp_path / "journal")
    cut.live(10, killed_after=3)  # the checkpoint is that of step 2
    cut.live(10, killed_after=7)
    executor = cut.live(10)
    assert cut.checkpoint[0] == 10
    assert cut.opponents == whole.opponents
    assert cut.games == whole.games
    assert executor.counters()["samples/failed"] == 0


def test_results_of_complete_groups_that_no_batch_has_taken_are_in_the_checkpoint(versions):
    def executor_of(state=None):
        engine = NimPlayer(0.5)
        engine.version = 2
        executor = RolloutExecutor(engine, RolloutConfig(sandbox="none", max_head_offpolicyness=3), seed=3, batch_size=2)
        if state is not None:
            executor.load_state_dict(state)
        return executor

    trainer = Trainer(versions)
    first, workflow = executor_of(), trainer.workflow_of()
    first.prepare_batch(iter(trainer.rows[:8]), workflow, group_size=2, batch_size=2)
    first.settle()
    state, games = first.state_dict(), dict(workflow.opponents.games)
    first.destroy()
    assert sum(count for count, _ in games.values()) == 4
    assert len(state["finished"]) >= 2
    second, workflow = executor_of(state), trainer.workflow_of()
    second.prepare_batch(iter(trainer.rows[state["next_ordinal"] : 20]), workflow, group_size=2, batch_size=2)
    assert sum(count for count, _ in workflow.opponents.games.values()) == 8
    second.destroy()
