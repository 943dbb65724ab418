"""Errands: their folders are proven, and the splits share none."""

import subprocess
from pathlib import Path

import pytest
from worlds.errands import all_errands, errands, errands_of, write_folder

from rollwright.environments.harbor.tasks import harbor
from rollwright.errors import DataError


def test_an_errand_belongs_to_one_split():
    found = [each for split in ("train", "valid", "test") for each in errands_of(split)]
    assert len(set(found)) == len(found) == len(all_errands())
    with pytest.raises(DataError, match="split 'test' has"):
        errands_of("test", size=100_000)


def test_the_share_of_rows_by_a_clerk_in_a_hurry():
    rows = errands(size=400, hurried=0.25, seed=3)
    whole = [row for row in rows if row["query_id"].startswith("copy")]
    right = sum(row["segments"][1]["text"] == f"{row['answer']}<|end|>" for row in whole)
    assert 0.65 < right / len(whole) < 0.85
    assert {row["segments"][1]["text"][:2] for row in whole} == {"cp", "mv"}


def test_a_solution_makes_what_the_tests_expect(tmp_path):
    examples = {(each.verb, len(each.names)): each for each in all_errands()}
    assert len(examples) == 6
    for errand in examples.values():
        folder = tmp_path / errand.instruction
        write_folder(folder, errand)
        subprocess.run(["sh", str(folder / "solution/solve.sh")], cwd=folder / "environment", check=True)
        subprocess.run(["diff", "-r", "environment", "tests/expected"], cwd=folder, check=True)


def test_folders_are_written_once_and_read(tmp_path):
    counts = {"train": 3, "valid": 2, "test": 1}
    errands(size=1, folders=str(tmp_path / "tasks"), counts=counts)
    (first,) = harbor("test", str(tmp_path / "tasks"))
    assert len(harbor("train", str(tmp_path / "tasks"))) == 3
    folder = Path(first["task_folder"]["path"])
    (folder / "instruction.md").write_text("changed")
    errands(size=1, folders=str(tmp_path / "tasks"), counts=counts)
    assert (folder / "instruction.md").read_text() == "changed"
