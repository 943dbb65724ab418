"""Loggers: names, streams, files, and the standard library behind them."""

import logging as standard
import subprocess
import sys

from rollwright import logging


def test_the_module_stands_in_for_the_standard_library():
    assert logging.INFO == standard.INFO
    assert logging.Formatter is standard.Formatter


def test_a_users_logger_writes_one_plain_line_to_stderr(capsys):
    logging.getLogger("MyWorkflow").info("%d samples", 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.rstrip().endswith("INFO    MyWorkflow: 3 samples")
    assert captured.err.count("\n") == 1


def test_the_packages_own_modules_keep_their_name():
    assert logging.getLogger("rollwright.rollout.executor").name == "rollwright.rollout.executor"
    assert logging.getLogger().name == logging.getLogger("rollwright").name == "rollwright"


def test_a_file_keeps_what_the_terminal_does_not_show(tmp_path, capsys):
    handler = logging.attach_file(tmp_path / "logs" / "main.log")
    logging.getLogger("quiet").debug("details")
    logging.detach_file(handler)
    logging.getLogger("quiet").debug("afterwards")
    assert "details" not in capsys.readouterr().err
    text = (tmp_path / "logs" / "main.log").read_text()
    assert "quiet: details" in text
    assert "[MainThread]" in text
    assert "afterwards" not in text


def test_the_level_is_read_from_the_environment():
    code = "from rollwright import logging; logging.getLogger('a').info('shown?'); logging.getLogger('a').error('yes')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"ROLLWRIGHT_LOG_LEVEL": "error", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "shown?" not in result.stderr
    assert "a: yes" in result.stderr
