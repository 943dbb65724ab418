"""A supervised command ends with all that it started."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from rollwright.processes.ends_with_parent import supervised

#: Starts a child in its group and one in a session of its own, by way of a process that ends at once.
COMMAND = """
import subprocess, sys, time
quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True"
leaves = f"import subprocess; print(subprocess.Popen(['sleep', '600'], {quiet}).pid)"
orphan = subprocess.run([sys.executable, "-c", leaves], capture_output=True, text=True).stdout.strip()
print("pids", subprocess.Popen(["sleep", "600"]).pid, orphan, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what left the group cannot be found")
@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_nothing_is_left_of_a_command_also_in_other_sessions(tmp_path, ends_by_itself):
    log, shared = tmp_path / "logs" / "command.log", tmp_path / "shared"
    shared.mkdir()
    process = supervised([sys.executable, "-c", COMMAND, "0" if ends_by_itself else "600"], log, {"A": "1"}, shared)
    try:
        deadline = time.monotonic() + 60
        while "pids" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started = [int(pid) for pid in log.read_text().split()[1:]]
        assert len(started) == 2
        if not ends_by_itself:
            assert all(map(psutil.pid_exists, started))
            process.stdin.close()
        status = process.wait(60)
        assert status == (5 if ends_by_itself else 128 + 15)
        assert not any(map(psutil.pid_exists, started))
        assert shared.exists() == ends_by_itself
    finally:
        process.kill()
        process.wait()
