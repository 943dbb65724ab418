"""``rollwright doctor``: what is found, and what it says to do."""

from __future__ import annotations

import json
import socket
from importlib import metadata

import pytest
import torch

from rollwright.cli import doctor
from rollwright.cli.main import main


def found(capsys, *arguments, status=0):
    assert main(["doctor", "--json", *map(str, arguments)]) == status
    return {(each["topic"], each["name"]): each for each in json.loads(capsys.readouterr().out)}


def test_a_machine_that_runs_the_tests_is_ready(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    findings = found(capsys)
    topics = {topic for topic, _ in findings}
    assert topics >= {"Versions", "Processors", "Memory", "GPU", "Network", "Directories", "Sandbox", "Extras"}
    assert findings["Versions", "torch"]["found"] == metadata.version("torch")
    assert "free" in findings["Directories", "Runs"]["found"]
    assert not (tmp_path / "runs").exists()  # it looks, and makes nothing
    assert findings["Extras", "server"]["state"] == "ok"
    assert all(each["advice"] for each in findings.values() if each["state"] == "problem")
    assert main(["doctor"]) == 0
    assert "Ready to run." in capsys.readouterr().out


def test_a_directory_that_cannot_be_written_is_a_problem(capsys, tmp_path):
    (tmp_path / "file").write_text("no directory")
    runs = found(capsys, "--fileroot", tmp_path / "file" / "runs", status=1)["Directories", "Runs"]
    assert runs["state"] == "problem"
    assert "cluster.fileroot" in runs["advice"]
    assert main(["doctor", "--fileroot", str(tmp_path / "file" / "runs")]) == 1
    assert "1 problem" in capsys.readouterr().out


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(doctor, "_PORTS", {port: "vLLM"})
        finding = next(iter(doctor.ports()))
    assert (finding.name, finding.state, finding.advice) == (f"Port {port}", "note", "Give --port to vLLM.")


def test_a_driver_without_a_torch_that_uses_it_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (finding,) = doctor.gpus()
    assert finding.state == "problem"
    assert "CUDA_VISIBLE_DEVICES" in finding.advice


def test_gpus_are_named_with_their_free_memory(monkeypatch):
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "is_bf16_supported": False,
        "get_device_name": "Some GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((60 << 30, 80 << 30), (10 << 30, 80 << 30))[index])
    first, second, bf16 = doctor.gpus()
    assert (first.state, first.found) == ("ok", "Some GPU, 60.0 of 80.0 GiB free")
    assert second.state == bf16.state == "note"


@pytest.mark.parametrize(("text", "quota"), [("200000 100000", 2.0), ("max 100000", None), (None, None)])
def test_a_containers_share_of_the_processors(monkeypatch, text, quota):
    def read(self):
        if text is None:
            raise FileNotFoundError(self)
        return text

    monkeypatch.setattr(doctor.Path, "read_text", read)
    assert doctor._cpu_quota() == quota


def test_extras_that_are_not_there_name_their_packages(monkeypatch):
    monkeypatch.setattr(doctor, "_is_installed", lambda package: package != "bm25s")
    lacking = {finding.name: finding for finding in doctor.extras() if finding.state == "note"}
    assert list(lacking) == ["retrieval"]
    assert lacking["retrieval"].found == "rollwright retrieve"
    assert lacking["retrieval"].advice == "pip install 'rollwright[retrieval]'"


@pytest.mark.parametrize("width", [80, 120])
def test_an_extra_that_is_missing_takes_a_line(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(doctor, "_is_installed", lambda package: package in ("peft", "pillow"))
    doctor._show(list(doctor.extras()))
    lines = capsys.readouterr().out.splitlines()
    assert "installed      ok    lora, vision" in " ".join(lines)
    named = [line for line in lines if "pip install" in line]
    assert all(line.split()[0] in line.split("→")[1] for line in named)
    assert len(named) == len(list(doctor.extras())) - 2
    assert len(lines) <= len(named) + 4  # and a heading, the extras that are there, what to do
