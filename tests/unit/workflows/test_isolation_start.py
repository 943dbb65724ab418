"""How long the process of an isolated workflow may take to start, and who pays for it."""

import asyncio
from types import SimpleNamespace

import pytest

from rollwright.errors import WorkflowError
from rollwright.processes.child import UNCOUNTED, UncountedTime
from rollwright.workflows import isolation


class Starting(isolation.IsolatedProcess):
    """A process that is ready when its test says so."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ready, self.is_over, self.sent = self.loop.create_future(), False, []
        self._process = None

    def _send(self, kind: bytes, body: bytes) -> None:
        self.sent.append(kind)


async def test_the_time_until_it_is_ready_is_not_counted_and_that_of_its_task_is():
    process, uncounted = Starting(), UncountedTime()
    UNCOUNTED.set(uncounted)
    run = asyncio.ensure_future(process.run({"task": SimpleNamespace(task_id="t")}, None, None))
    await asyncio.sleep(0.2)
    assert not process.sent
    process.ready.set_result(None)
    await asyncio.sleep(0.05)
    assert process.sent == [isolation.RUN]
    passed = uncounted.seconds
    assert passed >= 0.15
    await asyncio.sleep(0.1)
    assert uncounted.seconds == passed
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_one_that_is_never_ready_is_given_up(monkeypatch):
    monkeypatch.setattr(isolation, "START_SECONDS", 0.05)
    process = Starting()
    with pytest.raises(WorkflowError, match=r"was not ready after 0\.05 s"):
        await process.run({"task": SimpleNamespace(task_id="t")}, None, None)
    assert process.is_over


def test_what_passes_in_two_starts_at_once_is_left_out_once():
    uncounted = UncountedTime()
    assert uncounted.seconds == 0.0
    with uncounted.passing():
        with uncounted.passing():
            pass
        first = uncounted.seconds
    assert uncounted.seconds >= first > 0.0
    assert uncounted.seconds == uncounted.seconds
