"""`rollwright replay` of a place without a journal: one plain line that says what to give."""

import pytest

from rollwright.cli.main import main


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "is not a directory: give that of a run"),
        (["grpo/metrics.jsonl"], "has no journal: give the directory of a run that kept one"),
        (
            ["one/journal/000000-0000.journal", "two/journal/000000-0000.journal"],
            "has the journals of several stages: give one of",
        ),
    ],
)
def test_it_is_told_without_a_traceback(tmp_path, capsys, made, message):
    for name in made:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(b"")
    assert main(["replay", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path / 'run'} {message}")
    assert "traceback" not in err
