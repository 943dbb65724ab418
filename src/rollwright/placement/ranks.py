"""The ranks that train one model: rank 0 runs the loop and sends calls, and all ranks execute them.

Invariants:

* all ranks make collective calls in the same order: rank 0 sends the name of each call before executing it, and the other ranks
  execute only the calls that they receive (``TrainRanks.follow``);
* a batch is divided into whole groups (or pairs, or rows), balanced by tokens within each optimizer step, and sent without padding;
* a rank that fails ends its process: the others lose the connection, and their launcher ends them.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.errors import ConfigError
from rollwright.experience.packed import pack_rows, unpack_rows
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.inference.weights.names import as_published
from rollwright.inference.weights.stream import WeightStream
from rollwright.training import parallel
from rollwright.training.fsdp import with_whole_weights
from rollwright.training.micro_batches import distinct_tokens
from rollwright.training.rank_shares import groups_of, sent_columns, shares
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

_DONE = "done"


# -- messages of rank 0 -------------------------------------------------------------------------------------------------


def send(message: dict[str, Any]) -> None:
    """On rank 0, send a message to the other ranks, if there are any."""
    if parallel.world_size() > 1:
        with parallel.watched():
            parallel.broadcast(json.dumps(message).encode())


def received() -> dict[str, Any]:
    """On the other ranks, wait for the next message from rank 0."""
    with parallel.watched():
        return json.loads(parallel.broadcast(b""))


# -- the calls ---------------------------------------------------------------------------------------------------------


def policy_step(ranks: TrainRanks, batch: Trajectory) -> dict[str, float]:
    """Compute advantages and update the policy on a batch of samples. Returns the update's metrics."""
    actor = ranks.engine
    actor.compute_advantages(batch)
    stats = actor.ppo_update(batch)
    actor.step_lr_scheduler()
    return stats


def supervised_step(ranks: TrainRanks, batch: Trajectory, *, distillation: dict[str, Any] | None = None) -> dict[str, float]:
    """Update the model on a batch of given completions, which a teacher may have scored. Returns metrics."""
    stats = ranks.engine.sft_update(batch, distillation)
    ranks.engine.step_lr_scheduler()
    return stats


def preference_step(ranks: TrainRanks, batch: Trajectory, *, beta: float, label_smoothing: float) -> dict[str, float]:
    """Update the model on a batch of preference pairs. Returns metrics."""
    stats = ranks.engine.dpo_update(batch, beta=beta, label_smoothing=label_smoothing)
    ranks.engine.step_lr_scheduler()
    return stats


def save_recover(
    ranks: TrainRanks,
    *,
    step: int,
    part: str,
    rest: dict[str, Any] | None = None,
    before_visible: Callable[[], object] | None = None,
) -> None:
    """Write the recovery checkpoint of a step. Rank 0 adds ``rest``, the states of everything except the engine."""
    ranks.recover.save(step, {part: ranks.engine.state_dict(), **(rest or {})}, before_visible=before_visible)


def load_recover(ranks: TrainRanks, *, part: str) -> tuple[int, dict[str, Any]]:
    """Load the newest recovery checkpoint into the engine. Returns the checkpoint's step and content."""
    step, state = ranks.recover.load()
    ranks.engine.load_state_dict(state[part])
    return step, state


def use_weights(ranks: TrainRanks, *, use: Callable[[WeightStream], None] = lambda weights: None) -> None:
    """Pass the weights to ``use`` on rank 0, under the names of the model's checkpoints. Collective."""
    model = ranks.engine.model
    with_whole_weights(ranks.engine.weights(), lambda weights: use(as_published(model, weights)))


def _rows(batch: Trajectory) -> Tensor:
    return torch.arange(len(batch["input_ids"]))


