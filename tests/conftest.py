"""What all tests share: a tiny model with a real tokenizer, and where the shared data and texts lie."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as processors run tests: one thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no fault, and a change that did nothing to a property does not fail by another draw of its examples.
# HYPOTHESIS_PROFILE=exploring draws new ones.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", patient, derandomize=True)
settings.register_profile("exploring", patient)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
MOST_PROCESSES = 4  # of ``-n auto``: each holds torch, and what its tests start
#: Files that take longest, without ``test_`` and ``.py``.
LONGEST = [
    f"test_{name}"
    for name in (
        *(
            "vllm_server",
            "vllm_adapters",
            "vllm_transfer",
            "builtin_process",
            "modes_killed",
            "modes",
            "lost_servers",
            "notebook",
        ),
        *(
            "docs_code",
            "engine",
            "trainer",
            "wrong_requests",
            "lora_runs",
            "docs_of_workflows",
            "every_key",
            "store_model",
            "sinks",
        ),
    )
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The long forms of tests, and the table and pictures that tests make for the docs."""
    parser.addoption(
        "--seeds", type=int, default=1, help="Seeds with which several ranks are compared with one process, up to 3."
    )
    parser.addoption("--whole-examples", action="store_true", help="Runs of examples are as long as their files say.")
    parser.addoption(
        "--whole-programs", action="store_true", help="Programs of tests/clients run in every form, not in one each."
    )
    parser.addoption("--fuzz", type=int, default=3, help="Cases that schemathesis makes of each operation of a service.")
    parser.addoption("--damages", type=int, default=24, help="Run directories that tests/faults/test_damages.py damages.")
    parser.addoption("--view-runs", default=None, help="A directory of runs, every view of which tests/viewer visits.")
    parser.addoption(
        "--all-families", action="store_true", help="tests/truth goes through every family that can be built tiny."
    )
    parser.addoption("--write-key-table", action="store_true", help="Write docs/keys.md's table of which run reads which key.")
    parser.addoption(
        "--write-agents-table", action="store_true", help="Write docs/agents.md's tables: what was shown, and what to set."
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto`` of ``make test``: one process for each processor that may be used."""
    from rollwright.processes.pool import processor_count

    return min(MOST_PROCESSES, processor_count())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first: side by side with others, none of them must begin last."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, with all files of vLLM in one process: each server of it keeps a core and much memory busy."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "vLLM" if "integration/" in file and "vllm" in file else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no collection of garbage has to go through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """What failed must be found at the end of a log of which only the end is kept: no captured text of thousands of lines."""
    report = yield
    report.sections = [(title, shortened(text, 60)) for title, text in report.sections]
    for traceback, crash, _ in getattr(report.longrepr, "chain", ()):
        for entry in traceback.reprentries:
            entry.lines = shortened("\n".join(entry.lines), 80).split("\n")
        if crash is not None:
            crash.message = shortened(crash.message, 20)
    return report


def shortened(text: str, most: int) -> str:
    """The first third and the end of a text of more than ``most`` lines, each of at most 400 characters."""
    lines = [line if len(line) <= 400 else f"{line[:400]} … {len(line) - 400} characters" for line in text.split("\n")]
    if len(lines) > most:
        head = most // 3
        lines = [*lines[:head], f"… {len(lines) - most} lines …", *lines[head - most :]]
    return "\n".join(lines)


class FailuresAtOnce:
    """Names each failure when it happens: a run that is cut off has no summary."""

    def __init__(self, terminal: pytest.TerminalReporter):
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            cause = (crash.message if crash else str(report.longrepr)).split("\n")[0]
            self._terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {cause[:200]}")


@pytest.hookimpl(trylast=True)  # the reporter is registered by then
def pytest_configure(config: pytest.Config) -> None:
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


def shared_file(name: str) -> Path:
    """A file beside the repository; the test is skipped where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not there")
    return path


@pytest.fixture(scope="session")
def shared():
    """Finds files beside the repository: ``shared("data/gsm8k/train.jsonl")``."""
    return shared_file


@pytest.fixture(scope="session")
def bubblewrap() -> str:
    """The sandbox of that name; tests are skipped where it cannot be had."""
    return usable_sandbox("bubblewrap")


def usable_sandbox(name: str) -> str:
    """The name of a sandbox that works here; the test is skipped where it does not."""
    from rollwright.processes.sandbox import check_sandbox

    return _usable(check_sandbox, name)


def usable_box(name: str) -> str:
    """The name of a box that works here; the test is skipped where it does not. ``http`` is that of a service of bubblewrap boxes."""
    from rollwright.processes.boxes import check_box

    return _usable(check_box, _service_of_boxes() if name == "http" else name)


@functools.cache
def _service_of_boxes() -> str:
    """The address of a service that lends boxes until this process ends."""
    from rollwright.environments.box_service import BoxService
    from rollwright.inference.server.service import ServerThread
    from rollwright.inference.server.settings import ServiceSettings

    settings = ServiceSettings(max_body_bytes=128 << 20)
    return ServerThread(BoxService("bubblewrap", [Path("/")]).app(settings), settings).url


def _usable(check: Callable[[str], None], kind: str) -> str:
    """ROLLWRIGHT_TEST_IMAGE names the image of containers."""
    image = os.environ.get("ROLLWRIGHT_TEST_IMAGE", "") if kind in ("docker", "podman") else ""
    name = f"{kind}:{image}" if image else kind
    if why := _why_unusable(check, name):
        pytest.skip(why)
    return name


@functools.cache
def _why_unusable(check: Callable[[str], None], name: str) -> str:
    from rollwright.errors import SandboxError

    try:
        check(name)
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def warm():
    """Starts ``rollwright`` commands without their imports; see ``tests/warm.py``."""
    from warm import shared_warm

    return shared_warm()


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer with a token for each character of ASCII."""
    from rollwright.data.tokenizer import build_character_tokenizer

    return build_character_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Qwen3 of two layers with random weights and a character tokenizer, in Hugging Face form."""
    from rollwright.data.tokenizer import build_character_tokenizer
    from rollwright.training.model import new_model

    path = tmp_path_factory.mktemp("tiny-model")
    new_model(
        path,
        tokenizer=build_character_tokenizer(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
    )
    return path
