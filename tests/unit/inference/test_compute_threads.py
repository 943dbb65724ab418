"""Threads that wait have no OpenMP workers: those of the thread that computes would sleep between operations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKERS_BEFORE_AND_AFTER = """
import json, os, threading
import torch
from rollwright.inference.compute_threads import release_workers

def threads():
    return len(os.listdir("/proc/self/task"))

a = torch.randn(256, 256)
without = threads()
torch.mm(a, a)
working = threads()
release_workers()
released = threads()
torch.mm(a, a)
again, seen = threads(), []
other = threading.Thread(target=lambda: (torch.mm(a, a), seen.append(threads()), release_workers(), seen.append(threads())))
other.start()
other.join()
print(json.dumps([without, working, released, again, *seen, torch.get_num_threads()]))
"""

ENGINE_THAT_IDLES = """
import json, os, sys, time
import torch
from rollwright import GenerationHyperparameters, ModelRequest
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.training.model import new_model
from rollwright.data.tokenizer import build_character_tokenizer

def workers():
    return len(os.listdir("/proc/self/task"))

tokenizer = build_character_tokenizer("0123456789")
model = new_model(sys.argv[1], "qwen3", tokenizer=tokenizer, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, seed=1)
engine = BuiltinEngine(model, tokenizer, max_running_requests=32, threads=2)
most = []
def generate():
    requests = [ModelRequest([1, 2, 3], gconfig=GenerationHyperparameters(max_new_tokens=32, min_new_tokens=32)) for _ in range(32)]
    futures = engine.submit(requests)
    while not all(future.done() for future in futures):
        most.append(workers())
        time.sleep(0.001)
    time.sleep(0.5)
generate()  # torch starts threads of its own the first time
idle = workers()
most.clear()
generate()
print(json.dumps([idle, max(most), workers()]))
engine.destroy()
"""


def run(program: str, *arguments: str) -> str:
    environment = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")


def test_a_threads_workers_end_and_come_again():
    without, working, released, again, other_working, other_released, number = json.loads(run(WORKERS_BEFORE_AND_AFTER))
    assert working == without + 1, "torch made no worker: its OpenMP is another than the one that this test knows"
    assert released == without
    assert again == working
    assert other_working == again + 2, "a thread's workers are its own"
    assert other_released == again + 1
    assert number == 2, "the number of threads stays"


def test_an_engine_that_idles_has_no_workers(tmp_path):
    idle, busy, idle_again = json.loads(run(ENGINE_THAT_IDLES, str(tmp_path / "model")))
    assert busy == idle + 1
    assert idle_again == idle
