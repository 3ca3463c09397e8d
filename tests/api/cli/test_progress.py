"""Progress of long commands: lines in a log, with an estimate."""

from __future__ import annotations

import logging

import pytest
from rich.progress import Progress

from ragcache_api.cli import console as ui
from ragcache_api.cli.progress import StageProgress, format_duration, progress_bar


def test_a_log_gets_a_line_every_ten_seconds_with_an_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    progress = StageProgress(Progress(disable=True), lambda: now)
    for second, done in ((0, 0), (5, 1), (10, 2), (19, 3), (20, 4), (40, 8)):
        now = float(second)
        progress.report("encoding", done, 8)
    assert capsys.readouterr().err.splitlines() == [
        "encoding: 2 of 8 (25%), about 30 s left",
        "encoding: 4 of 8 (50%), about 20 s left",
        "encoding: 8 of 8 (100%)",
    ]


def test_parts_that_were_done_before_are_no_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    progress = StageProgress(Progress(disable=True), lambda: now)
    for second, done in ((10, 8), (20, 18)):
        now = float(second)
        progress.report("encoding", done, 48)
    assert capsys.readouterr().err.splitlines() == [
        "encoding: 8 of 48 (17%)",
        "encoding: 18 of 48 (38%), about 30 s left",
    ]


def test_a_log_gets_the_progress_of_a_conversion(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ragcache.models.gguf")
    with ui.loading_model():
        logger.info("converting %s to a checkpoint, once", "model.gguf")
    logger.info("nobody waits for this")
    assert capsys.readouterr().err == "converting model.gguf to a checkpoint, once\n"


def test_a_short_command_writes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not ui.errors.is_terminal
    with progress_bar("asking") as report:
        report(1, 2)
        report(2, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (99, "99 s"), (720, "12 min"), (12_600, "3.5 h")]
)
def test_durations_have_their_largest_fitting_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
