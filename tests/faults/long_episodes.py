"""Whether kills change how long the trained episodes are: where only what was unfinished is done anew, long ones become rare.

A process that is killed again and again has a short time to finish an episode. One that begins anew is drawn anew, so that a short one
takes the place of a long one. An episode that goes on is as long as it was to be when it first began, whatever happened since.
"""

from __future__ import annotations

import random
from typing import Any

from .both import BothAsync
from .plan import Fault
from .proof import HOW_LONG, History, Proof, Sample
from .run import BATCH

WORKFLOW = f'''
"""An episode of 1 to 12 turns that take their time; how many is drawn by what no seed gives, as an engine without seeds would."""

import asyncio
import random
import uuid

from rollwright import ModelRequest, RolloutWorkflow, durable


class DrawsHowLong(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, kind, seconds):
        self.gconfig, self.tokenizer, self.kind, self.seconds = gconfig.new(n_samples=1, max_new_tokens=3), tokenizer, kind, seconds

    async def arun_episode(self, engine, data):
        rid = uuid.uuid4().hex
        with durable("{HOW_LONG}", kind=self.kind) as ask:
            turns = ask(random.SystemRandom().randint, 1, 12)
        ids = list(self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True))
        mask = [0] * len(ids)
        for _ in range(turns):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig, rid=rid))
            ids, mask = ids + response.output_tokens, mask + [1] * response.output_len
            await asyncio.sleep(self.seconds)
        return {{"input_ids": ids, "loss_mask": mask, "rewards": float(len(set(ids)))}}
'''


class LongEpisodes(BothAsync):
    """Killed at a fixed interval; every episode has to be as long as it was drawn when it first began.

    Args:
        interval: seconds from the first that a process writes to its kill.
        kind: of the call that draws: with ``restart``, an unfinished episode begins anew.
    """

    steps = 6

    def __init__(self, *arguments: Any, interval: float = 1.0, kind: str = "recorded") -> None:
        super().__init__(*arguments)
        self.interval, self.kind = interval, kind

    def write(self) -> None:
        """Write the config, with a workflow of its own."""
        arguments = f"{{kind: {self.kind}, seconds: {self.interval / 8}}}"
        self.write_config(self.steps, arguments, workflow="DrawsHowLong", parts=WORKFLOW)

    def plan(self, generator: random.Random, kills: int) -> list[Fault]:
        """Kills at the interval, as many as the run takes."""
        return [Fault("kill", 0, 0.001, self.interval, 0.0)] * kills

    def prove(self) -> Proof:
        """Every sample trained once, and none of another length than it was to have."""
        proof = super().prove()
        compare_lengths(self.history(), BATCH * (self.steps - self.slack), proof)
        return proof


def compare_lengths(history: History, ordinals: int, proof: Proof) -> None:
    """Note the lengths of all trained samples of the first ``ordinals`` tasks, and which are not those that they first had."""
    trained: dict[Sample, tuple[int, int]] = {
        sample: length for sample, length in sorted(history.trained_lengths().items()) if sample[0] < ordinals
    }
    proof.lengths = list(trained.values())
    proof.first_drawn = [history.first_drawn[sample] for sample in trained]
    others = [(drawn, calls) for drawn, (calls, _) in zip(proof.first_drawn, proof.lengths, strict=True) if drawn != calls]
    if others:
        shorter = sum(calls < drawn for drawn, calls in others)
        proof.wrong.append(
            f"{len(others)} of {len(trained)} episodes are not as long as they were when they first began: {shorter} are shorter"
        )
