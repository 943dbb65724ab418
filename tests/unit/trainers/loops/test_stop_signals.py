"""What signals do to a run: the first one ends it after a step, the second one at once."""

import os
import signal

import pytest

from rollwright.trainers.loops.loop import StopSignal

ENDS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.mark.parametrize("number", list(ENDS))
def test_a_second_signal_ends_a_run_also_where_it_was_ignored_at_the_start(number):
    """As by ``nohup``, and in a shell script for what it starts with ``&``."""
    previous, told = signal.signal(number, signal.SIG_IGN), []
    try:
        with StopSignal() as stop:
            stop.then = lambda: told.append(stop.received)
            os.kill(os.getpid(), number)
            assert stop.received == number
            assert told == [number]
            assert signal.getsignal(number) is ENDS[number]
            if number == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), number)
    finally:
        signal.signal(number, previous)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_without_a_signal_all_is_as_it_was(handler):
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with StopSignal():
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)
