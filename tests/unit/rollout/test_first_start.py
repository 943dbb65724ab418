"""The first start of what is placed on a cluster, where a process or its node is lost meanwhile."""

from concurrent.futures import Future

import pytest

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, LostProcessError
from rollwright.processes.supervisor import wait_running
from rollwright.rollout.engines import RolloutEngine
from rollwright.rollout.workers.episode_leases import DistributedRolloutEngine, RolloutWorkers


class Starts:
    """A process whose starts, and what it is asked, end as ``ends`` says: with an error, or an answer."""

    def __init__(self, *ends, name="server 0"):
        self.name, self._ends, self.restarts = name, list(ends), 0

    def wait_started(self, timeout):
        if isinstance(self._ends[0], Exception):
            raise self._ends.pop(0)

    def call(self, method, *arguments):
        answer = Future()
        answer.set_result(self._ends.pop(0))
        return answer

    def restart(self):
        self.restarts += 1


def lost(number):
    return LostProcessError(f"lost for the {number}. time")


def test_a_process_that_is_lost_while_it_starts_is_placed_again():
    process = Starts(lost(1), lost(2), "10.0.0.1:3000")
    assert wait_running(process, 1.0, "address") == "10.0.0.1:3000"
    assert process.restarts == 2


def test_one_that_is_always_lost_is_named_with_the_last_cause():
    process = Starts(*map(lost, range(1, 9)))
    with pytest.raises(
        LostProcessError, match=r"server 0 was lost 4 times while it started; the last time: lost for the 4\. time"
    ):
        wait_running(process, 1.0)
    assert process.restarts == 3


def test_one_that_cannot_start_is_not_placed_elsewhere():
    process = Starts(EngineError("there is no such model"))
    with pytest.raises(EngineError, match="no such model"):
        wait_running(process, 1.0)
    assert process.restarts == 0


def test_workers_that_are_lost_while_they_start_are_placed_again():
    workers = [Starts(None, name="worker 0"), Starts(lost(1), None, name="worker 1")]
    RolloutWorkers(workers, 1.0).wait_started()
    assert [worker.restarts for worker in workers] == [0, 1]


class Watch:
    """Notes when it begins, and what it would tell workers then."""

    def start(self):
        self.began.append(self.engine.in_service())

    def close(self):
        pass


def test_servers_are_watched_from_before_they_are_connected_to(monkeypatch):
    """The only one may be lost before it answers: somebody has to start it again."""

    def connect(self, *args, **kwargs):
        assert watch.began == [([], 0)]  # workers, which do not run yet, are told nothing
        raise EngineError("no server answers")

    monkeypatch.setattr(RolloutEngine, "initialize", connect)
    engine = DistributedRolloutEngine(RolloutConfig(), None, RolloutWorkers([], 1.0), publisher=lambda: (0, []), seed=1)
    engine.watch = watch = Watch()
    watch.engine, watch.began = engine, []
    with pytest.raises(EngineError, match="no server answers"):
        engine.initialize()
