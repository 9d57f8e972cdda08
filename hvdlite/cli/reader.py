"""Who reads what a tool prints: where it has gone, as `| head` does, or the disk is full, a tool ends quietly."""

from __future__ import annotations

import errno
import functools
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def ends_with_reader(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate what prints and returns an exit status: as of SIGPIPE where nobody reads, and 1 on a full disk."""

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            status = main(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()
            return status
        except BrokenPipeError:
            if not _has_gone():
                raise
            status = 128 + signal.SIGPIPE
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            print(f"hvdlite: cannot write: {error.strerror}", file=sys.stderr)
            status = 1
        with open(os.devnull, "w") as nowhere:  # for what is left in the buffer
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return status

    return wrapped


def printable(text: str) -> str:
    """``text`` with escapes for what the encoding of stdout lacks, as it may of names that programs have chosen."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _has_gone() -> bool:
    look = select.poll()
    look.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in look.poll(0))
