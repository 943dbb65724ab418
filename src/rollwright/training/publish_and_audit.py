"""Publish new weights to the inference engines, and check that they compute with them.

An engine that shares the trainer's weights does not sample between the first optimizer step of an update and the publication:
``before_first_step`` pauses the engine, ``publish`` sets the next version and resumes it. After each publication, the engines answer a
fixed request (the probe), and their log-probabilities are compared with the trainer's, because a version label proves nothing. Rank 0
sends the probe, and all ranks score and compare the answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import WeightUpdateError
from rollwright.experience.contract import ROUTED_EXPERTS
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.inference.backends import BACKENDS
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.engine import TOLERANCE_OF_16_BITS, InferenceEngine, WeightReceiver, takes_no_weights
from rollwright.inference.network import find_server_addresses
from rollwright.inference.remote import CONNECTED_ENGINES, RemoteInferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.routed_experts import int32_of_record, number_of_experts, record_of_int32
from rollwright.inference.weights.names import as_published
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.fsdp import is_sharded, with_whole_weights

if TYPE_CHECKING:
    from rollwright.inference.weights.transfer import WeightUpdateMeta
    from rollwright.training.engine import TrainEngine

logger = getLogger("publish")

#: Temperature of the probe. At 1, an engine that leaves the temperature out of its log-probabilities would pass the audit.
TEMPERATURE = 0.7
PROMPT_TOKENS, NEW_TOKENS = 12, 16
#: Number of tokens that an engine in the trainer's process samples for the probe: one in the prefill and one in a decode step. The tokens
#: of the next batch are compared as well.
NEW_TOKENS_IN_PROCESS = 2

#: An engine's answer -> log-probabilities ``[1, L]`` of its prompt and its tokens under the trainer's weights, index t for token t.
Score = Callable[[ModelResponse], Tensor]


@dataclass(frozen=True)
class Agreement:
    """Differences of log-probabilities between one engine and the trainer over the probe's tokens."""

    engine: str
    mean: float
    largest: float
    tokens: int


@dataclass(frozen=True)
class Publication:
    """Report of one transfer of weights.

    Attributes:
        way: ``in place`` if the engine computes with the trainer's tensors, otherwise a ``WeightUpdateMeta.type``.
        seconds: time until all engines confirmed the weights.
        size: bytes copied or sent.
        engines: engines that hold the weights.
    """

    way: str
    seconds: float
    size: int
    engines: list[str]


