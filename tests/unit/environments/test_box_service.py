"""What the service of boxes refuses, and what it stops; ``test_box`` shows what its boxes do."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import httpx
import pytest

from rollwright.environments.box_service import BoxService
from rollwright.errors import ConfigError, SandboxError
from rollwright.inference.server.service import ServerThread
from rollwright.inference.server.settings import ServiceSettings
from rollwright.processes.box import BoxSpec
from rollwright.processes.boxes import check_box, make_box
from rollwright.processes.http_box import KEY
from tests.quiet_ports import quiet_ports

pytestmark = pytest.mark.usefixtures("bubblewrap")


@contextmanager
def lending(api_key=None, sandbox="bubblewrap", **arguments):
    """The address of a service of boxes."""
    settings = ServiceSettings(api_key=api_key)
    server = ServerThread(BoxService(sandbox, **arguments).app(settings), settings)
    try:
        yield server.url
    finally:
        server.stop()


def boxes_of(url):
    return httpx.get(f"{url}/health", timeout=60).json()["boxes"]


def test_a_service_wants_its_key(monkeypatch):
    with lending(api_key="secret") as url:
        with pytest.raises(SandboxError, match=f"no valid key.* Set {KEY}"):
            check_box(url)
        monkeypatch.setenv(KEY, "secret")
        check_box(url)
        assert boxes_of(url) == 0


def test_a_service_that_is_not_there_is_named():
    (port,) = quiet_ports(1)
    with pytest.raises(SandboxError, match=f"the service of boxes at http://127.0.0.1:{port} does not answer.*ConnectError"):
        check_box(f"http://127.0.0.1:{port}")
    with pytest.raises(SandboxError, match="is no address of a service of boxes"):
        check_box("http://")


async def test_only_named_directories_are_shown_and_only_so_many_boxes_lent(tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "programs" / "link").symlink_to(tmp_path / "secret")
    with lending(readable=[tmp_path / "programs"], max_boxes=1) as url:
        for hidden in ("secret", "programs/link"):
            with pytest.raises(SandboxError, match=rf"boxes may not show {tmp_path}/secret; they may show {tmp_path}/programs"):
                await make_box(url, BoxSpec(readable={"/x": (tmp_path / hidden).resolve()})).start()
        box = make_box(url, BoxSpec(readable={"/x": tmp_path / "programs"}))
        await box.start()
        try:
            with pytest.raises(SandboxError, match="there are 1 boxes already"):
                await make_box(url, BoxSpec()).start()
        finally:
            await box.stop()
        with pytest.raises(SandboxError, match="there is no such box"):
            await box.exec(["true"], timeout=10)
        assert boxes_of(url) == 0


async def test_a_box_whose_client_is_gone_is_stopped():
    with lending(idle_seconds=1.0) as url:
        box = make_box(url, BoxSpec())
        await box.start()
        assert (await box.exec(["sleep", "2.5"], timeout=60)).ok  # a command that runs is a request
        for _ in range(300):
            if not await asyncio.to_thread(boxes_of, url):
                break
            await asyncio.sleep(0.2)
        with pytest.raises(SandboxError, match="there is no such box"):
            await box.exec(["true"], timeout=10)


class SlowBox:
    """A user's box that takes its time."""

    happened = ()

    def __init__(self, spec):
        self.spec, self.workdir, self.home = spec, *spec.writable[:2]
        SlowBox.happened += ("made",)

    async def start(self):
        await asyncio.sleep(1)
        SlowBox.happened += ("started",)

    async def stop(self):
        SlowBox.happened += ("stopped",)


async def test_a_client_that_gives_up_while_its_box_starts_leaves_none(monkeypatch):
    monkeypatch.setattr(SlowBox, "happened", ())
    with lending(sandbox=f"{__name__}.SlowBox") as url:
        starting = asyncio.create_task(make_box(url, BoxSpec()).start())
        for awaited, then in (("made", starting.cancel), ("stopped", lambda: None)):
            for _ in range(300):
                if awaited in SlowBox.happened:
                    break
                await asyncio.sleep(0.1)
            then()
        assert SlowBox.happened == ("made", "started", "stopped")
        assert await asyncio.to_thread(boxes_of, url) == 0


def test_a_service_lends_boxes_of_its_own_machine():
    with pytest.raises(ConfigError, match="is another service"):
        BoxService("http://127.0.0.1:1")
