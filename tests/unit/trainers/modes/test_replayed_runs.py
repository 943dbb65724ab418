"""Which episodes of a journal a name means."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from rollwright.errors import ConfigError, ReplayError
from rollwright.experience.journal.records import Begin, End, digest_of
from rollwright.experience.journal.writing import Journal
from rollwright.trainers.modes.recorded_runs import RunReplay, selected


def write(directory, *episodes):
    """Episodes as ``(ordinal, index, version, is_eval, outcome)``, by one process."""
    journal = Journal(directory / "journal")
    for ordinal, index, version, is_eval, outcome in episodes:
        number = journal.next_episode()
        journal.write(Begin(number, ordinal, index, 0, is_eval, version, "W", 1, None, "", 0.0))
        if outcome:
            journal.write(End(number, outcome, "", [], 0.0))
    journal.close()


def found(directory, samples):
    replay = RunReplay.__new__(RunReplay)
    replay.directory = directory
    return [(each.name, each.begin.version, each.writer) for each in replay.episodes(samples)]


def test_of_a_sample_that_ran_again_after_a_resume_the_last_that_ended_is_meant(tmp_path):
    write(tmp_path, (12, 3, 0, False, "accepted"), (12, 4, 0, False, "rejected"), (13, 0, 0, False, "accepted"))
    write(tmp_path, (12, 3, 1, False, "failed"), (12, 3, 2, False, "accepted"), (13, 0, 1, False, ""))
    assert found(tmp_path, "all") == [("12/4", 0, 0), ("13/0", 0, 0), ("12/3", 2, 1)]
    assert found(tmp_path, "12/3") == [("12/3", 2, 1)]
    assert found(tmp_path, "12/3@0") == [("12/3@0", 0, 0)]
    assert found(tmp_path, "12/3@v0") == [("12/3@0", 0, 0)]
    assert found(tmp_path, "12@0") == [("12/3@0", 0, 0), ("12/4", 0, 0)]
    assert found(tmp_path, "12/3@1") == [("12/3", 2, 1)]


def test_evaluations_are_told_apart_by_the_version_of_the_weights(tmp_path):
    write(tmp_path, *((5, 0, version, True, "accepted") for version in (1, 2)))
    write(tmp_path, (5, 0, 2, True, "accepted"), (5, 0, 2, False, "accepted"))
    assert found(tmp_path, "eval:5") == [("eval:5/0@v1", 1, 0), ("eval:5/0@v2", 2, 1)]
    assert found(tmp_path, "eval:5/0@v2@0") == [("eval:5/0@v2@0", 2, 0)]
    assert found(tmp_path, "5") == [("5/0", 2, 1)]


def test_what_names_no_sample_is_refused():
    with pytest.raises(ConfigError, match="names no sample"):
        selected("12/3@first")


def test_an_image_is_found_behind_rows_whose_images_cannot_be_read():
    file, wanted = io.BytesIO(), Image.new("RGB", (4, 4), (1, 2, 3))
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    replay = RunReplay.__new__(RunReplay)
    replay._rows, replay._images = iter([{"image": Image.open(io.BytesIO(file.getvalue()[:800]))}, {"image": wanted}]), {}
    assert replay._find_image(digest_of(wanted)) is wanted
    with pytest.raises(ReplayError, match="is in no row of the datasets that the run's config names"):
        replay._find_image(digest_of(Image.new("L", (4, 4))))
