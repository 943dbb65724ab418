"""The loop that trainers share: how a run ends."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from rollwright.errors import CheckpointError
from rollwright.trainers.loops.loop import Trainer


@pytest.mark.parametrize(("raised", "seen"), [(None, CheckpointError), (SystemExit, CheckpointError), (ValueError, ValueError)])
def test_a_checkpoint_that_fails_at_the_end_does_not_replace_what_ended_the_run(raised, seen, caplog):
    def wait():
        raise CheckpointError("the disk is full")

    trainer = SimpleNamespace(recover=SimpleNamespace(wait=wait))
    opened = ExitStack()
    opened.push(Trainer._wait_for_recover.__get__(trainer))
    cause = None if raised is None else raised("the cause")
    with pytest.raises(seen):  # noqa: PT012 - the stack raises, or lets the cause through
        if not opened.__exit__(raised, cause, None) and cause is not None:
            raise cause
    assert ("was not written: the disk is full" in caplog.text) == (raised is ValueError)
