"""Teachers score the tokens of finished samples before the samples count as complete.

Invariants:

* a teacher returns one finite log-probability for each token that it was asked about, of that token; anything else fails the sample with an
  error that names teacher, task and counts;
* scores are results of a durable call: they are in the journal with their episode, so a resumed run does not ask for them again;
* every training row gets the teachers' columns; a row whose task no teacher teaches has ``teacher_weights`` 0.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.teachers import TeacherConfig
from rollwright.errors import ConfigError, EngineError, WorkflowError
from rollwright.experience.contract import LARGEST_LOGPROB, MULTI_MODAL, TEACHER_TOP, Trajectory
from rollwright.experience.durable import durable
from rollwright.experience.trajectory import row_lengths
from rollwright.inference.engine import InferenceEngine, run_concurrently
from rollwright.inference.request import ModelRequest, ModelResponse

#: Largest accepted difference between the log-probability of a token and that of the same token among the most likely ones.
_SAME = 1e-2


@dataclass(frozen=True)
class Scores:
    """A teacher's scores of the tokens of one row from index ``first`` on.

    Attributes:
        logprobs: ``[N]`` log-probabilities of the tokens.
        top_ids, top_logprobs: ``[N, K]``, the most likely tokens at these places; ``K`` may be 0.
    """

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Teacher:
    """Scores rows with one model.

    Args:
        config: the teacher's section.
        engine: computes the model. None uses the engine of the sample, so that the policy is its own teacher.
        tokenizer: the policy's tokenizer; encodes ``config.context``.
    """

    def __init__(self, config: TeacherConfig, engine: InferenceEngine | None, tokenizer: Any) -> None:
        self.config, self.engine = config, engine
        self._tokenizer = tokenizer

    def teaches(self, task: Mapping[str, Any]) -> bool:
        """Return whether ``config.tasks`` selects a task."""
        return all(
            task.get(field) in (value if isinstance(value, list) else [value]) for field, value in self.config.tasks.items()
        )

    async def scores(
        self,
        engine: InferenceEngine | None,
        ids: list[int],
        first: int,
        temperature: float,
        top_k: int,
        task: Mapping[str, Any],
        name: object,
    ) -> Scores:
        """Score the tokens of a row from ``first`` on, or return the recorded scores.

        Args:
            engine: engine of the sample; None if there is none, because no teacher is the policy.
            ids: the row's tokens.
            first: index of the first token to score; at least 1.
            temperature: of the softmax.
            top_k: number of most likely tokens to return.
            task: the task, for ``config.context``.
            name: name of the sample, for messages.

        Raises:
            EngineError: the teacher did not score these tokens.
        """
        context = self._context(task, name)
        own = self.engine or engine
        if own is None:
            raise ConfigError(f"{self._about(name)} is the policy, and no engine samples with it here; use a stage of kind rl.")

        async def ask(ids: list[int], first: int, temperature: float, top_k: int) -> list[bytes]:
            gconfig = GenerationHyperparameters(max_new_tokens=1, temperature=temperature)
            request = ModelRequest(ids, gconfig, prompt_logprobs_from=first, top_logprobs=top_k, seed=0)
            try:
                response = await own.agenerate(request)
            except EngineError as error:
                raise type(error)(f"{self._about(name)} did not score {len(ids) - first} tokens: {error}") from error
            self._check(request, response, name)
            return _packed(response, top_k)

        kept = await durable(f"teacher {self.config.name}")(ask)([*context, *ids], len(context) + first, temperature, top_k)
        return _unpacked(kept, top_k)

    def _about(self, name: object) -> str:
        return f"teacher {self.config.name!r}, {name}"

    def _context(self, task: Mapping[str, Any], name: object) -> list[int]:
        """Return the tokens that the teacher sees before the prompt."""
        if not self.config.context:
            return []
        try:
            text = string.Formatter().vformat(self.config.context, (), task)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{self._about(name)}: context {self.config.context!r:.100} cannot be filled ({type(error).__name__}: {error}); the task "
                f"has the fields {', '.join(sorted(map(str, task)))}. Write {{{{ and }}}} for braces."
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _check(self, request: ModelRequest, response: ModelResponse, name: object) -> None:
        """Raise an error unless the response has one score for each requested token.

        Raises:
            EngineError: scores are missing, not finite, or of other tokens.
        """
        ids, first = request.input_ids, request.prompt_logprobs_from or 0
        wanted, top_k = len(ids) - first, request.top_logprobs or 0
        about = f"{self._about(name)}"

        def refuse(what: str) -> EngineError:
            return EngineError(
                f"{about}: {what}. Nothing of the sample was trained. See the teacher's server and its log; it has to return prompt "
                "log-probabilities."
            )

        answered = response.prompt(request)
        if not answered.equals(ids):
            raise refuse(f"it scored {len(answered)} other tokens than the {len(ids)} that it was given")
        scores = response.input_logprobs
        if not scores:
            raise refuse(f"it returned no log-probabilities for {wanted} tokens")
        if len(scores) != wanted:
            raise refuse(f"it returned log-probabilities of {len(scores)} tokens for {wanted}")
        wrong = [
            index for index, score in enumerate(scores) if score is None or not math.isfinite(score) or score > LARGEST_LOGPROB
        ]
        if wrong:
            raise refuse(
                f"{len(wrong)} of {wanted} log-probabilities are none, first {scores[wrong[0]]} at token {first + wrong[0]}"
            )
        if not top_k:
            return
        tops = response.input_top_logprobs or []
        complete = [top for top in tops if top is not None and len(top) >= top_k]
        if len(tops) != wanted or len(complete) != wanted:
            raise refuse(f"it returned the {top_k} most likely tokens at {len(complete)} of {wanted} places")
        for index, (token, score, top) in enumerate(zip(ids[first:], scores, complete, strict=True)):
            same = dict(top).get(token)
            if same is not None and score is not None and abs(same - score) > _SAME:
                raise refuse(
                    f"it gives token {token} at {first + index} the log-probability {score:.3f}, and {same:.3f} among the most likely tokens"
                )


class Teachers:
    """Adds the teachers' columns to rows: ``teacher_logprobs``, ``teacher_weights`` and, with ``top_k``, ``TEACHER_TOP``.

    Args:
        teachers: the teachers.
        top_k: number of most likely tokens to keep; 0 keeps none.
        skip_tokens: number of trained tokens at the beginning of each row that are not taught.
        opened: closes the teachers' engines.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        *,
        top_k: int = 0,
        skip_tokens: int = 0,
        opened: ExitStack | None = None,
    ) -> None:
        self.teachers = list(teachers)
        self._top_k, self._skip_tokens = top_k, skip_tokens
        self._opened = opened or ExitStack()

    async def score(self, rows: Trajectory, engine: InferenceEngine | None, task: Mapping[str, Any], name: object) -> None:
        """Score the trained tokens of a sample's rows, and add the columns.

        Args:
            rows: rows of a sample, or of a dataset; scored at their ``temperature``, or at 1 without one.
            engine: engine of the sample, which a teacher that is the policy uses; None if there is no such teacher.
            task: the task.
            name: name of the sample, for messages.

        Raises:
            EngineError: a teacher did not score a token that it was asked about.
            WorkflowError: rows have images or branches, which teachers cannot score; or several teachers' most likely tokens would
                have to be mixed.
        """
        shape = tuple(rows["input_ids"].shape)
        rows["teacher_logprobs"], rows["teacher_weights"] = torch.zeros(shape), torch.zeros(shape)
        if self._top_k:
            rows[TEACHER_TOP[0]] = torch.zeros(*shape, self._top_k, dtype=torch.int64)
            rows[TEACHER_TOP[1]] = torch.zeros(*shape, self._top_k)
        teachers = [each for each in self.teachers if each.teaches(task)]
        if not teachers:
            return
        self._refuse_rows(rows, teachers, name)
        await run_concurrently(
            self._score_row(rows, row, length, teachers, engine, task, name)
            for row, length in enumerate(row_lengths(rows).tolist())
        )

    def close(self) -> None:
        """Close the teachers' engines. Idempotent."""
        self._opened.close()

    async def _score_row(
        self,
        rows: Trajectory,
        row: int,
        length: int,
        teachers: Sequence[Teacher],
        engine: InferenceEngine | None,
        task: Mapping[str, Any],
        name: object,
    ) -> None:
        trained_L = rows["loss_mask"][row].bool() & rows["attention_mask"][row].bool()
        places = trained_L.nonzero()[self._skip_tokens :, 0]
        if not len(places):
            return
        ids, first, temperature = (
            rows["input_ids"][row, :length].tolist(),
            int(places[0]),
            float(rows["temperature"][row]) if "temperature" in rows else 1.0,
        )
        found = await run_concurrently(
            each.scores(engine, ids, first, temperature, self._top_k, task, name) for each in teachers
        )
        weights = [each.config.weight for each in teachers]
        loss_weights = [each.config.loss_weight for each in teachers]
        logprobs = mixture_logp([each.logprobs for each in found], weights) if len(found) > 1 else found[0].logprobs
        taught = places - first
        rows["teacher_logprobs"][row, places] = logprobs[taught]
        rows["teacher_weights"][row, places] = float(np.average(loss_weights, weights=weights))
        if self._top_k:
            rows[TEACHER_TOP[0]][row, places] = found[0].top_ids[taught]
            rows[TEACHER_TOP[1]][row, places] = found[0].top_logprobs[taught]

    def _refuse_rows(self, rows: Trajectory, teachers: Sequence[Teacher], name: object) -> None:
        names = " and ".join(repr(each.config.name) for each in teachers)
        if self._top_k and len(teachers) > 1:
            raise WorkflowError(
                f"{name}: the teachers {names} both teach this task, and their most likely tokens differ, so they cannot be mixed for this "
                "distillation.loss. Divide the tasks between them (teachers.tasks), or use the loss advantage, k1, k2 or k3."
            )
        if any(rows.get(MULTI_MODAL) or []):
            raise WorkflowError(f"{name}: teacher {names} scores text, and the rows have images. Train them without a teacher.")
        for key in ("branch_ids", "position_ids"):
            if rows.get(key) is not None:
                raise WorkflowError(
                    f"{name}: teacher {names} scores plain sequences, and the rows have {key} (isolated branches)."
                )


