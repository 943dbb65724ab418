"""Rules about where the processes of a run are: which keys a kind of cluster reads, and what runs on Ray cannot do yet."""

from __future__ import annotations

from rollwright.config.experiment import BaseExperimentConfig, PPOConfig
from rollwright.config.faults import refuse, refuse_set
from rollwright.config.sections import ClusterConfig

#: Keys of ``cluster`` that only a Ray cluster reads.
_OF_RAY = (
    *("address", "nodes", "workers", "max_workers", "max_servers"),
    *(f"{resource}_per_{role}" for resource in ("cpus", "gpus") for role in ("rank", "server", "worker")),
)


def uses_ray(cluster: ClusterConfig) -> bool:
    """Whether Ray places a run: a Ray cluster that is running, or one of the run's own in a Slurm job that sets keys of Ray."""
    unchanged = ClusterConfig()
    is_set = any(getattr(cluster, name) != getattr(unchanged, name) for name in _OF_RAY)
    return cluster.kind == "ray" or (cluster.kind == "slurm" and is_set)


def _on_ray(config: BaseExperimentConfig) -> bool:
    return uses_ray(config.cluster)


RULES = (
    refuse_set(
        ClusterConfig,
        ["address"],
        lambda cluster: cluster.kind == "slurm",
        "is of a Ray that runs, and a job of Slurm has a Ray of its own; take it out",
    ),
    refuse_set(
        ClusterConfig,
        _OF_RAY,
        lambda cluster: cluster.kind == "local",
        "is of kind ray, and kind is {config.kind}; take it out",
    ),
    refuse(
        BaseExperimentConfig,
        "recover.in_background",
        lambda config: config.recover.in_background and _on_ray(config),
        "is true, and on a Ray cluster a lost rank is replaced from a checkpoint that is whole; take it out",
    ),
    refuse(
        PPOConfig,
        "cluster.processes",
        lambda config: config.cluster.processes > 1 and config.mode not in ("both", "train"),
        "is {value}, but mode {config.mode} is one process; take it out",
    ),
    *(
        refuse(PPOConfig, f"cluster.{name}", when, f"is {{value}}, less than {of} ({{config.{of}}}); raise it, or take it out")
        for name, of, when in (
            (
                "max_workers",
                "cluster.workers",
                lambda config: (
                    _on_ray(config) and (config.cluster.max_workers or config.cluster.workers) < config.cluster.workers
                ),
            ),
            (
                "max_servers",
                "rollout.servers",
                lambda config: (
                    _on_ray(config) and (config.cluster.max_servers or config.rollout.servers) < config.rollout.servers
                ),
            ),
        )
    ),
    refuse_set(PPOConfig, ["mode"], _on_ray, "is {value}; cluster.kind ray is for mode both"),
    refuse_set(
        PPOConfig,
        ["deterministic"],
        _on_ray,
        "is true, and episodes in several processes do not repeat bit for bit; take it out",
    ),
    refuse(
        PPOConfig,
        "rollout.backend",
        lambda config: config.rollout.backend == "builtin" and _on_ray(config),
        "is builtin, an engine in the process that trains; with cluster.kind ray episodes ask servers: set builtin_process, sglang "
        "or vllm",
    ),
    refuse_set(
        PPOConfig,
        ["rollout.addresses"],
        _on_ray,
        "names servers; cluster.kind ray starts its own (rollout.servers); take it out",
    ),
    refuse_set(PPOConfig, ["rollout.first_gpu"], _on_ray, "is chosen by Ray where cluster.kind is ray; take it out"),
    refuse(
        PPOConfig,
        "rollout.weight_update",
        lambda config: config.rollout.weight_update == "shared" and _on_ray(config),
        "is shared memory, which processes on several nodes do not have; set disk, xccl or auto",
    ),
    refuse_set(
        PPOConfig,
        ["journal.keep"],
        _on_ray,
        "removes files that other processes of a Ray cluster may still write; take it out",
    ),
)
