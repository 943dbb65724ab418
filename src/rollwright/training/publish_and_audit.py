"""Handing new weights to the engines that sample with them, and comparing what they compute then.

Between the first optimizer step of an update and publication an engine that shares the trainer's weights does not step:
``before_first_step`` pauses it, ``publish`` gives it the next version and lets it go on. After each publication the engines'
log-probabilities of a probe are compared with the trainer's, because version labels can lie: the first rank asks the engines,
and all ranks score and compare what they answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import WeightUpdateError
from rollwright.inference.backends import BACKENDS
from rollwright.inference.engine import InferenceEngine, WeightReceiver, takes_no_weights
from rollwright.inference.network import find_server_addresses
from rollwright.inference.remote import CONNECTED_CLIENTS
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.weights.names import as_published
from rollwright.inference.weights.publication import RemoteClient
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger
from rollwright.training import parallel
from rollwright.training.fsdp import is_sharded, with_whole_weights

if TYPE_CHECKING:
    from rollwright.inference.weights.ways import WeightUpdateMeta
    from rollwright.training.engine import TrainEngine

logger = getLogger("publish")

#: Not 1: an engine that leaves the temperature out of its log-probabilities would pass at 1.
TEMPERATURE = 0.7
PROMPT_TOKENS, NEW_TOKENS = 12, 16
#: Of an engine in the trainer's process, where the tokens of the next batch are compared, too: one of the prompt's pass, one of a
#: decode step.
NEW_TOKENS_IN_PROCESS = 2

#: ``(input_ids [1, L], temperature)`` -> log-probabilities ``[1, L]`` under the trainer's weights, index t for token t.
Score = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Agreement:
    """Differences of log-probabilities between one engine and the trainer over the probe's tokens."""

    engine: str
    mean: float
    largest: float
    tokens: int


@dataclass(frozen=True)
class Publication:
    """How weights went to the engines, for people.

    Attributes:
        way: ``in place`` where the engine computes with the trainer's tensors, else a ``WeightUpdateMeta.type``.
        seconds: until the engines said that they hold them.
        size: bytes that were copied or sent.
        engines: that hold them.
    """

    way: str
    seconds: float
    size: int
    engines: list[str]


class SharedWeights:
    """The engine in this process computes with the trainer's own tensors: nothing is copied.

    Attributes:
        engine: samples with the weights.
        agreements: how far the engine was from the trainer in the last audit; empty where there was none yet.
        publication: the last one.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.publication: Publication | None = None
        self.agreements: list[Agreement] = []
        self._paused = False

    def before_first_step(self) -> None:
        """Stop the engine's steps until ``publish``."""
        if not self._paused:
            self.engine.pause()
            self._paused = True

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Tell the engine that its weights are those of ``version`` now, see that they are, and let it go on.

        Raises:
            WeightUpdateError: it does not compute what the trainer computes; it stays paused.
        """
        started = time.perf_counter()
        self.engine.publish(version)
        self.publication = Publication("in place", time.perf_counter() - started, 0, self.engine.weight_holders)
        self.agreements = audit_engine(self.engine, trainer, version, NEW_TOKENS_IN_PROCESS) or []
        if self._paused:
            self._paused = False
            self.engine.resume()

    def succeeded_by(self, other: Publisher) -> Publisher:
        """Switch to another way in the middle of an update: an engine that was paused stays so until it publishes."""
        if isinstance(other, SharedWeights):
            return self
        if self._paused:
            self._paused = False
            self.engine.resume()
        return other


class SentWeights:
    """The engine has weights of its own: it copies the trainer's, or they are sent to servers by the way that ``meta`` names.

    Paused servers answer no probe. Where one process trains, they are asked when they resume. The ranks of a sharded trainer
    have to score the probe together, so they do it when they next come together: before the next first step, which is
    before anything that those servers sampled is trained on.

    Attributes:
        engine: takes the weights.
        agreements: how far each engine was from the trainer in the last audit; empty where there was none yet.
        publication: the last one; on the first rank.
    """

    def __init__(self, engine: WeightReceiver, meta: WeightUpdateMeta | None) -> None:
        self.engine = engine
        self.publication: Publication | None = None
        self.agreements: list[Agreement] = []
        self.meta = meta
        self._due: tuple[TrainEngine, int] | None = None  # a version that was not audited yet

    def before_first_step(self) -> None:
        """Make the audit that is still due; where the engine is paused, it stays due.

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

    def publish(self, trainer: TrainEngine, version: int) -> None:
        """Send the weights from rank 0, gathered one tensor at a time, and check that the engines compute with them.

        An engine in this process gets the model's own names, other engines those of its checkpoints (``weights/names.py``).

        Raises:
            WeightUpdateError: on every rank, if an engine refused the weights or does not compute with them.
        """

        def send(weights: WeightStream) -> None:
            started, sampler = time.perf_counter(), self.engine.sampler
            if sampler.local_model is None:
                weights = as_published(trainer.model, weights)
            self.engine.update_weights(self.meta, version=version, weights=weights, config=trainer.model.config)
            way = sampler.weight_way if self.meta is None else self.meta.type
            self.publication = Publication(way, time.perf_counter() - started, weights.nbytes, sampler.weight_holders)

        with_whole_weights(trainer.weights(published_dtype(trainer, self.engine)), send)
        self._due = trainer, version
        if parallel.world_size() == 1:
            self.engine.sampler.when_resumed(self.before_first_step)
        else:
            self.before_first_step()


