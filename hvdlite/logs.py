"""Where hvdlite's log lines go: stderr, each naming its rank."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from hvdlite.config import Config

_LEVELS = {"trace": logging.DEBUG, "fatal": logging.CRITICAL}


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is at the time: test runners put their own in its place, and close it."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        with suppress(AttributeError, OSError, ValueError):  # there is none, it is full, or closed
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def configure_logging(config: Config, rank: int) -> None:
    """Set up the logger 'hvdlite', unless the program has given it a handler of its own.

    A process may have another rank in each world: the last call counts.
    """
    logger = logging.getLogger("hvdlite")
    logger.setLevel(_LEVELS.get(config.log_level) or config.log_level.upper())
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.propagate = False
    stamp = "" if config.log_hide_time else "%(asctime)s "
    for handler in logger.handlers:
        if isinstance(handler, _StderrHandler):
            handler.setFormatter(logging.Formatter(f"{stamp}hvdlite [{rank}] %(levelname)s: %(message)s"))
