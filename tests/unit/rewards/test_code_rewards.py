"""Rewards that try the code that a model wrote: it runs in the run's sandbox, and in no jail of the episode that is scored."""

from __future__ import annotations

import asyncio

import pytest

from rollwright import AsyncRewardWrapper
from rollwright.errors import RewardError
from rollwright.processes.sandbox import run_python, sandbox_name, sandboxed

RIGHT = "def add(a, b): return a + b"
TESTS = "assert add(1, 2) == 3 and add(-1, 1) == 0"
NAMESPACE = "import os; print(os.readlink('/proc/self/ns/pid'))"


async def tried(prompt, completion, prompt_ids, completion_ids, tests, **columns):
    return float((await run_python(f"{completion}\n{tests}", timeout=60)).ok)


def scores_in_a_worker():
    """A sync function that is sent by value, as those of a plugin are."""

    def passes_tests(prompt, completion, prompt_ids, completion_ids, tests, **columns):
        import asyncio

        from rollwright.processes.sandbox import run_python

        return float(asyncio.run(run_python(f"{completion}\n{tests}", timeout=60)).ok)

    return passes_tests


@pytest.mark.parametrize("reward", [tried, scores_in_a_worker()], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (RIGHT, 1.0),
        ("def add(a, b): return 3", 0.0),
        ("def add(", 0.0),
        ("import os; os._exit(1)", 0.0),
        (f"import os; os.kill(1, 9); {RIGHT}".replace("; def", "\ndef"), 1.0),
        (f"import os; os.fork()\n{RIGHT}", 0.0),
    ],
)
async def test_code_is_tried_in_the_sandbox(bubblewrap, reward, completion, score):
    wrapper = AsyncRewardWrapper(reward, timeout_seconds=120, max_workers=1)
    assert await wrapper("p", completion, [1], [2], tests=TESTS) == score


async def test_a_reward_has_a_jail_of_its_own(bubblewrap):
    seen = []

    async def reward(prompt, completion, prompt_ids, completion_ids, **columns):
        seen.append((await run_python(NAMESPACE, timeout=60)).stdout)
        return 1.0

    with sandboxed(bubblewrap):
        episode = (await run_python(NAMESPACE, timeout=60)).stdout
        await AsyncRewardWrapper(reward)("p", "c", [1], [2])
        again = (await run_python(NAMESPACE, timeout=60)).stdout
    assert episode == again != seen[0]


async def test_a_worker_uses_the_sandbox_of_the_run():
    wrapper = AsyncRewardWrapper(scores_in_a_worker(), timeout_seconds=120, max_workers=1, max_retries=0)
    forks = "import os\nif os.fork(): os.wait()"
    with sandboxed("unsafe"):
        assert sandbox_name() == "unsafe"
        assert await wrapper("p", forks, [1], [2], tests="") == 1.0
    with sandboxed("nowhere"), pytest.raises(RewardError, match="there is no sandbox 'nowhere'"):
        await wrapper("p", forks, [1], [2], tests="")
    assert asyncio.get_running_loop().is_running()
