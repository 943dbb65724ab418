"""Checks of a machine that pass, fail, crash and hang; they import nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def add(place, one, other):
    return {"sum": one + other, "directory": place.directory}


def refuse(place):
    raise ValueError("not today")


def crash(place):
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(place):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(place.directory, "pid").write_text(str(left.pid))
    time.sleep(600)
