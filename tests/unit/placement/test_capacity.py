"""What a run asks of a cluster, and where it fits."""

import dataclasses

import pytest

from rollwright.config.experiment import GRPOConfig
from rollwright.config.modes import AuxiliaryModelConfig
from rollwright.config.rules import faults_of, validate
from rollwright.config.sections import ClusterConfig, RolloutConfig
from rollwright.errors import ConfigError
from rollwright.placement.capacity import Demand, Node, demands_of, place


def config(cluster=None, rollout=None, **more):
    return GRPOConfig(
        cluster=ClusterConfig(**{"kind": "ray", **(cluster or {})}),
        rollout=RolloutConfig(**{"backend": "builtin_process", **(rollout or {})}),
        **more,
    )


def test_ranks_are_close_together_and_the_rest_is_spread():
    demands = [Demand("rank", 2, 1.0, 1), Demand("server", 2, 1.0, 0), Demand("worker", 2, 1.0, 0)]
    nodes = [Node("10.0.0.1", 4.0, 2), Node("10.0.0.2", 4.0, 4)]
    where = dict(place(demands, nodes))
    assert where["rank 0"] == where["rank 1"] == "10.0.0.1"
    assert {where["server 0"], where["server 1"], where["worker 0"], where["worker 1"]} == {"10.0.0.1", "10.0.0.2"}


def test_what_does_not_fit_is_named_with_what_is_left():
    with pytest.raises(
        ConfigError,
        match=r"server 1 needs 1 CPUs and 1 GPUs.*10\.0\.0\.1: 6 of 8 CPUs and 0 of 2 GPUs.*asks for 3 CPUs and 3 GPUs in all "
        r"\(1 rank, 2 servers\).*rollout\.servers",
    ):
        place([Demand("rank", 1, 1.0, 1), Demand("server", 2, 1.0, 1)], [Node("10.0.0.1", 8.0, 2)])
    with pytest.raises(ConfigError, match=r"cluster\.nodes is 3, and the cluster has 1"):
        place([], [Node("10.0.0.1", 8.0, 2)], 3)


def test_gpus_follow_the_backend_and_the_device():
    def gpus(cfg, has_gpus):
        return {demand.role: demand.gpus for demand in demands_of(cfg, has_gpus)}

    assert gpus(config(), False) == {"rank": 0, "server": 0, "worker": 0}
    sglang = config(rollout={"backend": "sglang", "tensor_parallel": 4})
    assert gpus(sglang, True) == {"rank": 1, "server": 4, "worker": 0}
    on_cpu = dataclasses.replace(sglang, actor=dataclasses.replace(sglang.actor, device="cpu"))
    assert gpus(on_cpu, True)["rank"] == 0
    assert gpus(config({"gpus_per_rank": 2, "gpus_per_worker": 1}), True) == {"rank": 2, "server": 0, "worker": 1}
    judges = [AuxiliaryModelConfig(base_url="http://judge/v1"), AuxiliaryModelConfig(model_path="judge", threads=4)]
    (demand,) = (
        each for each in demands_of(dataclasses.replace(config(), auxiliary_models=judges), True) if each.role == "auxiliary"
    )
    assert demand == Demand("auxiliary", 1, 4.0, 1)


@pytest.mark.parametrize(
    ("cfg", "sentence"),
    [
        (config({"kind": "local", "workers": 2}), "cluster.workers: is of kind ray, and kind is local"),
        (
            config({"kind": "slurm", "address": "auto"}),
            "cluster.address: is of a Ray that runs, and a job of Slurm has a Ray of its own",
        ),
        (config(rollout={"backend": "builtin"}), "rollout.backend: is builtin"),
        (config(rollout={"weight_update": "shared"}), "rollout.weight_update: is shared memory"),
        (config(rollout={"addresses": ["10.0.0.1:3000"]}), "rollout.addresses: names servers"),
        (config(mode="bench"), "mode: is bench"),
        (config(deterministic=True), "deterministic: is true"),
        (config({"workers": 3, "max_workers": 2}), r"cluster.max_workers: is 2, less than cluster.workers \(3\)"),
        (config({"kind": "slurm", "workers": 2}, {"backend": "builtin"}), "rollout.backend: is builtin"),  # a Ray in the job
    ],
)
def test_what_a_ray_cluster_does_not_do_is_refused(cfg, sentence):
    with pytest.raises(ConfigError, match=sentence):
        validate(cfg)


def test_a_job_without_workers_of_its_own_is_a_run_of_one_machine():
    assert not [
        message for _, message in faults_of(config({"kind": "slurm"}, {"backend": "builtin"})) if "is builtin" in message
    ]