Publisher = SharedWeights | SentWeights


def published_dtype(trainer: TrainEngine, engine: WeightReceiver) -> torch.dtype | None:
    """Type in which weights are sent, the same on every rank: what the first rank's engine holds them in or was told to be sent;
    where it says nothing, bfloat16 where the trainer computes in it, and None (their own) elsewhere."""

    def held() -> str | None:
        dtype = engine.sampler.weight_dtype
        return None if dtype is None else str(dtype).removeprefix("torch.")

    said = parallel.from_first_rank(held)
    if said is not None:
        return getattr(torch, said)
    return torch.bfloat16 if trainer.compute_dtype == torch.bfloat16 else None


def audit_engine(engine: WeightReceiver, trainer: TrainEngine, version: int, new_tokens: int) -> list[Agreement] | None:
    """Have the engines sample the probe of ``new_tokens``, and compare their log-probabilities with the trainer's.

    Only the first rank's ``engine`` is asked; it is in this process, or a client of servers. ``version`` is what the trainer's
    present weights were published as.

    Returns:
        One entry for each engine that can be asked; None where they are paused and cannot be asked now.

    Raises:
        WeightUpdateError: on every rank, where an engine is over the tolerance, or answered with another version.
    """

    def ask() -> list[Any] | None:
        answers = engine.sampler.probe(probe_request(trainer.model, new_tokens))
        if answers is None:
            return None
        return [engine.logprob_tolerance, {name: asdict(answer) for name, answer in answers.items()}]

    asked = parallel.from_first_rank(ask)
    if asked is None:
        return None
    tolerance, answers = asked
    scored: dict[tuple[int, ...], Tensor] = {}  # servers with the same weights sample the same tokens, which are scored once

    def score(ids_BL: Tensor, temperature: float) -> Tensor:
        ids = tuple(ids_BL[0].tolist())
        if ids not in scored:
            mask_BL = torch.ones_like(ids_BL)
            batch = {"input_ids": ids_BL, "attention_mask": mask_BL.bool(), "loss_mask": mask_BL}
            scored[ids] = trainer.compute_logp({**batch, "temperature": torch.full((1,), temperature)})
        return scored[ids]

    responses = {name: ModelResponse(**answer) for name, answer in answers.items()}
    return audit(responses, score, version, tolerance, trainer.compute_dtype)


def probe_request(model: torch.nn.Module, new_tokens: int = NEW_TOKENS) -> ModelRequest:
    """The fixed probe: ids spread over the model's vocabulary, sampled at temperature 0.7 to a forced length."""
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr]
    ids = [(7 + 31 * index * index + 17 * index) % vocabulary for index in range(PROMPT_TOKENS)]
    gconfig = GenerationHyperparameters(max_new_tokens=new_tokens, temperature=TEMPERATURE, ignore_eos=True)
    return ModelRequest(input_ids=ids, gconfig=gconfig, rid="audit-probe", seed=12345)


