"""A recorded model call, sampled again from any of its tokens. The viewer runs this module in a process of its own.

The first tokens of the answer are kept, and the engine goes on from there. If the call is the episode's last, the episode's workflow then
runs once more: the journal answers all calls but this one, and the reward is computed again.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import ReplayError, RollwrightError
from rollwright.experience.journal.episodes import RecordedCall, RecordedEpisode
from rollwright.experience.journal.records import images_in
from rollwright.experience.recorder import TOKEN_TYPE
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.processes.child import connect
from rollwright.rewards.wrapper import REWARD_CALLS
from rollwright.rollout.replay import Replayer
from rollwright.trainers.modes.recorded_runs import RunReplay

#: Kinds of messages to the parent: the engine is ready, an answer (JSON), and an error (text).
READY, ANSWER, ERROR = b"R", b"A", b"E"


@dataclass
class Question:
    """Which call to sample again, and from where.

    Attributes:
        episode: the recorded episode.
        call: index of the call in it.
        token: number of tokens of the recorded answer that are kept.
        seed: seed of the request. None draws one.
    """

    episode: RecordedEpisode
    call: int
    token: int
    seed: int | None = None


class CallSampler:
    """Samples recorded calls of one run again, with one model.

    Args:
        run: directory of the run or stage.
        model: directory or name of the model.
        directory: working directory of the process, at which relative paths of the run's config begin.
    """

    def __init__(self, run: str, model: str, directory: str) -> None:
        os.chdir(directory)
        self.replay = RunReplay(Path(run), model=model)
        engine = self.replay.replayer.engine
        assert engine is not None
        self.engine = engine
        replayer = self.replay.replayer
        self.scorer = Replayer(
            replayer.choose,
            seed=replayer.seed,
            sandbox=replayer.sandbox,
            fresh=(REWARD_CALLS,),
            compares_rewards=False,
            find_image=replayer.find_image,
        )

    def sample(self, question: Question) -> dict[str, Any]:
        """Sample the call again.

        Returns:
            ``output`` (ids, the kept ones first), ``logprobs`` (of all of them), ``kept``, ``stop_reason``, ``seed``, and ``rewards`` of the
            episode's rows with this answer; if there are none, ``why`` says why.

        Raises:
            ReplayError: the call cannot be sampled again.
        """
        episode, recorded = question.episode, _call_of(question)
        kept = question.token
        seed = question.seed if question.seed is not None else random.randrange(2**31)
        gconfig = _arguments(recorded, kept, seed)
        prompt = [*recorded.prompt.tolist(), *recorded.output[:kept].tolist()]
        request = ModelRequest(prompt, gconfig, rid=uuid.uuid4().hex, tokenizer=self.replay.tokenizer)
        response = asyncio.run(self.engine.agenerate(request))
        output = [*recorded.output[:kept].tolist(), *response.output_tokens]
        logprobs = [*recorded.logprobs[:kept].tolist(), *response.output_logprobs]
        told: dict[str, Any] = {"output": output, "logprobs": logprobs, "kept": kept, "stop_reason": response.stop_reason}
        is_last = question.call == len(episode.calls) - 1
        rewards, why = (
            self._rewards(question, output, logprobs, response) if is_last else ([], "it is not the episode's last call")
        )
        return {**told, "seed": seed, "rewards": rewards, "why": why}

    def _rewards(
        self, question: Question, output: list[int], logprobs: list[float], response: ModelResponse
    ) -> tuple[list[float], str]:
        """Run the episode's workflow with the new answer. Returns the rewards of its rows, or none and why there are none."""
        episode, recorded = question.episode, _call_of(question)
        changed = msgspec.structs.replace(
            recorded.call,
            output=np.array(output, dtype=TOKEN_TYPE).tobytes(),
            logprobs=np.array(logprobs, dtype="<f8").tobytes(),
            versions=max(0, int(recorded.versions.max(initial=0))),
            stop_reason=response.stop_reason,
            stop_match=response.stop_match,
        )
        calls = [*episode.calls[: question.call], replace(recorded, call=changed)]
        results = [each for each in episode.results if not each.name.startswith(REWARD_CALLS)]
        (again,) = self.scorer.replay([RecordedEpisode(episode.begin, calls, results, writer=episode.writer)])
        if again.rewards:
            return again.rewards, ""
        if isinstance(again.error, ReplayError):
            return [], "with this answer the episode goes on, with calls that the journal does not have"
        return [], again.why or "the workflow returned no row"


def _call_of(question: Question) -> RecordedCall:
    """Return the call that a question is about.

    Raises:
        ReplayError: there is no such call or token, or it cannot be sampled from its tokens alone.
    """
    episode = question.episode
    if not 0 <= question.call < len(episode.calls):
        raise ReplayError(f"{episode.name} has {len(episode.calls)} calls, and no call {question.call}.")
    recorded = episode.calls[question.call]
    if recorded.call.refused is not None:
        raise ReplayError(f"call {question.call} of {episode.name} was refused: it has no answer.")
    if not 0 <= question.token < max(1, len(recorded.output)):
        raise ReplayError(
            f"the answer of call {question.call} of {episode.name} has {len(recorded.output)} tokens; not {question.token}."
        )
    if any(images_in(episode.task())):
        raise ReplayError(
            f"the task of {episode.name} has images, which the journal does not keep, so its calls are not sampled again."
        )
    if recorded.call.layout is not None:
        raise ReplayError(
            f"call {question.call} of {episode.name} has position ids of its own, with which it cannot be sampled again."
        )
    return recorded


def _arguments(recorded: RecordedCall, kept: int, seed: int) -> GenerationHyperparameters:
    """Return the call's generation arguments for the tokens that are left."""
    gconfig = GenerationHyperparameters.from_names(**recorded.gconfig)
    left = {"max_new_tokens": max(1, gconfig.max_new_tokens - kept), "min_new_tokens": max(0, gconfig.min_new_tokens - kept)}
    return gconfig.new(**left, n_samples=1, seed=seed)


def main() -> int:
    """Load the model, then answer questions until the parent ends."""
    channel, setup = connect()

    def attempt(kind: bytes, function: Callable[[], Any]) -> Any:
        try:
            made = function()
        except Exception as error:  # engines and workflows may raise anything; the page shows it, and the process goes on
            told = str(error) if isinstance(error, RollwrightError) else f"{type(error).__name__}: {error}"
            channel.send(ERROR, told.encode("utf-8", "replace"))
            return None
        channel.send(kind, b"" if kind == READY else json.dumps(made).encode())
        return made

    sampler = attempt(READY, lambda: CallSampler(**setup))
    while sampler is not None:
        try:
            _, body = channel.receive()
        except EOFError:
            return 0
        question = Question(**pickle.loads(body))  # noqa: S301 - from our own parent
        attempt(ANSWER, lambda question=question: sampler.sample(question))
    return 1
