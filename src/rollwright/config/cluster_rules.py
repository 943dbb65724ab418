"""Rules about where processes run (``cluster``): combinations that cannot work."""

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
    """Return whether Ray places the processes: ``kind`` is ray, or it is slurm and a key that only Ray reads is set."""
    unchanged = ClusterConfig()
    is_set = any(getattr(cluster, name) != getattr(unchanged, name) for name in _OF_RAY)
    return cluster.kind == "ray" or (cluster.kind == "slurm" and is_set)


def on_ray(config: BaseExperimentConfig) -> bool:
    """Return whether Ray places the processes of a run."""
    return uses_ray(config.cluster)


CLUSTER_RULES = (
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
        lambda config: config.recover.in_background and on_ray(config),
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
                    on_ray(config) and (config.cluster.max_workers or config.cluster.workers) < config.cluster.workers
                ),
            ),
            (
                "max_servers",
                "rollout.servers",
                lambda config: (
                    on_ray(config) and (config.cluster.max_servers or config.rollout.servers) < config.rollout.servers
                ),
            ),
        )
    ),
    refuse_set(PPOConfig, ["mode"], on_ray, "is {value}; cluster.kind ray is for mode both"),
    refuse_set(
        PPOConfig,
        ["deterministic"],
        on_ray,
        "is true, and episodes in several processes do not repeat bit for bit; take it out",
    ),
    refuse(
        PPOConfig,
        "rollout.backend",
        lambda config: config.rollout.backend == "builtin" and on_ray(config),
        "is builtin, an engine in the process that trains; with cluster.kind ray episodes ask servers: set builtin_process, sglang "
        "or vllm",
    ),
    refuse_set(
        PPOConfig,
        ["rollout.addresses"],
        on_ray,
        "names servers; cluster.kind ray starts its own (rollout.servers); take it out",
    ),
    refuse_set(PPOConfig, ["rollout.first_gpu"], on_ray, "is chosen by Ray where cluster.kind is ray; take it out"),
    refuse(
        PPOConfig,
        "rollout.weight_update",
        lambda config: config.rollout.weight_update == "shared" and on_ray(config),
        "is shared memory, which processes on several nodes do not have; set disk, xccl or auto",
    ),
    refuse_set(
        PPOConfig,
        ["journal.keep"],
        on_ray,
        "removes files that other processes of a Ray cluster may still write; take it out",
    ),
)