def audit(
    responses: dict[str, ModelResponse],
    score: Score,
    version: int,
    tolerance: float | None,
    dtype: torch.dtype = torch.float32,
) -> list[Agreement]:
    """Compare every engine's answer to the probe with the trainer.

    Args:
        responses: engine name to its answer.
        score: the trainer's log-probabilities.
        version: that was just published.
        tolerance: largest mean absolute difference; None: what ``dtype`` allows.
        dtype: the trainer's compute type.

    Returns:
        One entry for each engine.

    Raises:
        WeightUpdateError: an engine is over the tolerance, answered with another version, gave no token, or numbers that are
            not finite; it is named.
    """
    limit = tolerance if tolerance is not None else 1e-3 if dtype == torch.float32 else 5e-2
    agreements: list[Agreement] = []
    for engine, response in responses.items():
        wrong = sorted(set(response.output_versions) - {version})
        if wrong:
            raise WeightUpdateError(
                f"{engine} sampled the audit's probe with version {wrong}, not {version}, after its update."
            )
        if not response.output_tokens:
            raise WeightUpdateError(f"{engine} gave no token for the audit's probe; stop_reason {response.stop_reason!r}.")
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        trainer = score(ids, response.temperature).detach().to("cpu", torch.float64)[0, len(response.input_tokens) :]
        difference = (torch.tensor(response.output_logprobs, dtype=torch.float64) - trainer).abs()
        if not bool(torch.isfinite(difference).all()):
            raise WeightUpdateError(
                f"{engine} or the trainer gives log-probabilities that are not finite for the audit's probe."
            )
        agreement = Agreement(engine, float(difference.mean()), float(difference.max()), len(difference))
        agreements.append(agreement)
        if agreement.mean > limit:
            raise WeightUpdateError(
                f"{engine} says that it holds version {version}, but its log-probabilities differ from the trainer's by "
                f"{agreement.mean:.2e} on average (largest {agreement.largest:.2e}, limit {limit:.0e}): it does not compute "
                "with the published weights. A known case is a model with tied embeddings on a vLLM server, whose output head "
                "keeps its old copy: use a model with an untied head. Otherwise check the server's dtype and logprobs mode; "
                "rollout.logprob_tolerance sets the limit."
            )
    return agreements


def publisher_for(trainer: TrainEngine, engine: WeightReceiver | None, meta: WeightUpdateMeta | None) -> Publisher:
    """The way from a trainer to an engine.

    Args:
        trainer: whose weights are published.
        engine: a connected engine, or None: the servers that this process is connected to, else those whose addresses are
            in the environment.
        meta: the way; None: shared where the engine computes with the trainer's own tensors, copied where it is in this
            process, else as the client chooses.

    Raises:
        WeightUpdateError: there is no engine to publish to, or the way does not fit it.
    """
    engine = engine if engine is not None else _find_servers(meta)
    if not isinstance(engine, WeightReceiver):
        raise takes_no_weights(engine)
    model = engine.sampler.local_model
    if model is None:
        return SentWeights(engine, meta)
    if is_sharded(trainer.model):  # no process has all of the weights, which are copied into the engine's own
        return SentWeights(engine, meta)
    shares = next(trainer.model.parameters()).data_ptr() == next(model.parameters()).data_ptr()
    copied = meta is not None and meta.type == "memory"
    if shares and not copied and isinstance(engine, InferenceEngine):
        return SharedWeights(engine)
    return SentWeights(engine, meta)


def _find_servers(meta: WeightUpdateMeta | None) -> RemoteClient:
    """The client that this process samples with, else one of the servers in the environment."""
    if parallel.rank() == 0 and (clients := CONNECTED_CLIENTS):
        if len({frozenset(client.addresses) for client in clients}) > 1:
            names = "; ".join(", ".join(client.addresses) for client in clients)
            raise WeightUpdateError(
                f"This process is connected to several sets of servers ({names}): name the one that samples for this trainer "
                "with actor.connect_engine(engine)."
            )
        client = clients[-1]  # of several clients of the same servers, the one that connected last
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
    assert issubclass(backend, RemoteClient)
    client = backend(addresses=addresses)
    logger.info("publishing to the %s servers of the environment: %s", client.kind, ", ".join(addresses))
    client.initialize()
    return client
