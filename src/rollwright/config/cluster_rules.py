"""Rules about where the processes of a run are: what one of several cannot do, and what a Ray cluster does not do yet."""

from __future__ import annotations

from rollwright.config.experiment import BaseExperimentConfig, PPOConfig
from rollwright.config.sections import ClusterConfig
from rollwright.config.task_rules import Rule

#: Keys of ``cluster`` that only a Ray cluster reads.
_OF_RAY = (
    ("address", ""),
    ("nodes", 1),
    ("workers", 1),
    ("max_workers", None),
    ("max_servers", None),
    *((f"cpus_per_{role}", 1.0) for role in ("rank", "server", "worker")),
    *((f"gpus_per_{role}", 0 if role == "worker" else None) for role in ("rank", "server", "worker")),
)


def ray_keys(cluster: ClusterConfig) -> list[str]:
    """Keys that are set and that only a Ray cluster reads: a run in a job of Slurm has a Ray of its own where there are some."""
    return [name for name, default in _OF_RAY if getattr(cluster, name) != default]


def uses_ray(cluster: ClusterConfig) -> bool:
    """Whether a run is placed by Ray: by one that runs, or by its own in a job of Slurm."""
    return cluster.kind == "ray" or (cluster.kind == "slurm" and bool(ray_keys(cluster)))


def placement(cluster: ClusterConfig) -> list[Rule]:
    """Keys that nothing would read."""
    if cluster.kind == "ray":
        return []
    if cluster.kind == "slurm":
        message = "is of a Ray that runs, and a job of Slurm has a Ray of its own; take it out"
        return [(bool(cluster.address), "address", message)]
    return [(True, name, f"is of kind ray, and kind is {cluster.kind}; take it out") for name in ray_keys(cluster)]


def ray(config: PPOConfig) -> list[Rule]:
    """What a run on a Ray cluster does not do, nor one that has a Ray of its own in a job of Slurm."""
    if not uses_ray(config.cluster):
        return []
    rollout, cluster = config.rollout, config.cluster
    least = {"max_workers": ("cluster.workers", cluster.workers), "max_servers": ("rollout.servers", rollout.servers)}
    return [
        *(
            (
                most is not None and most < count,
                f"cluster.{name}",
                f"is {most}, less than {key} ({count}); raise it, or take it out",
            )
            for name, (key, count) in least.items()
            for most in [getattr(cluster, name)]
        ),
        (config.mode != "both", "mode", f"is {config.mode}; cluster.kind ray is for mode both"),
        (
            config.deterministic,
            "deterministic",
            "is true, and episodes in several processes do not repeat bit for bit; take it out",
        ),
        (
            rollout.backend == "builtin",
            "rollout.backend",
            "is builtin, an engine in the process that trains; with cluster.kind ray episodes ask servers: set builtin_process, "
            "sglang or vllm",
        ),
        (
            bool(rollout.addresses),
            "rollout.addresses",
            "names servers; cluster.kind ray starts its own (rollout.servers); take it out",
        ),
        (rollout.first_gpu is not None, "rollout.first_gpu", "is chosen by Ray where cluster.kind is ray; take it out"),
        (
            rollout.weight_update == "shared",
            "rollout.weight_update",
            "is shared memory, which processes on several nodes do not have; set disk, xccl or auto",
        ),
        (
            config.journal.keep is not None,
            "journal.keep",
            "removes files that other processes of a Ray cluster may still write; take it out",
        ),
    ]


def trained_on_ray(config: BaseExperimentConfig) -> list[Rule]:
    """What a training on a Ray cluster does not do, whatever it trains on."""
    return [
        (
            uses_ray(config.cluster) and config.recover.in_background,
            "recover.in_background",
            "is true, and on a Ray cluster a lost rank is replaced from a checkpoint that is whole; take it out",
        )
    ]


def processes(config: PPOConfig) -> list[Rule]:
    """Several ranks."""
    several, mode = config.cluster.processes, config.mode
    return [
        (
            several > 1 and mode not in ("both", "train"),
            "cluster.processes",
            f"is {several}, but mode {mode} is one process; take it out",
        )
    ]