class SharedWeights:
    """Publishes to an engine in this process that computes with the trainer's own tensors, so that nothing is copied.

    Attributes:
        engine: engine that samples with the weights.
        agreements: result of the last audit; empty before the first.
        publication: report of the last publication.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.publication: Publication | None = None
        self.agreements: list[Agreement] = []
        self._paused = False

    def before_first_step(self) -> None:
        """Pause the engine until ``publish``."""
        if not self._paused:
            self.engine.pause()
            self._paused = True

    def transfer(self, trainer: TrainEngine, version: int) -> None:
        """Set the engine's version, without an audit."""
        started = time.perf_counter()
        self.engine.publish(version)
        self.publication = Publication("in place", time.perf_counter() - started, 0, self.engine.weight_holders)

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Set the engine's version, then audit and resume the engine.

        Raises:
            WeightUpdateError: the engine does not compute what the trainer computes; it stays paused.
        """
        self.transfer(trainer, version)
        self.agreements = audit_engine(self.engine, trainer, version, NEW_TOKENS_IN_PROCESS) or []
        if self._paused:
            self._paused = False
            self.engine.resume()

    def succeeded_by(self, other: Publisher) -> Publisher:
        """Replace this publisher by ``other``, even during an update, and return the publisher to use.

        If both share weights, this publisher is kept. Otherwise the engine is resumed if it is paused.
        """
        if isinstance(other, SharedWeights):
            return self
        if self._paused:
            self._paused = False
            self.engine.resume()
        return other


class SentWeights:
    """Publishes to an engine that has its own weights: they are copied within this process, or sent to servers as ``meta`` specifies.

    Paused servers do not answer the probe. With one training process, the audit runs when the servers resume. Several ranks must score the
    probe together, so their audit runs before the first step of the next update, before they train on anything these servers sampled.

    Attributes:
        engine: engine that receives the weights.
        agreements: results of the last audit, one per engine; empty before the first.
        publication: report of the last publication, on rank 0.
    """

    def __init__(self, engine: WeightReceiver, meta: WeightUpdateMeta | None) -> None:
        self.engine = engine
        self.publication: Publication | None = None
        self.agreements: list[Agreement] = []
        self.meta = meta
        self._due: tuple[TrainEngine, int] | None = None  # the version to audit

    def before_first_step(self) -> None:
        """Run the audit if one is due; it stays due while the engine is paused.

        Raises:
            WeightUpdateError: the engine does not compute with the weights that were published.
        """
        if self._due is None:
            return
        (trainer, version), self._due = self._due, None
        new_tokens = NEW_TOKENS if self.engine.sampler.local_model is None else NEW_TOKENS_IN_PROCESS
        agreements = audit_engine(self.engine, trainer, version, new_tokens)
        if agreements is None:
            self._due = trainer, version
        else:
            self.agreements = agreements

    def transfer(self, trainer: TrainEngine, version: int) -> None:
        """Send the weights from rank 0, gathered one tensor at a time, without an audit. Collective.

        An engine in this process gets the model's own tensor names; other engines get the names used in checkpoints (``weights/names.py``).

        Raises:
            WeightUpdateError: on every rank, if no engine took the weights.
        """

        dtype = published_dtype(trainer, self.engine)
        is_first = self.publication is None and parallel.rank() == 0
        if is_first and self.engine.sampler.local_model is None and not self.engine.records_experts:
            _warn_of_routing(trainer, dtype)

        def send(weights: WeightStream) -> None:
            started, sampler = time.perf_counter(), self.engine.sampler
            if sampler.local_model is None:
                weights = as_published(trainer.model, weights)
            self.engine.update_weights(self.meta, version=version, weights=weights, config=trainer.model.config)
            transport = sampler.weight_transport if self.meta is None else self.meta.type
            self.publication = Publication(transport, time.perf_counter() - started, weights.nbytes, sampler.weight_holders)

        with_whole_weights(trainer.weights(dtype), send)

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Send the weights (``transfer``), and check that the engines compute with them.

        Raises:
            WeightUpdateError: on every rank, if an engine rejected the weights or does not compute with them.
        """
        self.transfer(trainer, version)
        self._due = trainer, version
        if parallel.world_size() == 1:
            self.engine.sampler.when_resumed(self.before_first_step)
        else:
            self.before_first_step()


Publisher = SharedWeights | SentWeights


def _warn_of_routing(trainer: TrainEngine, dtype: torch.dtype | None) -> None:
    """Warn if servers that compute in a 16-bit type route tokens to experts: their choice is not recorded, and so not trained on."""
    experts = number_of_experts(trainer.model.config)
    if experts and (dtype or trainer.compute_dtype).itemsize < 4:
        logger.warning(
            "The model routes each token to some of %d experts, and the servers compute in %s. Where two experts score nearly alike, "
            "servers and trainer may choose different ones, and the log-probabilities of such tokens differ by more than rounding. "
            "rollout.routing_replay records the servers' choice and trains on it. Without it, watch actor/mismatch/kl, and correct what "
            "is left with actor.use_decoupled_loss, or compute in float32 (rollout.dtype, actor.dtype). See docs/scale.md.",
            experts,
            str(dtype or trainer.compute_dtype).removeprefix("torch."),
        )


