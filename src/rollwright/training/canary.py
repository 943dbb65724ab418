"""The canary: a test publication that shows whether every engine computes with every tensor that it is given.

The audit that follows each publication cannot see a tensor that an engine skips as long as training has hardly changed it, and at the start
of a run nothing has changed at all. ``Canary.prove`` therefore publishes the weights once with every tensor changed clearly
(``seeded_change``), compares the engines' log-probabilities with the trainer's under the same change, then publishes the true weights and
audits them. If an engine disagrees, further test publications, in which only some tensors are changed, find those that do not reach it.

Invariants:

* afterwards the trainer's weights are those before, bit for bit;
* a test publication is labelled with the current version, and only probes are sampled from it;
* all ranks make the same decisions: rank 0 decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwright.errors import WeightUpdateError
from rollwright.inference.request import ModelResponse
from rollwright.inference.weights.names import as_published
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.fsdp import own_tensors, reshard, with_whole_weights
from rollwright.training.parallel import full_tensor
from rollwright.training.publish_and_audit import (
    Answers,
    Publisher,
    answer_rows,
    ask_engines,
    largest_difference,
    probe_request,
    require_version,
)
from rollwright.training.seeded_change import SeededChange, exchangeable, kind_of, layer_of

if TYPE_CHECKING:
    from rollwright.training.engine import TrainEngine

logger = getLogger("publish")

SEED = 20_261
PROMPT_TOKENS, NEW_TOKENS, NEW_TOKENS_IN_PROCESS = 24, 16, 6
#: An assumption about what an engine computes with is accepted if it explains its log-probabilities this much better than the weights that
#: were published.
_EXPLAINS = 0.25
#: The same for the assumption that nothing of the publication arrived. Leaving out the most visible kind may come near to it.
_EXPLAINS_ALL = 0.1
#: A kind of tensor is shown to arrive if, without it, the trainer's log-probabilities differ from the engine's this much more.
_SHOWS = 4.0
#: Differences below this are rounding (float32).
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Proof:
    """What a canary showed.

    Attributes:
        difference: largest mean difference of log-probabilities between an engine and the trainer, with every tensor changed.
        movement: for each kind of tensor, the mean difference that an engine would show that took all changes but this kind's.
        unclear: kinds whose movement is too small to show that they arrive.
        unreached: names of published tensors that the probe's log-probabilities do not depend on, such as experts without a token.
    """

    difference: float
    movement: dict[str, float] = field(default_factory=dict)
    unclear: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that follows."""
        clear = [size for kind, size in self.movement.items() if kind not in self.unclear]
        return {
            "canary/logprob_difference": self.difference,
            "canary/least_movement": min(clear, default=0.0),
            "canary/unreached": float(len(self.unreached)),
        }


