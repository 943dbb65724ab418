"""``Experience``: one token sequence that a sample produced, with its masks, log-probabilities, versions and reward.

``experiences_of`` builds experiences from recorded requests: requests that extend one another become one sequence."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, PLAYER_NAMES, ROUTED_EXPERTS, Trajectory
from rollwright.experience.packed import pack_bytes, unpack_bytes
from rollwright.experience.recorder import RequestRecord

#: Fields with one entry per response token.
RESPONSE_FIELDS = {
    "logprobs": torch.float32,
    "versions": torch.int32,
    "action_mask": torch.bool,
    "token_rewards": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
}
#: Fields with one entry per token.
TOKEN_FIELDS = {"position_ids": torch.int64, "branch_ids": torch.int64, "other_context": torch.bool}
#: Fields with one number or flag, besides the reward.
SCALARS = {"temperature": float, "truncated": bool, "logprobs_shifted": bool, "trainable": bool, "turn_ids": int}
#: All fields that are stored as 1-D tensors.
SEQUENCES = {
    "tokens": torch.int64,
    "chosen": torch.int64,
    "rejected": torch.int64,
    **RESPONSE_FIELDS,
    **TOKEN_FIELDS,
}


@dataclass
class ExperienceId:
    """Origin of an experience: batch, task, run of the task and step of the run."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def group(self) -> str:
        """Name of the group: all experiences of one task in one batch."""
        return f"{self.batch}/{self.task}"

    @property
    def sample(self) -> str:
        """Name of the sample: one run of the task."""
        return f"{self.batch}/{self.task}/{self.run}"

    def __str__(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"


@dataclass(eq=False)
class Experience:
    """One token sequence. Sequences may be lists, arrays or tensors; they are stored as 1-D tensors.

    ``logprobs``, ``versions``, ``action_mask`` and ``token_rewards`` cover the response, the ``len(tokens) - prompt_length`` tokens after
    the prompt. Each may also be given for all tokens; the prompt's part is then removed.

    Raises:
        TrajectoryError: lengths disagree or a value has the wrong type. Checked on construction and again by ``to_trajectory``, because
            fields may be assigned.
    """

    tokens: Any = None  # [L] int64: prompt and response
    prompt_length: int | None = None  # number of prompt tokens; if None, inferred from the action mask or the lengths, else 1
    reward: float | None = None
    logprobs: Any = None  # [L - prompt_length] float32, natural, at sampling
    action_mask: Any = None  # [L - prompt_length] bool: True for tokens that the policy sampled; None means all
    versions: Any = None  # [L - prompt_length] int32
    token_rewards: Any = None  # [L - prompt_length] float32
    advantages: Any = None  # [L - prompt_length] float32
    returns: Any = None  # [L - prompt_length] float32
    temperature: float | None = None
    truncated: bool | None = None
    logprobs_shifted: bool | None = None  # True if the log-probabilities were taken after top-p, top-k or penalties
    agent: str | None = None  # name of the player that made the row
    role: str | None = None  # its role in the environment; rows of different roles are never compared
    environment: str | None = None  # what it plays in
    trainable: bool | None = None  # False: nothing of the row is trained
    turn_ids: int | None = None  # rows with one are compared within their turn
    info: dict[str, Any] = field(default_factory=dict)  # any JSON values
    metrics: dict[str, float] = field(default_factory=dict)  # numbers that are averaged into the run's metrics
    eid: ExperienceId = field(default_factory=ExperienceId)
    prompt_text: str | None = None
    response_text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chosen: Any = None  # [N] int64: the preferred response to ``tokens``, which is then a prompt
    rejected: Any = None  # [N] int64
    chosen_messages: list[dict[str, Any]] | None = None
    rejected_messages: list[dict[str, Any]] | None = None
    multi_modal_inputs: dict[str, torch.Tensor] | None = None
    position_ids: Any = None  # [L] int64
    branch_ids: Any = None  # [L] int64
    other_context: Any = None  # [L] bool: sampled after a different text than the row shows
    routed_experts: Any = None  # [L, W] uint8 or int16: record of the experts (``contract.ROUTED_EXPERTS``)

    def __post_init__(self) -> None:
        self.check()

    @property
    def truncate_status(self) -> str | None:
        """``response_truncated`` if a limit cut the response, else None; another form of ``truncated``."""
        return "response_truncated" if self.truncated else None

    def check(self) -> None:
        """Convert every field to a tensor, float or bool; raise the same errors as the constructor."""
        if isinstance(self.eid, Mapping):
            self.eid = ExperienceId(**self.eid)
        for name, dtype in SEQUENCES.items():
            setattr(self, name, self._sequence(name, dtype))
        if self.routed_experts is not None:
            experts = torch.as_tensor(self.routed_experts).detach().cpu()
            self.routed_experts = experts if experts.dtype == torch.uint8 else experts.to(torch.int16)  # of a file: int64
        length = 0 if self.tokens is None else len(self.tokens)
        if not length:
            raise self._error("tokens", "there are none", "give the ids of prompt and response")
        if (self.chosen is None) != (self.rejected is None):
            raise self._error("chosen", "only one of chosen and rejected is given", "a preference needs both")
        prompt = self._infer_prompt_length(length) if self.prompt_length is None else self.prompt_length
        if isinstance(prompt, bool) or not 0 < int(prompt) <= length:
            raise self._error("prompt_length", f"{prompt} of {length} tokens", "it is between 1 and the number of tokens")
        self.prompt_length = int(prompt)
        for name in RESPONSE_FIELDS:
            values = getattr(self, name)
            if values is not None and len(values) == length:
                if name == "action_mask" and values[: self.prompt_length].any():
                    raise self._error(name, "it marks prompt tokens as sampled", "actions come after prompt_length")
                setattr(self, name, values[self.prompt_length :])
            elif values is not None and len(values) != self.response_length:
                raise self._error(
                    name,
                    f"{len(values)} entries for {self.response_length} response tokens ({length} tokens, prompt_length {self.prompt_length})",
                    "give one for each response token",
                )
        for name in (*TOKEN_FIELDS, ROUTED_EXPERTS):
            if (values := getattr(self, name)) is not None and len(values) != length:
                raise self._error(name, f"{len(values)} entries for {length} tokens", "give one for each token")
        for name, kind in {"reward": float, **SCALARS}.items():
            if (value := getattr(self, name)) is not None:
                try:
                    setattr(self, name, kind(value))
                except (TypeError, ValueError, RuntimeError) as error:
                    raise self._error(name, f"{value!r} is no number", "give a float") from error

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - int(self.prompt_length or 0)

    @property
    def response_tokens(self) -> torch.Tensor:
        """``[L - prompt_length]`` ids after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def prompt_tokens(self) -> torch.Tensor:
        """``[prompt_length]`` ids of the prompt."""
        return self.tokens[: self.prompt_length]

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Experience):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def _infer_prompt_length(self, length: int) -> int:
        mask = self.action_mask
        if mask is not None and len(mask) == length:
            return int(mask.to(torch.int32).argmax()) if mask.any() else length
        for values in (self.logprobs, mask, self.versions):
            if values is not None and 0 < len(values) < length:
                return length - len(values)
        return length if self.chosen is not None else 1

    def _error(self, key: str, wrong: str, remedy: str) -> TrajectoryError:
        name = f"experience {self.eid}" if self.eid.task != "" else "an experience"
        return TrajectoryError(f"{name}, field {key!r}: {wrong}; {remedy}.")

    def _sequence(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        value = getattr(self, name)
        if value is None:
            return None
        try:
            tensor = torch.as_tensor(value).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._error(name, f"it is no sequence of numbers ({error})", "give a list, an array or a tensor") from error
        if tensor.dim() == 2 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() != 1:
            raise self._error(name, f"its shape is {list(tensor.shape)}", "it has one dimension")
        if tensor.numel() and tensor.is_floating_point() and not dtype.is_floating_point and dtype != torch.bool:
            raise self._error(name, f"its type is {tensor.dtype}", "it holds integers")
        return tensor.to(dtype)

    def to_trajectory(self) -> Trajectory:
        """Convert to one row ``[1, L]``; unknown log-probabilities, versions, temperature and truncation are left out.

        ``info`` and ``metrics`` become the column ``details``, one dict per row.

        Raises:
            TrajectoryError: there is no reward, or an assigned field is invalid.
        """
        self.check()
        if self.reward is None:
            raise self._error("reward", "there is none", "set it before the workflow returns")
        prompt, length = int(self.prompt_length or 0), len(self.tokens)
        sampled = torch.ones(length - prompt, dtype=torch.bool) if self.action_mask is None else self.action_mask

        def full(values: torch.Tensor, fill: float) -> torch.Tensor:
            return torch.cat([values.new_full((prompt,), fill), values]).unsqueeze(0)

        out: Trajectory = {
            "input_ids": self.tokens.unsqueeze(0).clone(),
            "attention_mask": torch.ones(1, length, dtype=torch.bool),
            "loss_mask": full(sampled.to(torch.int32), 0),
            "rewards": torch.tensor([self.reward], dtype=torch.float32),
        }
        given = {name: value for name in COLUMNS if (value := getattr(self, name, None)) is not None}
        for name, value in given.items():
            pad = COLUMNS[name].pad
            if name in RESPONSE_FIELDS:
                out[name] = full(value.masked_fill(~sampled, pad) if name in ("logprobs", "versions") else value, pad)
            else:
                out[name] = value.unsqueeze(0).clone() if name in TOKEN_FIELDS else torch.tensor([value])
        out |= {name: [value] for name in PLAYER_NAMES if (value := getattr(self, name)) is not None}
        if self.multi_modal_inputs is not None:
            out["multi_modal_inputs"] = [self.multi_modal_inputs]
        if self.routed_experts is not None:
            out[ROUTED_EXPERTS] = self.routed_experts.unsqueeze(0).clone()
        out["details"] = [{"info": dict(self.info), "metrics": dict(self.metrics)}]
        return out

    @classmethod
    def from_trajectory(cls, trajectory: Mapping[str, Any]) -> list[Experience]:
        """Make one experience for each row; the prompt ends before the first sampled token."""
        out = []
        lengths = trajectory["attention_mask"].sum(dim=1).tolist()
        sequences = [name for name in (*SEQUENCES, ROUTED_EXPERTS) if name in trajectory]
        scalars = [name for name in SCALARS if name in trajectory]
        names = [name for name in PLAYER_NAMES if name in trajectory]
        for row, length in enumerate(lengths):
            values: dict[str, Any] = {name: trajectory[name][row, :length].clone() for name in sequences}
            values |= {name: trajectory[name][row].item() for name in scalars}
            values |= {name: trajectory[name][row] for name in names}
            if "details" in trajectory:
                values |= {key: dict(value) for key, value in trajectory["details"][row].items()}
            if "multi_modal_inputs" in trajectory:
                values["multi_modal_inputs"] = trajectory["multi_modal_inputs"][row]
            tokens, mask = trajectory["input_ids"][row, :length].clone(), trajectory["loss_mask"][row, :length].bool()
            out.append(cls(tokens=tokens, action_mask=mask, reward=trajectory["rewards"][row].item(), **values))
        return out

    def serialize(self) -> bytes:
        """Serialise to safetensors bytes, without pickle; fields that are not tensors go into the metadata as JSON.

        Raises:
            TrajectoryError: ``info``, messages or tools contain a value that JSON cannot represent; the message says where.
        """
        tensors: dict[str, torch.Tensor] = {}
        rest: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                tensors[f.name] = value
            elif f.name == "multi_modal_inputs":
                tensors |= {f"multi_modal_inputs.{key}": torch.as_tensor(part) for key, part in (value or {}).items()}
            elif value is not None:
                rest[f.name] = asdict(value) if isinstance(value, ExperienceId) else value
        return pack_bytes(tensors, rest)

    @classmethod
    def deserialize(cls, data: bytes) -> Experience:
        """Restore an experience from ``serialize``.

        Raises:
            TrajectoryError: the bytes are damaged or have a later format.
        """
        tensors, rest = unpack_bytes(data)
        if unknown := (set(rest) | {name.split(".")[0] for name in tensors}) - {f.name for f in fields(cls)}:
            raise TrajectoryError(
                f"serialised Experience has unknown fields {sorted(unknown)}; it was written by another version."
            )
        images = {name.split(".", 1)[1]: part for name, part in tensors.items() if name.startswith("multi_modal_inputs.")}
        plain = {name: part for name, part in tensors.items() if "." not in name}
        return cls(**plain, **rest, multi_modal_inputs=images or None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return one == other


def experiences_of(
    records: Iterable[RequestRecord], reward: float | None = None, call_rewards: Mapping[int, float] | None = None
) -> list[Experience]:
    """Make experiences of a sample's requests; each sampled token is in the action mask of exactly one experience.

    Requests that extend one another form one sequence: a request whose prompt begins with all tokens of an earlier sequence continues it.
    A request starts a new sequence if it begins differently, if another request already continued the earlier sequence, or if its
    temperature differs (a row has one temperature). The new sequence includes the shared tokens as context, without loss.

    ``response_text`` is everything after the prompt of a sequence's first request, without special tokens.

    Args:
        records: requests of the sample, in order.
        reward: reward of every experience, if already known.
        call_rewards: rewards of single requests by the record's ``index``. Each is the token reward of its request's last token, so it
            credits this and earlier requests of the sequence, but not later ones. If None, the experiences have no ``token_rewards``.
    """
    return [experience_of(calls, reward, call_rewards) for calls in sequences_of(records)]


def sequences_of(records: Iterable[RequestRecord]) -> list[list[RequestRecord]]:
    """Group requests that extend one another; see ``experiences_of``."""
    sequences: list[list[RequestRecord]] = []
    for record in records:
        if not record.output_bytes:
            continue
        extended = [
            calls
            for calls in sequences
            if calls[-1].temperature == record.temperature
            and record.prompt.continues(calls[-1].prompt, calls[-1].output_bytes)
            and _shows_the_same(record.multi_modal, calls[-1].multi_modal)
        ]
        if extended:
            max(extended, key=lambda calls: len(calls[-1].prompt) + len(calls[-1].output)).append(record)
        else:
            sequences.append([record])
    return sequences


def _shows_the_same(images: dict[str, Any] | None, before: dict[str, Any] | None) -> bool:
    """Return whether ``images`` begin with those of an earlier request; the first axis of each tensor counts images."""
    if images is before or not before:
        return True
    if images is None or images.keys() != before.keys():
        return False
    return all(torch.equal(images[name][: len(value)], value) for name, value in before.items())


def experience_of(
    calls: list[RequestRecord], reward: float | None = None, call_rewards: Mapping[int, float] | None = None
) -> Experience:
    """Make one experience from requests that each continue the previous one; arguments as for ``experiences_of``."""
    prompt_length, last = len(calls[0].prompt), calls[-1]
    tokens = torch.from_numpy(np.concatenate([last.prompt.array, last.output]).astype(np.int64))
    length = len(tokens) - prompt_length
    logprobs, versions = torch.zeros(length), torch.full((length,), -1, dtype=torch.int32)
    mask, token_rewards = torch.zeros(length, dtype=torch.bool), torch.zeros(length)
    for record in calls:
        begin = len(record.prompt) - prompt_length
        end = begin + len(record.output)
        mask[begin:end] = True
        logprobs[begin:end] = torch.from_numpy(record.output_logprobs)
        versions[begin:end] = torch.from_numpy(record.output_versions.copy())
        token_rewards[end - 1] = (call_rewards or {}).get(record.index, 0.0)
    tokenizer = last.tokenizer
    return Experience(
        prompt_text=tokenizer.decode(tokens[:prompt_length].tolist(), skip_special_tokens=False)
        if tokenizer is not None
        else None,
        response_text=tokenizer.decode(tokens[prompt_length:].tolist(), skip_special_tokens=True)
        if tokenizer is not None
        else None,
        tokens=tokens,
        prompt_length=prompt_length,
        logprobs=logprobs,
        versions=versions,
        action_mask=mask,
        token_rewards=None if call_rewards is None else token_rewards,
        reward=reward,
        temperature=last.temperature,
        truncated=last.truncated,
        multi_modal_inputs=last.multi_modal or None,
    )