def published_dtype(trainer: TrainEngine, engine: WeightReceiver) -> torch.dtype | None:
    """Return the type in which weights are sent, the same on every rank.

    It is the type that rank 0's engine holds or was configured with. If that is unknown, it is bfloat16 if the trainer computes in
    bfloat16, and otherwise None, which keeps each tensor's own type.
    """

    def held() -> str | None:
        dtype = engine.sampler.weight_dtype
        return None if dtype is None else str(dtype).removeprefix("torch.")

    said = parallel.from_first_rank(held)
    if said is not None:
        return getattr(torch, said)
    return torch.bfloat16 if trainer.compute_dtype == torch.bfloat16 else None


@dataclass(frozen=True)
class Answers:
    """Answers of the engines to a probe, the same on every rank.

    Attributes:
        responses: answers by engine name; empty if no engine answers probes.
        tolerance: the engine's ``logprob_tolerance``.
        dtype: type of the engines' weights; ``auto`` if it is not known.
    """

    responses: dict[str, ModelResponse]
    tolerance: float | None
    dtype: str


def ask_engines(engine: WeightReceiver, request: ModelRequest) -> Answers | None:
    """Let the engines of rank 0 sample a probe, and return their answers on every rank; None if the engines are paused. Collective."""

    def ask() -> list[Any] | None:
        sampler = engine.sampler
        answers = sampler.probe(request)
        if answers is None:
            return None
        dtype = "auto" if (held := sampler.weight_dtype) is None else str(held)
        return [engine.logprob_tolerance, dtype, {name: _as_json(answer) for name, answer in answers.items()}]

    asked = parallel.from_first_rank(ask)
    if asked is None:
        return None
    tolerance, dtype, answers = asked
    return Answers({name: _from_json(answer) for name, answer in answers.items()}, tolerance, dtype)


def _as_json(answer: ModelResponse) -> dict[str, Any]:
    experts = answer.routed_experts
    return asdict(replace(answer, routed_experts=None)) | {
        "routed_experts": None if experts is None else int32_of_record(experts)
    }


def _from_json(answer: dict[str, Any]) -> ModelResponse:
    response = ModelResponse(**{**answer, "routed_experts": None})
    if (experts := answer["routed_experts"]) is not None:
        response.routed_experts = record_of_int32(experts, response.input_len + response.output_len)
    return response


def answer_rows(responses: Iterable[ModelResponse]) -> tuple[Trajectory, list[int]]:
    """Return the distinct answers to one prompt as a batch whose ``loss_mask`` marks their tokens, and the row of each answer.

    Answers with the same tokens share a row, unless other experts computed them.
    """
    answers = list(responses)
    rows: dict[Any, int] = {}
    keys = [
        (*one.input_tokens, *one.output_tokens, None if one.routed_experts is None else one.routed_experts.tobytes())
        for one in answers
    ]
    row_of = [rows.setdefault(key, len(rows)) for key in keys]
    items: list[Trajectory] = []
    for key, one in zip(keys, answers, strict=True):
        if rows[key] < len(items):
            continue
        ids_BL = torch.tensor([one.input_tokens + one.output_tokens])
        sampled_BL = (torch.arange(ids_BL.shape[1]) >= one.input_len)[None]
        item: Trajectory = {"input_ids": ids_BL, "attention_mask": torch.ones_like(sampled_BL), "loss_mask": sampled_BL.int()}
        item["temperature"] = torch.tensor([one.temperature])
        if one.routed_experts is not None:  # the last token has none
            item[ROUTED_EXPERTS] = torch.from_numpy(np.pad(one.routed_experts, ((0, 1), (0, 0))))[None]
        items.append(item)
    return concat_padded_tensors(items), row_of