class Canary:
    """Proves that published weights arrive.

    Args:
        trainer: the trainer whose weights are published.
        publisher: publishes them.
    """

    def __init__(self, trainer: TrainEngine, publisher: Publisher) -> None:
        self.trainer, self.publisher = trainer, publisher
        model, is_adapter = trainer.model, trainer.adapter is not None
        chosen = [
            name
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point() and (parameter.requires_grad or not is_adapter)
        ]
        self.change = SeededChange(model, chosen, SEED)
        self._version = trainer.version
        self._asked = 0
        self._close = 0.0

    def prove(self) -> Proof | None:
        """Publish changed weights, compare, publish the true weights under their current version, and audit them. Collective.

        Returns:
            What was shown; None if no engine answers probes, in which case only the true weights are published, or if none took the
            changed weights.

        Raises:
            WeightUpdateError: on every rank, if an engine does not compute with the weights that it was given; the message names the
                kind of tensor.
        """
        self._version = self.trainer.version
        self.publisher.before_first_step()
        sampler, proof = self.publisher.engine.sampler, None
        with sampler.proof() if parallel.rank() == 0 else nullcontext():
            if parallel.from_first_rank(lambda: sampler.can_be_probed):
                proof = self._proof()
            checksums = self._checksums() if proof is not None else {}
            self.publisher.publish(self.trainer, self._version)
            if proof is not None:
                parallel.from_first_rank(lambda: _refuse_unchanged(checksums, self._checksums(), set(self.change.names)))
        if proof is not None:
            self._report(proof)
        return proof

    def _proof(self) -> Proof | None:
        """Publish changed weights and compare. Returns None if no engine was there to take them."""
        names = self.change.names
        try:
            answers = self._publish(names)
            if not answers.responses:
                return None
            difference = self._differences(answers, names)
            without = {
                kind: self._differences(answers, [name for name in names if name not in left_out])
                for kind, left_out in _kinds(names).items()
            }
            limit = largest_difference(answers.tolerance, self.trainer.compute_dtype, answers.dtype)
            self._refuse(answers, difference, without, limit)
            unreached = self._unreached(answers)
        finally:
            self._change(())
        largest = max(difference.values())
        movement = {kind: min(by_engine.values()) for kind, by_engine in without.items()}
        unclear = [kind for kind, size in movement.items() if size < _SHOWS * max(largest, _ROUNDING)]
        return Proof(largest, movement, unclear, unreached)

    def _report(self, proof: Proof) -> None:
        if parallel.rank() != 0:
            return
        clear = {kind: size for kind, size in proof.movement.items() if kind not in proof.unclear}
        least = min(clear, key=clear.__getitem__, default="none")
        logger.info(
            "canary: with every tensor changed, the engine's log-probabilities differ from the trainer's by %.1e on average; without the "
            "change of one of %d kinds of tensors they would differ by at least %.1e (%s)",
            proof.difference,
            len(clear),
            clear.get(least, 0.0),
            least,
        )
        if proof.unclear:
            logger.warning(
                "canary: the probe does not show whether these kinds of tensors arrive: %s", ", ".join(proof.unclear)
            )
        if proof.unreached:
            logger.info(
                "canary: the probe does not reach %d published tensors: %s%s",
                len(proof.unreached),
                ", ".join(proof.unreached[:8]),
                ", …" if len(proof.unreached) > 8 else "",
            )

    # -- test publications ---------------------------------------------------------------------------------------------

    def _publish(self, changed: Collection[str]) -> Answers:
        """Publish with the change of some tensors, and return the engines' answers to the probe."""
        self._change(changed)
        self.publisher.transfer(self.trainer, self._version)
        answers = self._ask()
        for engine, response in answers.responses.items():
            require_version(engine, response, self._version)
        return answers

    def _ask(self) -> Answers:
        """Let the engines sample a probe. Each has another first token, so that no cached prefix of other weights could serve it."""
        in_process = self.publisher.engine.sampler.local_model is not None
        self._asked += 1
        request = probe_request(
            self.trainer.model,
            NEW_TOKENS_IN_PROCESS if in_process else NEW_TOKENS,
            length=PROMPT_TOKENS,
            first=7 + 3 * self._asked,
        )
        answers = ask_engines(self.publisher.engine, request)
        if answers is None:
            raise WeightUpdateError("The engine is paused and cannot answer the canary's probe: call resume() before.")
        return answers

    def _checksums(self) -> dict[str, dict[str, str]]:
        """On rank 0, return checksums of the tensors that the engines compute with. Publishing an adapter does not change them."""
        if parallel.rank() != 0 or self.trainer.adapter is not None:
            return {}
        return self.publisher.engine.sampler.checksums()

    def _change(self, changed: Collection[str]) -> None:
        reshard(self.trainer._scorer)
        self.change.make(changed)

    # -- the trainer's side --------------------------------------------------------------------------------------------

    def _batch(self, answers: Answers) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the distinct answers as a batch, and the row of each engine's answer."""
        batch, row_of = answer_rows(answers.responses.values())
        return batch, dict(zip(answers.responses, row_of, strict=True))

    def _scores(self, answers: Answers, changed: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the trainer's log-probabilities of each engine's answer. If ``changed`` is given, change exactly these tensors before."""
        if changed is not None:
            self._change(changed)
        batch, row_of = self._batch(answers)
        scores_BL = self.trainer.compute_logp(batch, loss_tokens_only=True).to("cpu", torch.float64)
        return {engine: _output(scores_BL[row_of[engine]], response) for engine, response in answers.responses.items()}

    def _differences(self, answers: Answers, changed: Collection[str] | None = None) -> dict[str, float]:
        """Return the mean difference of log-probabilities between each engine and the trainer; infinite if a value is not finite."""
        differences: dict[str, float] = {}
        for engine, scores in self._scores(answers, changed).items():
            mean = float((torch.tensor(answers.responses[engine].output_logprobs, dtype=torch.float64) - scores).abs().mean())
            differences[engine] = mean if mean == mean else float("inf")
        return differences

    def _unreached(self, answers: Answers) -> list[str]:
        """Return the published tensors whose gradient is zero: the log-probabilities of the answers do not depend on them. Collective.

        The gradients are taken under the change, because that of a LoRA A is zero as long as its B is.
        """
        self._change(self.change.names)
        model, is_adapter = self.trainer.model, self.trainer.adapter is not None
        batch, _ = self._batch(answers)
        with self.trainer.gradients_of_logp(batch) as gradients:
            shapes = {name: own_tensors(model)[name].shape for name in self.change.names}
            meta = [(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]

            def read() -> Any:
                for name, _ in meta:
                    gradient = gradients.get(name)
                    yield name, torch.zeros(shapes[name]) if gradient is None else full_tensor(gradient).float()

            def zeros(stream: WeightStream) -> list[str]:
                named = stream if is_adapter else as_published(model, stream)
                return [name for name, gradient in named if not bool(gradient.any())]

            return with_whole_weights(WeightStream(meta, read), zeros)

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def _refuse(
        self, answers: Answers, difference: dict[str, float], without: dict[str, dict[str, float]], limit: float
    ) -> None:
        """Raise an error if an engine's difference is above the limit, or is explained by tensors that did not arrive.

        Args:
            answers: the engines' answers, with every tensor changed.
            difference: of each engine.
            without: the differences of each engine if the change of a kind of tensor is left out, by kind.
            limit: largest accepted difference.
        """
        for engine, found in difference.items():
            if self._decided(lambda found=found: found <= min(limit, _ROUNDING)):
                continue
            explained = {kind: by_engine[engine] for kind, by_engine in without.items()}
            cause = self._assumed(answers, engine, found, explained)
            if cause is None and self._decided(lambda found=found: found <= limit):
                continue
            raise WeightUpdateError(
                f"{engine} does not compute with the weights that it is given: after a test publication in which every tensor was changed, "
                f"its log-probabilities differ from the trainer's by {found:.2e} on average (limit {limit:.0e}). "
                f"{self._searched(cause, engine, found, limit)} Nothing was trained. See whether the engine loads every tensor of an "
                "update also into copies that it has packed, fused or quantised; rollout.canary: false starts without this test."
            )

    def _assumed(self, answers: Answers, engine: str, found: float, without: dict[str, float]) -> str | None:
        """Return which assumption about what an engine computes with explains its answer, or None. Nothing is published for this.

        Args:
            answers: the engines' answers, with every tensor changed.
            engine: name of the engine.
            found: its difference.
            without: its difference if the change of a kind of tensor is left out, by kind.
        """
        causes = [(size, f"It computes with the old values of the {kind}.") for kind, size in without.items()]
        before = self._differences(answers, ())[engine] * _EXPLAINS / _EXPLAINS_ALL
        causes.append((before, f"They are those of the version before, although it reports version {self._version}."))
        causes += [
            (size, f"It takes {one} for {other}, and the other way round.")
            for (one, other), size in self._exchanged(answers, engine).items()
        ]
        size, cause = min(causes)
        return parallel.from_first_rank(lambda: cause if size < _EXPLAINS * found else None)

    def _searched(self, assumed: str | None, engine: str, found: float, limit: float) -> str:
        """Return what is wrong, found with further test publications if the difference is large enough to show in them."""
        if assumed is not None and (not assumed.startswith("It computes") or found <= limit):
            return assumed
        try:
            return (
                self._bisected(engine, limit) or assumed or "It also disagrees if nothing is changed, so no kind can be named."
            )
        except WeightUpdateError as error:
            return f"{assumed or ''} Looking for the cause failed: {error}".strip()

    def _bisected(self, engine: str, limit: float) -> str | None:
        """Return which tensors an engine does not take. None if it disagrees even with the true weights."""
        names = self.change.names
        if not self._agrees((), engine, limit):
            return None
        first = self._first_wrong(names, engine)
        kind, layer = kind_of(first), layer_of(first)
        groups = [
            (f"{first} ({kind}).", [first]),
            (f"all or several of the {kind}, such as {first}.", [name for name in names if kind_of(name) == kind]),
            (f"several tensors of layer {layer}, such as {first}.", [name for name in names if layer_of(name) == layer]),
        ]
        for text, group in groups:
            if self._agrees([name for name in names if name not in group], engine):
                return f"It does not take {text}"
        return f"It does not take tensors of several kinds, such as {first} ({kind})."

    def _decided(self, decide: Callable[[], bool]) -> bool:
        return bool(parallel.from_first_rank(decide))

    def _agrees(self, changed: Collection[str], engine: str, limit: float | None = None) -> bool:
        """Publish with the change of some tensors; return whether an engine's log-probabilities are the trainer's.

        Args:
            changed: the tensors.
            engine: name of the engine.
            limit: largest accepted difference. None takes one near the difference at the true weights, which was found first.
        """
        answers = self._publish(changed)
        if engine not in answers.responses:
            raise WeightUpdateError(f"{engine} was lost.")
        difference = self._differences(answers)[engine]
        if limit is not None:
            self._close = min(limit, max(4 * difference, 1e-4))
        accepted = self._close if limit is None else limit
        return self._decided(lambda: difference <= accepted)

    def _first_wrong(self, names: Sequence[str], engine: str) -> str:
        """Return the first tensor whose change an engine does not take, by bisection over the changed beginning of ``names``."""
        agreeing, failing = 0, len(names)
        while failing - agreeing > 1:
            middle = (agreeing + failing) // 2
            if self._agrees(names[:middle], engine):
                agreeing = middle
            else:
                failing = middle
        return names[failing - 1]

    def _exchanged(self, answers: Answers, engine: str) -> dict[tuple[str, str], float]:
        """Return an engine's difference if tensors of the same shape are exchanged, by the parts in which their names differ."""
        self._change(self.change.names)
        own = own_tensors(self.trainer.model)
        found: dict[tuple[str, str], float] = {}
        for parts, pairs in exchangeable({name: own[name].shape for name in self.change.names}).items():
            reshard(self.trainer._scorer)
            self.change.exchange(pairs)
            try:
                found[parts] = self._differences(answers)[engine]
            finally:
                reshard(self.trainer._scorer)
                self.change.exchange(pairs)
        return found


def _refuse_unchanged(changed: dict[str, dict[str, str]], true: dict[str, dict[str, str]], names: Collection[str]) -> None:
    """Compare the checksums of engines between the changed and the true weights; also of tensors that the probe does not reach.

    Args:
        changed: checksums by engine and by the engine's name of a tensor, with every tensor changed.
        true: the same with the true weights.
        names: the trainer's names of the tensors. Engines that fuse tensors have other names, and some of those may never change.

    Raises:
        WeightUpdateError: a tensor of one of these names is the same.
    """
    for engine, checksums in true.items():
        same = [name for name, checksum in checksums.items() if changed.get(engine, {}).get(name) == checksum]
        wrong = [name for name in same if name in names]
        if wrong:
            raise WeightUpdateError(
                f"{engine} does not take {wrong[0]} ({kind_of(wrong[0])}){f' and {len(wrong) - 1} more' if wrong[1:] else ''}: its checksum "
                "is the same for a test publication in which every tensor was changed and for the true weights."
            )
        if same:
            logger.warning("canary: %s reports the same checksums before and after for %s", engine, ", ".join(same[:8]))


def _kinds(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the tensors whose change is left out, by kind; norms together, and each of a layer's norms by itself."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind = kind_of(name)
        groups.setdefault(kind, []).append(name)
        if kind == "norms":
            groups.setdefault(f"norms ({name.split('.')[-2]})", []).append(name)
    return groups


def _output(scores_L: Tensor, response: ModelResponse) -> Tensor:
    start = len(response.input_tokens)
    return scores_L[start : start + len(response.output_tokens)]
