"""LoRA adapters: what describes one, and the names of its tensors.

An adapter is a small set of tensors beside a frozen base. Trainer, transports, engines and checkpoints all use PEFT's form: a directory with
``adapter_config.json`` and ``adapter_model.safetensors``, whose tensors are named
``base_model.model.<module>.lora_A.weight [rank, in]`` and ``base_model.model.<module>.lora_B.weight [out, rank]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.config.experiment import PPOConfig, section_of
from rollwright.errors import ConfigError

#: PEFT's prefix of the names in ``adapter_model.safetensors``.
PREFIX = "base_model.model."

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterSpec:
    """The hyperparameters of an adapter, without its tensors.

    Attributes:
        rank: number of columns of B and rows of A.
        alpha: the update is ``scaling · B A x``, where ``scaling`` is ``alpha / rank``, or ``alpha / sqrt(rank)`` with ``use_rslora``.
        targets: names of the adapted linear modules without their path, such as ``q_proj``.
        use_rslora: rank-stabilised scaling (arXiv 2312.03732).
        use_dora: weight-decomposed adaptation (arXiv 2402.09353); adds the tensors ``lora_magnitude_vector``.
        base: path or name of the base model.
        excluded: paths of modules that have the name of a target and are not adapted, such as those of a vision tower.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False
    use_dora: bool = False
    base: str = ""
    excluded: tuple[str, ...] = ()

    @property
    def scaling(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def to_peft(self) -> dict[str, Any]:
        """Return the content of ``adapter_config.json``."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            **({"exclude_modules": list(self.excluded)} if self.excluded else {}),
        }

    @classmethod
    def from_peft(cls, content: Mapping[str, Any]) -> AdapterSpec:
        """Read the content of ``adapter_config.json``.

        Raises:
            ConfigError: it describes something other than LoRA of linear layers with one rank.
        """
        if content.get("peft_type") != "LORA":
            raise ConfigError(f"The adapter is of type {content.get('peft_type')!r}; only LORA adapters can be loaded.")
        targets = content.get("target_modules")
        if isinstance(targets, str):
            raise ConfigError(
                f"The adapter's target_modules is {targets!r}, which names no modules: list the names of the linear modules instead."
            )
        excluded = content.get("exclude_modules") or ()
        if isinstance(excluded, str):
            raise ConfigError(
                f"The adapter's exclude_modules is {excluded!r}, a pattern: list the paths of the modules instead."
            )
        for key, plain in (
            ("bias", "none"),
            ("rank_pattern", {}),
            ("alpha_pattern", {}),
            ("modules_to_save", None),
            ("fan_in_fan_out", False),
        ):
            if content.get(key, plain) not in (plain, None):
                raise ConfigError(f"The adapter's {key} is {content[key]!r}; only {plain!r} can be loaded.")
        return cls(
            rank=int(content["r"]),
            alpha=float(content["lora_alpha"]),
            targets=tuple(sorted(targets or ())),
            use_rslora=bool(content.get("use_rslora", False)),
            use_dora=bool(content.get("use_dora", False)),
            base=str(content.get("base_model_name_or_path") or ""),
            excluded=tuple(excluded),
        )


@dataclass(frozen=True)
class AdapterRoom:
    """What servers have to hold for a run that trains an adapter.

    Attributes:
        run: name of the run, with which the names of its adapters begin; other runs beside the same servers have others.
        count: number of versions that requests may use at once: the current one, and those of requests that have not ended.
        rank: rank of the adapters.
    """

    run: str = "policy"
    count: int = 2
    rank: int = 16

    @property
    def in_use(self) -> int:
        """Number of adapters that requests may use at once: the next one is loaded before the oldest is unloaded."""
        return self.count + 1

    @property
    def loaded(self) -> int:
        """Number of adapters that servers have room for: unloading may wait for requests, or be left to the next process of the run."""
        return 2 * self.in_use


def module_weight(name: str) -> str:
    """Return the name of the base's weight that a tensor of an adapter belongs to."""
    return name.removeprefix(PREFIX).partition(".lora_")[0] + ".weight"


def is_adapter(path: str | Path) -> bool:
    """Return True if a directory holds an adapter and no whole model."""
    return (Path(path) / CONFIG_FILE).is_file() and not (Path(path) / "config.json").is_file()


def version_name(version: int, run: str = "policy") -> str:
    """Return the name under which an engine holds a version of a run's adapter, such as ``policy-v3``.

    Each version has a name of its own, because a prefix cache keyed by name would otherwise serve an old policy.
    """
    return f"{run}-v{version}"


def adapter_room(config: PPOConfig) -> AdapterRoom | None:
    """Return what servers have to hold for the adapter that a run trains. None if it trains a whole model.

    A server that knows the run by its key has another name for it (``ServerAdapters.connect``).
    """
    lora = section_of(config).lora
    if lora is None:
        return None
    run = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{config.experiment_name}-{config.trial_name}")
    return AdapterRoom(run, config.rollout.max_head_offpolicyness + 1, lora.rank)
