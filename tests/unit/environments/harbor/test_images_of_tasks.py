"""Images of tasks: which commands are given to docker. A stand-in notes them, because its daemon is not everywhere."""

import asyncio
import stat

import pytest
from folders import read

from rollwright.environments.harbor import images
from rollwright.environments.harbor.images import box_kind, image_files
from rollwright.errors import DataError, SandboxError

DOCKER = """#!/bin/sh
echo "$@" >> LOG
case "$1" in
  info) exit 0 ;;
  image) [ -e MADE ] ;;
  create) echo box1 ;;
  cp) case "$2" in box1:/app) mkdir "$3"; echo from-image > "$3/file" ;; *) exit 1 ;; esac ;;
  rm) ;;
  *) [ -e BROKEN ] && echo "no space left" >&2 && exit 1; sleep 0.2; touch MADE ;;
esac
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A program that notes its arguments; returns what they were."""
    directory = tmp_path / "bin"
    directory.mkdir()
    program = directory / "docker"
    text = DOCKER
    for name in ("LOG", "MADE", "BROKEN"):
        text = text.replace(name, str(tmp_path / name.lower()))
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    images.why_unusable.cache_clear()
    yield lambda: (tmp_path / "log").read_text().splitlines()
    images.why_unusable.cache_clear()


DOCKERFILE = {"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nRUN true\n"}


def test_a_dockerfile_is_built_once_for_all_samples(docker, tmp_path):
    folder = read(tmp_path / "task", DOCKERFILE)

    async def many():
        return await asyncio.gather(*(box_kind(folder, "bubblewrap") for _ in range(3)))

    kinds = asyncio.run(many())
    assert len(set(kinds)) == 1
    kind, image = kinds[0]
    assert kind == f"docker:{image}"
    assert [line for line in docker() if line.startswith("build")] == [f"build --tag {image} {folder.path}/environment"]


def test_another_dockerfile_is_another_image(docker, tmp_path):
    one, two = (read(tmp_path / name, {"environment/Dockerfile": f"FROM {name}\nWORKDIR /app\n"}) for name in ("one", "two"))
    names = [asyncio.run(box_kind(folder, "docker"))[1] for folder in (one, two)]
    assert len(set(names)) == 2


def test_an_image_is_pulled_and_a_failure_is_told(docker, tmp_path):
    folder = read(tmp_path / "task", toml='[environment]\ndocker_image = "python:3.12-slim"\nworkdir = "/app"\n')
    (tmp_path / "broken").touch()
    with pytest.raises(SandboxError, match=r"docker pull python:3\.12-slim failed: no space left"):
        asyncio.run(box_kind(folder, "docker"))
    (tmp_path / "broken").unlink()
    assert asyncio.run(box_kind(folder, "docker")) == ("docker:python:3.12-slim", "python:3.12-slim")


def test_the_files_of_an_image_are_copied_into_the_box_once(docker):
    for _ in range(2):
        copies = asyncio.run(image_files("docker:an-image", "an-image", ["/app", "/data"]))
        assert [(source.joinpath("file").read_text(), target) for source, target in copies] == [("from-image\n", "/app")]
    assert [line.split()[0] for line in docker()] == ["create", "cp", "cp", "rm"]


def test_a_task_in_an_image_names_its_working_directory(docker, tmp_path):
    folder = read(tmp_path / "task", toml='[environment]\ndocker_image = "x"\n')
    with pytest.raises(DataError, match=r"environment\.workdir is not set"):
        asyncio.run(box_kind(folder, "docker"))


def test_a_build_has_the_tasks_limit(docker, tmp_path):
    folder = read(tmp_path / "task", DOCKERFILE, "[environment]\nbuild_timeout_sec = 0.05\n")
    with pytest.raises(SandboxError, match=r"build_timeout_sec=0\.05"):
        asyncio.run(box_kind(folder, "docker"))


@pytest.mark.parametrize("sandbox", ["bubblewrap", "docker:own"])
def test_a_task_without_an_image_keeps_the_box_of_the_run(sandbox, docker, tmp_path):
    folder = read(tmp_path / "task", {"environment/Dockerfile": "FROM scratch\nCOPY Dockerfile /app/\n"})
    assert asyncio.run(box_kind(folder, sandbox)) == (sandbox, "")
