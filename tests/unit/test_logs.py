"""Where log lines go."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from hvdlite.config import Config
from hvdlite.logs import configure_logging


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """hvdlite's, as it is in a program that has not set up logging."""
    logger = logging.getLogger("hvdlite")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "propagate", True)  # else pytest gives it handlers of its own
    monkeypatch.setattr(logger, "level", logger.level)
    return logger


def test_lines_name_their_rank(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Config(log_hide_time=True), 3)
    logger.warning("what is %s", "wrong")
    logger.info("not by default")
    assert capsys.readouterr().err == "hvdlite [3] WARNING: what is wrong\n"


def test_lines_name_the_rank_of_the_last_world(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (3, 2):
        configure_logging(Config(log_hide_time=True), rank)
        logger.warning("of a world")
    assert capsys.readouterr().err == "hvdlite [3] WARNING: of a world\nhvdlite [2] WARNING: of a world\n"


def test_lines_go_to_what_stderr_is_at_the_time(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    configure_logging(Config(log_hide_time=True), 0)
    logger.error("one")
    assert first.getvalue() == "hvdlite [0] ERROR: one\n"
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    logger.error("two")
    assert second.getvalue() == "hvdlite [0] ERROR: two\n"


def test_a_stderr_that_cannot_be_written_harms_nobody(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging(Config(), 0)
    closed = io.StringIO()
    closed.close()
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w") as full:
        for stderr in (closed, None, full):
            monkeypatch.setattr(sys, "stderr", stderr)
            logger.error("nobody reads this")


def test_a_program_with_a_handler_of_its_own_keeps_it(logger: logging.Logger) -> None:
    own = logging.StreamHandler(io.StringIO())
    logger.addHandler(own)
    configure_logging(Config(), 0)
    assert own in logger.handlers
    assert len(logger.handlers) == 2
