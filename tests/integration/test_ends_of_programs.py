"""A program that ends while samples run ends as it would without them: no abort, and its own exit status."""

import pytest

PROGRAM = """
import sys, time
from transformers import AutoModelForCausalLM
from rollwright import GenerationHyperparameters, LocalRolloutEngine, ModelRequest, load_tokenizer
from rollwright.config.sections import RolloutConfig

path, end = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path)
engine = LocalRolloutEngine(RolloutConfig(device="cpu"), model=model, tokenizer=load_tokenizer(path))
engine.initialize()

class Endless:
    async def arun_episode(self, engine, data):
        while True:
            await engine.agenerate(ModelRequest(input_ids=[5, 6], gconfig=GenerationHyperparameters(max_new_tokens=50, ignore_eos=True)))

for number in range(32):
    engine.submit({"number": number}, Endless())
while engine.executor.counters()["running_samples"] < 32:
    time.sleep(0.01)
time.sleep(0.5)
if end == "raises":
    raise ValueError("a bug in the program")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("returns", 0), ("raises", 1)])
def test_a_program_that_ends_while_samples_run(tiny_model, tmp_path, warm, end, status):
    (tmp_path / "program.py").write_text(PROGRAM)
    for _ in range(3):
        done = warm.run([tmp_path / "program.py", tiny_model, end], tmp_path, timeout=200)
        assert done.returncode == status, done.stderr[-3000:]
        assert ("ValueError: a bug in the program" in done.stderr) == (end == "raises")