def audit_engine(engine: WeightReceiver, trainer: TrainEngine, version: int, new_tokens: int) -> list[Agreement] | None:
    """Let the engines sample a probe and compare their log-probabilities with the trainer's. Collective.

    Args:
        engine: engine in this process or client of servers; only rank 0's engine samples.
        trainer: the trainer.
        version: version under which the trainer's current weights were published.
        new_tokens: length of the answer.

    Returns:
        One entry per engine; None if the engines are paused and cannot answer now.

    Raises:
        WeightUpdateError: on every rank, if an engine exceeds the tolerance or answers with another version.
    """
    answers = ask_engines(engine, probe_request(trainer.model, new_tokens))
    if answers is None:
        return None
    if not answers.responses:
        return []
    batch, row_of = answer_rows(answers.responses.values())  # servers with the same weights sample the same tokens
    scores_BL = trainer.compute_logp(batch)
    row = {id(response): number for response, number in zip(answers.responses.values(), row_of, strict=True)}

    def score(response: ModelResponse) -> Tensor:
        return scores_BL[row[id(response)], : response.input_len + response.output_len][None]

    return audit(answers.responses, score, version, answers.tolerance, trainer.compute_dtype, answers.dtype)


def probe_request(
    model: torch.nn.Module, new_tokens: int = NEW_TOKENS, *, length: int = PROMPT_TOKENS, first: int = 7
) -> ModelRequest:
    """Make the probe request: ids spread over the model's vocabulary, to be continued at temperature 0.7 to a fixed length.

    Args:
        model: the trained model.
        new_tokens: length of the answer.
        length: length of the prompt.
        first: the first id. Prompts that begin differently share no prefix that an engine could cache.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr]
    ids = [(first + 31 * index * index + 17 * index) % vocabulary for index in range(length)]
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, temperature=TEMPERATURE, ignore_eos=True)
    return ModelRequest(input_ids=ids, gconfig=gconfig, rid="audit-probe", seed=12345)


def audit(
    responses: dict[str, ModelResponse],
    score: Score,
    version: int,
    tolerance: float | None,
    *dtypes: torch.dtype | str,
) -> list[Agreement]:
    """Compare the log-probabilities of every engine's answer to the probe with the trainer's.

    Args:
        responses: answers by engine name.
        score: the trainer's log-probabilities.
        version: version that was just published.
        tolerance, dtypes: see ``require_agreement``.

    Returns:
        One entry for each engine.

    Raises:
        WeightUpdateError: an engine disagrees with the trainer, answered with another version, gave no token, or returned values that
            are not finite; the message names it.
    """
    agreements: list[Agreement] = []
    for engine, response in responses.items():
        require_version(engine, response, version)
        trainer = score(response).detach().to("cpu", torch.float64)[0, len(response.input_tokens) :]
        difference = (torch.tensor(response.output_logprobs, dtype=torch.float64) - trainer).abs()
        if not bool(torch.isfinite(difference).all()):
            raise WeightUpdateError(
                f"{engine} or the trainer gives log-probabilities that are not finite for the audit's probe."
            )
        agreements.append(Agreement(engine, float(difference.mean()), float(difference.max()), len(difference)))
        require_agreement(engine, version, agreements[-1].mean, agreements[-1].largest, tolerance, *dtypes)
    return agreements


def require_version(engine: str, response: ModelResponse, version: int) -> None:
    """Raise an error if an engine's answer to a probe has no tokens, or tokens of another version.

    Raises:
        WeightUpdateError: see above.
    """
    wrong = sorted(set(response.output_versions) - {version})
    if wrong:
        raise WeightUpdateError(f"{engine} sampled the audit's probe with version {wrong}, not {version}, after its update.")
    if not response.output_tokens:
        raise WeightUpdateError(f"{engine} gave no token for the audit's probe; stop_reason {response.stop_reason!r}.")


def largest_difference(tolerance: float | None, *dtypes: torch.dtype | str) -> float:
    """Return the largest accepted mean difference of log-probabilities.

    Args:
        tolerance: ``rollout.logprob_tolerance``. If None, it is 1e-3 if all ``dtypes`` are float32 (or ``auto``), and otherwise
            ``TOLERANCE_OF_16_BITS``.
        dtypes: compute types of trainer and engine.
    """
    is_exact = all(str(dtype).removeprefix("torch.") in ("float32", "auto") for dtype in dtypes)
    return tolerance if tolerance is not None else 1e-3 if is_exact else TOLERANCE_OF_16_BITS


def require_agreement(
    engine: str, version: int, mean: float, largest: float, tolerance: float | None, *dtypes: torch.dtype | str
) -> None:
    """Raise an error if an engine does not compute what the trainer computes, on the audit's probe or on the tokens of a step.

    Args:
        engine: name of the engine.
        version: version of the weights that the engine reports.
        mean, largest: absolute differences of log-probabilities between engine and trainer.
        tolerance, dtypes: see ``largest_difference``.

    Raises:
        WeightUpdateError: ``mean`` exceeds the tolerance.
    """
    limit = largest_difference(tolerance, *dtypes)
    if mean > limit:
        raise WeightUpdateError(
            f"{engine} says that it holds version {version}, but its log-probabilities differ from the trainer's by {mean:.2e} on "
            f"average (largest {largest:.2e}, limit {limit:.0e}): it does not compute with the published weights. A known case is a "
            "model with tied embeddings on a vLLM server, whose output head keeps its old copy: use a model with an untied head. "
            "Otherwise check the engine's dtype and logprobs mode; rollout.logprob_tolerance sets the limit."
        )


def publisher_for(trainer: TrainEngine, engine: WeightReceiver | None, meta: WeightUpdateMeta | None) -> Publisher:
    """Choose how a trainer publishes to an engine.

    Args:
        trainer: trainer whose weights are published.
        engine: a connected engine. If None, the servers that this process is connected to, or else those whose addresses are in the
            environment.
        meta: how to transfer weights. If None, they are shared if the engine computes with the trainer's own tensors, copied if the
            engine is in this process, and otherwise sent in the way that the client chooses.

    Raises:
        WeightUpdateError: there is no engine to publish to, or ``meta`` does not fit it.
    """
    engine = engine if engine is not None else _find_servers(meta)
    if not isinstance(engine, WeightReceiver):
        raise takes_no_weights(engine)
    model, is_copied = engine.sampler.local_model, meta is not None and meta.type == "memory"
    # No process has all weights of a sharded model, so the engine needs its own copy.
    is_copied = is_copied or trainer.adapter is not None  # an engine holds adapters beside the base, one for each version
    if model is None or is_copied or is_sharded(trainer.model) or not isinstance(engine, InferenceEngine):
        return SentWeights(engine, meta)
    is_shared = next(trainer.model.parameters()).data_ptr() == next(model.parameters()).data_ptr()
    return SharedWeights(engine) if is_shared else SentWeights(engine, meta)


def _find_servers(meta: WeightUpdateMeta | None) -> RemoteInferenceEngine:
    """Return the client that this process samples with, or a new client for the servers in the environment."""
    if parallel.rank() == 0 and (clients := CONNECTED_ENGINES):
        if len({frozenset(client.addresses) for client in clients}) > 1:
            names = "; ".join(", ".join(client.addresses) for client in clients)
            raise WeightUpdateError(
                f"This process is connected to several sets of servers ({names}): name the one that samples for this trainer "
                "with actor.connect_engine(engine)."
            )
        client = clients[-1]  # the latest of several clients of the same servers
        logger.info("publishing to the %s servers that this process samples from: %s", client.kind, ", ".join(client.addresses))
        return client
    addresses = find_server_addresses()
    if not addresses:
        raise WeightUpdateError(
            "update_weights found no inference engine: call actor.connect_engine(engine), or give the servers' addresses in "
            "ROLLWRIGHT_LLM_SERVER_ADDRS."
        )
    allocation = meta.allocation if meta is not None else None
    # SGLang's protocol is that of the addresses in the environment unless an allocation names another.
    name = (allocation.gen_backend if allocation is not None else None) or "sglang"
    backend = BACKENDS.get("builtin_process" if name == "builtin" else name)
    assert issubclass(backend, ServerBackend)
    client = RemoteInferenceEngine(backend, addresses=addresses)
    logger.info("publishing to the %s servers of the environment: %s", client.kind, ", ".join(addresses))
    client.initialize()
    return client
