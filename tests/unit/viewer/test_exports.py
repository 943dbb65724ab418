"""``rollwright export RUN --to …``: everything that the journal and the metrics hold is in the files, for each format."""

import json
import struct
from pathlib import Path
from zipfile import ZipFile

import pytest

from rollwright.cli.main import main
from rollwright.tracking.metrics_file import read_metrics
from rollwright.viewer.run import Run


@pytest.fixture(scope="module")
def exported(recorded_run, tmp_path_factory):
    """The recorded run as JSON lines."""
    place = tmp_path_factory.mktemp("exported") / "jsonl"
    assert main(["export", str(recorded_run), str(place), "--to", "jsonl"]) == 0
    return place


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_json_lines_have_every_sample_with_its_tokens(exported, recorded_run):
    written = lines_of(exported / "samples.jsonl")
    with Run(recorded_run) as run:
        run.refresh()
        (total,) = run.index.rows("SELECT count(*) AS count FROM samples")
        assert len(written) == total["count"] == len({sample["key"] for sample in written})
        for sample in written:
            whole = run.sample(sample["key"])
            assert len(sample["rows"]) == len(whole["rows"])
            for row, shown in zip(sample["rows"], whole["rows"], strict=True):
                assert {name: value for name, value in row.items() if value == value} == {
                    name: shown[name] for name, value in row.items() if value == value
                }
            for name in ("task", "messages", "reward", "advantage", "step", "status", "reason"):
                assert sample[name] == whole[name], (sample["key"], name)
            assert [call["output"] for call in sample["calls"]] == [call["output"] for call in whole["calls"]]
    (failed,) = [sample for sample in written if sample["status"] == "failed"]
    assert "the calculator is broken" in failed["traceback"]
    assert any(result["name"].endswith("calculator") for sample in written for result in sample["results"])
    trained = [sample for sample in written if sample["trained_rows"]]
    assert len(trained) == 3 * 16
    assert all(row["trainer_logprobs"] for sample in trained for row in sample["rows"])
    pandas = pytest.importorskip("pandas")
    table = pandas.read_json(exported / "samples.jsonl", lines=True)
    assert list(table.groupby("step").size()) == [16, 16, 16]


def test_json_lines_have_the_metrics_and_the_other_tables(exported, recorded_run):
    assert lines_of(exported / "metrics.jsonl") == read_metrics(recorded_run / "metrics.jsonl")
    about = json.loads((exported / "run.json").read_text())
    assert about["state"] == "finished"
    assert about["config"]["actor.optimizer.lr"] == 1e-3
    assert about["missing"] == []
    steps = lines_of(exported / "steps.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(isinstance(step["engines"], list) and isinstance(step["audit"], dict) for step in steps)
    assert {group["state"] for group in lines_of(exported / "groups.jsonl") if not group["is_eval"]} == {"trained"}
    assert lines_of(exported / "phases.jsonl")


def test_what_is_damaged_is_named_and_the_rest_is_exported(copied_run, tmp_path, capsys):
    metrics = copied_run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + lines[1].replace('"unix_time"', '"unix_tine"') + "".join(lines[2:]))
    (journal,) = (copied_run / "journal").glob("*.journal*")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    assert main(["export", str(copied_run), str(tmp_path / "out"), "--to", "jsonl"]) == 0
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert any("metrics.jsonl" in message for message in about["missing"])
    assert len(about["missing"]) >= 2
    assert len(lines_of(tmp_path / "out" / "metrics.jsonl")) == len(lines) - 1
    assert lines_of(tmp_path / "out" / "samples.jsonl")


def test_logs_for_inspect_have_every_sample_and_each_evaluation(recorded_run, exported, tmp_path, capsys):
    assert main(["export", str(recorded_run), str(tmp_path / "logs"), "--to", "inspect"]) == 0
    said = capsys.readouterr().out
    assert "not in this format:" in said
    assert "lines of metrics.jsonl" in said
    logs = [ZipFile(file) for file in sorted((tmp_path / "logs").glob("*.eval"))]
    headers = [json.loads(log.read("header.json")) for log in logs]
    samples = lines_of(exported / "samples.jsonl")
    versions = {sample["group"].partition("@")[2] for sample in samples if sample["is_eval"]}
    assert {header["eval"]["model"].partition("@")[2] for header in headers} == {"", *versions}
    found = [json.loads(log.read(name)) for log in logs for name in log.namelist() if name.startswith("samples/")]
    assert sorted(sample["metadata"]["key"] for sample in found) == sorted(sample["key"] for sample in samples)
    of_key = {sample["key"]: sample for sample in samples}
    for sample in found:
        recorded = of_key[sample["metadata"]["key"]]
        assert sample["store"]["rows"] == recorded["rows"]
        assert sum(event["event"] == "model" for event in sample["events"]) == len(recorded["calls"])
        assert sum(event["event"] == "tool" for event in sample["events"]) == len(recorded["results"])


def records_of_wandb(file: Path):
    """Yield the records of a ``.wandb`` file: LevelDB's log format, after a header of seven bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, place, whole = file.read_bytes(), 7, b""
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = pb.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_an_offline_run_of_wandb_has_the_metrics_and_the_samples(recorded_run, exported, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["export", str(recorded_run), str(tmp_path / "out"), "--to", "wandb"]) == 0
    (file,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    records = list(records_of_wandb(file))
    steps = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            steps.setdefault(record.history.step.num, {}).update(values)
    expected = {}
    for line in read_metrics(recorded_run / "metrics.jsonl"):
        expected.setdefault(line["step"], {}).update({name: value for name, value in line.items() if name != "step"})
    assert len(expected) == 3
    for step, values in expected.items():
        logged = {name: None if steps[step][name] in ("NaN", None) else steps[step][name] for name in values}
        assert logged == values
    config = next(record.run.config for record in records if record.WhichOneof("record_type") == "run")
    values = {update.key: json.loads(update.value_json) for update in config.update}
    assert values["actor.optimizer.lr"] == 1e-3
    files = file.parent / "files"
    assert (files / "rollwright" / "samples.jsonl").read_text() == (exported / "samples.jsonl").read_text()
    (table,) = (files / "media" / "table").glob("**/samples*.json")
    assert len(json.loads(table.read_text())["data"]) == len(lines_of(exported / "samples.jsonl"))
    saved = [each.path for record in records for each in record.files.files]
    assert "rollwright/samples.jsonl" in saved


def test_what_cannot_be_exported_is_said(recorded_run, tmp_path, capsys):
    assert main(["export", str(recorded_run)]) == 1
    assert "rollwright export RUN --to inspect" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--to", "jsonl"]) == 1
    assert "is not a run" in capsys.readouterr().err
    assert main(["export", str(recorded_run), str(recorded_run), "--to", "jsonl"]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["export", str(recorded_run), str(tmp_path / "out"), "--to", "jsonl", "--dtype", "float32"]) == 1
    assert "--dtype, --base, --gguf" in capsys.readouterr().err
