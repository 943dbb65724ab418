"""A process on a Ray cluster, without the cluster (tests/cluster has one)."""

import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rollwright.config.sections import ClusterConfig
from rollwright.errors import ClusterError, ConfigError, LostProcessError, RolloutError
from rollwright.placement.capacity import Demand

pytest.importorskip("ray", reason="the extra `ray` is not installed")

from rollwright.placement import ray_cluster as module


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_where_nothing_listens_is_refused_without_ray_s_own_wait(monkeypatch, host):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cluster\.address: there is no Ray at {host}:{port} \(Connection refused\): start it"
        ):
            module._refuse_silence(f"{host}:{port}")
        free.listen()
        module._refuse_silence(f"127.0.0.1:{port}")
    for word in ("auto", "local", f"ray://127.0.0.1:{port}"):
        module._refuse_silence(word)


def test_what_ray_would_print_goes_to_the_run_s_log(monkeypatch, caplog, capfd):
    import ray._private.worker as worker

    monkeypatch.setattr(worker, "print_worker_logs", module._to_the_run_s_log)  # which raises where Ray has none of that name
    with caplog.at_level("DEBUG", logger="rollwright"):
        worker.print_to_stdstream({"lines": ["A worker died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert "Ray says: A worker died" in caplog.text
    assert "A worker died" not in capfd.readouterr().out


class Actor:
    """What Ray gives for a process: calls of its methods, which ``answers`` settle."""

    made = 0

    def __init__(self, *arguments):
        type(self).made += 1
        self.answers = []

    @classmethod
    def options(cls, **options):
        return cls

    @classmethod
    def remote(cls, *arguments):
        return cls(*arguments)

    def __getattr__(self, word):
        actor = self

        class Call:
            def remote(self, *arguments):
                return self

            def future(self):
                actor.answers.append(Future())
                return actor.answers[-1]

        return Call()


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(module.ray, "remote", lambda cls: Actor)
    monkeypatch.setattr(module.ray, "kill", lambda actor: None)
    monkeypatch.setattr(Actor, "made", 0)
    return module.RayProcess("worker 0", "nowhere:Nothing", lambda: (), {}, "worker-0.log")


def test_what_was_ended_for_good_is_not_placed_again(process):
    process.restart()
    assert Actor.made == 2
    process.end()
    with pytest.raises(LostProcessError, match="worker 0 has been ended"):
        process.restart()
    assert Actor.made == 2


def test_an_answer_that_cannot_be_read_is_an_error_and_no_silence(process):
    answer = process.call("run")
    process._actor.answers[-1].set_exception(TypeError("a class that is not here"))
    with pytest.raises(RolloutError, match="worker 0: TypeError: a class that is not here"):
        answer.result(1.0)


def test_a_process_that_does_not_start_is_named_with_its_log(process):
    with pytest.raises(ClusterError, match=r"worker 0 did not start within 0\.01 s.*worker-0\.log"):
        process.wait_started(0.01)


def test_a_process_that_writes_is_waited_for_beyond_its_limit(process, tmp_path):
    process._output, log = str(tmp_path), tmp_path / "server.log"

    def load():
        for number in range(6):  # six tenths of a second, of which none is silent
            log.write_text("loading\n" * (number + 1))
            time.sleep(0.1)
        process._actor.answers[1].set_result(("", None))

    loader = threading.Thread(target=load)
    loader.start()
    process.wait_started(0.3)
    loader.join()
    assert process.started.done()


def test_a_process_that_falls_silent_is_not_waited_for(process, tmp_path):
    process._output = str(tmp_path)
    (tmp_path / "server.log").write_text("loading\n")
    with pytest.raises(ClusterError, match=r"worker 0 did not start within 0\.05 s"):
        process.wait_started(0.05)


def test_a_gang_that_was_not_placed_can_be_given_up_again(monkeypatch, process):
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    cluster = module.RayCluster(ClusterConfig(kind="ray"), "logs")
    gang = [cluster.process("rank 0", "nowhere:Nothing", lambda: (), cpus=1.0, gpus=0)]
    cluster.remove(gang)  # the next one is lost while it is placed, so this one is still the last that is known
    cluster.remove(gang)
    cluster.close()


def test_a_gang_that_finds_no_place_is_told_how_long_it_was_waited_for(monkeypatch):
    waited = []
    group = SimpleNamespace(wait=lambda seconds: waited.append(seconds), id=0)
    monkeypatch.setattr(module, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr(module, "remove_placement_group", lambda _: None)
    cluster = module.RayCluster(ClusterConfig(kind="ray"), "logs")
    with pytest.raises(ConfigError, match=r"no room for 2 processes with 1 CPUs and 0 GPUs each after 120 s"):
        cluster.gang("rank", "nowhere:Nothing", 2, cpus=1.0, gpus=0)
    assert sum(waited) == 120.0
    cluster.close()


def test_what_is_spare_ends_where_another_process_finds_no_place(monkeypatch, process):
    monkeypatch.setattr("rollwright.placement.ray_process.SPARE_SECONDS", 0.05)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    cluster = module.RayCluster(ClusterConfig(kind="ray"), "logs")
    needed, spare = (
        cluster.process(name, "nowhere:Nothing", lambda: (), cpus=1.0, gpus=0, is_spare=name == "worker 2")
        for name in ("worker 0", "worker 2")
    )
    needed.restart()  # and waits for room
    deadline = time.monotonic() + 30
    while not spare._is_ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not needed._is_ended
    cluster.close()


@pytest.fixture
def cluster_that_grows(monkeypatch):
    """A cluster that has another node each time it is asked."""
    asked = []

    def nodes():
        asked.append(None)
        return [
            {"NodeManagerAddress": f"10.0.0.{number}", "NodeID": "", "Alive": True, "Resources": {"CPU": 1.0}}
            for number in range(len(asked))
        ]

    monkeypatch.setattr(module, "ROOM_SECONDS", 20.0)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(module.ray, "nodes", nodes)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr(module.ray._private.state, "available_resources_per_node", lambda: {"": {"CPU": 1.0}})
    cluster = module.RayCluster(ClusterConfig(kind="ray"), "logs")
    yield cluster
    cluster.close()


def test_a_run_that_goes_on_waits_for_a_node_that_is_coming_back(cluster_that_grows):
    demands = [Demand("worker", 2, 1.0, 0)]
    with pytest.raises(ConfigError, match="the cluster has 1"):
        cluster_that_grows.fit(demands, 2)
    assert len(cluster_that_grows.fit(demands, 3, is_waited_for=True)) == 2


def test_a_run_that_goes_on_does_without_a_node_that_stays_away(cluster_that_grows, monkeypatch, caplog):
    monkeypatch.setattr(module, "ROOM_SECONDS", 0.0)
    assert len(cluster_that_grows.fit([Demand("worker", 2, 1.0, 0)], 99, is_waited_for=True)) == 2
    assert "the run goes on with the nodes that are there" in caplog.text
    with pytest.raises(ConfigError, match="no node has them left"):
        cluster_that_grows.fit([Demand("worker", 99, 1.0, 0)], 99, is_waited_for=True)