@dataclass(frozen=True)
class Call:
    """A call that ranks execute.

    Attributes:
        make: the function that each rank executes.
        units: returns the unit of each row; a unit is never divided over ranks. None for a call without a batch.
        minibatches: returns the number of minibatches, given the config section of the trained model.
    """

    make: Callable[..., Any]
    units: Callable[[Trajectory], Tensor] | None = None
    minibatches: Callable[[Any], int] = lambda section: 1

    def divided(
        self,
        batch: Trajectory,
        section: Any,
        ranks: int,
        count_tokens: Callable[[Trajectory], dict[int, int]] = distinct_tokens,
    ) -> tuple[Trajectory, list[list[int]]]:
        """Divide a batch over ranks; see ``shares``. Returns the columns to send and the rows of each rank."""
        assert self.units is not None
        minibatches = self.minibatches(section)
        sent = sent_columns(batch, minibatches)
        return sent, shares(sent, self.units(batch), ranks, minibatches, count_tokens)


CALLS = {
    "policy_step": Call(policy_step, groups_of, lambda section: section.ppo_n_minibatches),
    "supervised_step": Call(supervised_step, _rows),
    "preference_step": Call(preference_step, lambda batch: _rows(batch) // 2),
    "publish": Call(lambda ranks: ranks.engine.update_weights()),
    "republish": Call(lambda ranks: ranks.engine.republish()),
    "prove_publication": Call(lambda ranks: ranks.engine.prove_publication()),
    "skip_publication": Call(lambda ranks: ranks.engine.skip_publication()),
    "use_weights": Call(use_weights),
    "save": Call(lambda ranks, *, path, tokenizer=None: ranks.engine.save(path, tokenizer)),
    "save_recover": Call(save_recover),
    "load_recover": Call(load_recover),
}


class TrainRanks:
    """The ranks that train one model: rank 0 uses ``call``, the others use ``follow``. With one process, ``call`` only runs the function.

    Args:
        engine: this rank's engine, already initialised.
        recover: the run's recovery checkpoints.
    """

    def __init__(self, engine: Any, recover: RecoverCheckpoints) -> None:
        self.engine = engine
        self.recover = recover

    @property
    def model(self) -> Any:
        """The model, which an engine in this process may share; None if it is sharded. See ``TrainEngine.shared_model``."""
        return self.engine.shared_model

    @property
    def awaits_proof(self) -> bool:
        """See ``Ranks``."""
        return self.engine.awaits_proof

    def prepare(self, batch: Trajectory) -> Trajectory:
        """Move a batch to the engine's device. With several ranks, move it to host memory instead, from which it is divided among them."""
        return tensor_container_to(batch, self.engine.device if parallel.world_size() == 1 else "cpu")

    def with_weights(self, use: Callable[[Any], None], scratch: Path) -> None:
        """See ``Ranks``. ``scratch`` is not used."""
        self.call("use_weights", first_rank={"use": use})

    def save(self, path: Any, tokenizer: Any = None) -> None:
        """Write the model in Hugging Face form."""
        self.call("save", path=str(path), first_rank={"tokenizer": tokenizer})

    def call(
        self, name: str, batch: Trajectory | None = None, *, first_rank: dict[str, Any] | None = None, **arguments: Any
    ) -> Any:
        """See ``Ranks.call``."""
        call, own = CALLS[name], {**arguments, **(first_rank or {})}
        if parallel.world_size() == 1:
            return call.make(self, *([] if batch is None else [batch]), **own)
        send({"call": name, "arguments": arguments})
        with parallel.watched():
            if batch is None:
                return call.make(self, **own)
            sent, batch_rows = call.divided(batch, self.engine.config, parallel.world_size())
            share = unpack_rows(parallel.scattered([pack_rows(sent, rows) for rows in batch_rows]))
            result, written = self.make_with(call, share, own)
            merge_written(batch, batch_rows, [unpack_rows(part) for part in parallel.gathered(written) or []])
            return result

    def finish(self) -> None:
        """Make ``follow`` return on the other ranks."""
        send({"call": _DONE})

    def follow(self) -> None:
        """On the other ranks, execute the calls that rank 0 sends until it calls ``finish``."""
        with parallel.watched():
            while (message := received())["call"] != _DONE:
                call, arguments = CALLS[message["call"]], message["arguments"]
                if call.units is None:
                    call.make(self, **arguments)
                else:
                    _, written = self.make_with(call, unpack_rows(parallel.scattered(None)), arguments)
                    parallel.gathered(written)

    def make_with(self, call: Call, share: Trajectory, arguments: dict[str, Any]) -> tuple[Any, bytes]:
        """Execute a call on this rank's share of a batch. Returns the result and, packed, the columns that the call wrote."""
        share = tensor_container_to(share, self.engine.device)
        before = dict(share)
        result = call.make(self, share, **arguments)
        layout = ("input_ids", "attention_mask")
        return result, pack_rows({key: value for key, value in share.items() if key in layout or value is not before.get(key)})


def merge_written(batch: Trajectory, batch_rows: Sequence[Sequence[int]], parts: Sequence[Trajectory]) -> None:
    """Write the columns that the ranks returned into the batch, replacing existing ones."""
    width, written = batch["input_ids"].shape[1], dict[str, Tensor]()
    for rows, part in zip(batch_rows, parts, strict=True):
        size = tuple(part["input_ids"].shape)
        for key, value in part.items():
            if key in ("input_ids", "attention_mask") or not isinstance(value, Tensor):
                continue
            with_tokens = value.dim() >= 2 and tuple(value.shape[:2]) == size
            if key not in written:
                shape = (len(batch["input_ids"]), *((width, *value.shape[2:]) if with_tokens else value.shape[1:]))
                written[key] = value.new_zeros(shape)
            index = torch.as_tensor(rows, dtype=torch.int64)
            if with_tokens:
                written[key][index, : size[1]] = value
            else:
                written[key][index] = value
    batch.update(written)


#: Values that a step computed for the trained tokens of a row: the advantage (one number, or float32 bytes if the tokens differ), the number
#: of tokens, their log-probabilities (float32 bytes), entropies (float16 bytes), a teacher's log-probabilities (float32 bytes, nan where it
#: did not teach), and the critic's values before them (float32 bytes). Bytes are empty if there are none.
TrainedRow = tuple[float | bytes, int, bytes, bytes, bytes, bytes]
#: Column of a batch with the ``TrainedRow`` of each row.
TRAINED = "trained"


def trained_rows(batch: Trajectory) -> list[TrainedRow]:
    """Return the ``TrainedRow`` of each row, built from the columns that a step wrote."""
    if TRAINED in batch:
        return batch[TRAINED]
    masked_BL = batch["loss_mask"].bool()
    advantages, logprobs, entropies, taught, weights, critic = (
        _flat(batch.get(name), masked_BL, dtype)
        for name, dtype in (
            ("advantages", "<f4"),
            ("trainer_logprobs", "<f4"),
            ("entropies", "<f2"),
            ("teacher_logprobs", "<f4"),
            ("teacher_weights", "<f4"),
            ("values", "<f4"),
        )
    )
    taught = np.where(weights > 0, taught, np.float32(np.nan))
    rows, start = list[TrainedRow](), 0
    for tokens in masked_BL.sum(1).tolist():
        own = advantages[start : start + tokens]
        is_same = tokens == 0 or bool((own == own[0]).all())
        advantage = (float(own[0]) if tokens else 0.0) if is_same else own.tobytes()
        scores = [values[start : start + tokens] for values in (logprobs, entropies, taught, critic)]
        rows.append((advantage, tokens, *(each.tobytes() if np.nan_to_num(each).any() else b"" for each in scores)))  # type: ignore[arg-type]
        start += tokens
    return rows


def _flat(values_BL: Tensor | None, masked_BL: Tensor, dtype: str) -> np.ndarray:
    """Return the values of the trained tokens, row by row; empty if the step computed none."""
    return np.empty(0, dtype) if values_BL is None else values_BL[masked_BL.to(values_BL.device)].cpu().numpy().astype(dtype)


def refuse_images(engine: Any) -> None:
    """Reject vision models on several ranks: a rank without images would skip the vision tower and deadlock the collectives.

    Raises:
        ConfigError: the engine's model is a vision model, and there are several processes.
    """
    model_config = engine.model.config
    if parallel.world_size() > 1 and getattr(model_config, "vision_config", None) is not None:
        raise ConfigError(
            f"{engine.config.path}: a model of images and text trains in one process; leave cluster.processes at 1 and torchrun out."
        )


def ignore_signals() -> None:
    """On the other ranks, ignore SIGINT and SIGTERM: rank 0 handles them, and the others end when they lose the connection to rank 0."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