def mixture_logp(logps: list[Tensor], weights: list[float]) -> Tensor:
    """Return ``log Σ wᵢ pᵢ``, the log-probabilities of a mixture of teachers. The weights are scaled to a sum of 1."""
    total = sum(weights)
    weighted = [
        logp.double() + torch.tensor(weight / total).double().log() for logp, weight in zip(logps, weights, strict=True)
    ]
    return torch.logsumexp(torch.stack(weighted), 0).to(logps[0].dtype)


def _packed(response: ModelResponse, top_k: int) -> list[bytes]:
    tops = [top[:top_k] for top in response.input_top_logprobs or [] if top is not None] if top_k else []
    return [
        np.asarray(response.input_logprobs, dtype="<f4").tobytes(),
        np.asarray([[token for token, _ in top] for top in tops], dtype="<i4").tobytes(),
        np.asarray([[score for _, score in top] for top in tops], dtype="<f4").tobytes(),
    ]


def _unpacked(packed: list[bytes], top_k: int) -> Scores:
    logprobs, ids, scores = (np.frombuffer(part, kind).copy() for part, kind in zip(packed, ("<f4", "<i4", "<f4"), strict=True))
    shape = (len(logprobs), top_k)
    return Scores(
        torch.from_numpy(logprobs), torch.from_numpy(ids).long().reshape(shape), torch.from_numpy(scores).reshape(shape)
    )


def refuse_other_tokenizer(policy: Any, teacher: Any, name: str) -> None:
    """Raise an error if a token of the policy is another token of the teacher. The teacher may know further tokens.

    Args:
        policy: tokenizer of the policy.
        teacher: tokenizer of the teacher.
        name: name of the teacher, for the message.

    Raises:
        ConfigError: the tokenizers differ; the message gives the first token that does.
    """
    own, other = ({number: token for token, number in each.get_vocab().items()} for each in (policy, teacher))
    for number in sorted(own):
        if own[number] != other.get(number):
            raise ConfigError(
                f"teacher {name!r} has another tokenizer than the policy: token {number} is {own[number]!r} for the policy and "
                f"{other.get(number)!r} for the teacher, so its log-probabilities would be of other tokens. Use a teacher of the same "
                "model family, or train on its texts with a stage of kind sft."
            )
