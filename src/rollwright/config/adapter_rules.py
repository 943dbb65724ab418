"""Rules about LoRA adapters (``actor.lora``, ``model.lora``): combinations that cannot work."""

from __future__ import annotations

from rollwright.config import keys_without_effect
from rollwright.config.experiment import DPOConfig, PPOConfig, SFTConfig
from rollwright.config.faults import refuse, refuse_set
from rollwright.config.sections import TrainEngineConfig

ADAPTER_RULES = (
    refuse(
        TrainEngineConfig,
        "init_from_scratch",
        lambda model: model.lora is not None and model.init_from_scratch,
        "is true, but with lora only the adapter is saved, so nothing could load its random base again; make the model first (a stage "
        "of kind model, or `rollwright model new`) and name it in path",
    ),
    *(
        refuse(
            of,
            f"{section}.lora.dropout",
            lambda config, section=section: (
                getattr(config, section).lora is not None and getattr(config, section).lora.dropout > 0
            ),
            f"is {{value}}, but {reason}; set it to 0",
        )
        for of, section, reason in (
            (
                PPOConfig,
                "actor",
                "a policy is compared with the log-probabilities at which the engine sampled, without dropout",
            ),
            (DPOConfig, "model", "DPO compares the policy with a reference that is scored without dropout"),
        )
    ),
    *(
        refuse(
            of,
            f"{section}.lora.use_dora",
            lambda config, section=section, when=when: (
                getattr(config, section).lora is not None and getattr(config, section).lora.use_dora and when(config)
            ),
            "is true, but {config.rollout.backend} engines (rollout.backend), like the others, sample with LoRA adapters only; set it to "
            f"false{instead}",
        )
        for of, section, when, instead in (
            (PPOConfig, "actor", keys_without_effect.always, ""),
            (SFTConfig, "model", keys_without_effect.runs_episodes, ", or leave out workflow and valid_dataset"),
        )
    ),
    refuse(
        PPOConfig,
        "rollout.weight_update",
        lambda config: config.actor.lora is not None and config.rollout.weight_update == "xccl",
        "is xccl, but actor.lora is set, and servers read adapters from files; set auto, shared or disk",
    ),
    refuse_set(
        PPOConfig,
        ["rollout.weight_dtype"],
        lambda config: config.actor.lora is not None,
        "is {value}, but actor.lora is set, and adapters are published as they are trained, in float32; take it out",
    ),
    refuse_set(
        PPOConfig,
        ["rollout.on_weight_update"],
        lambda config: config.actor.lora is not None,
        "is {value}, but actor.lora is set, and a request ends with the adapter that it began with; take it out",
    ),
)
