"""What is said where the kernel lets a process have no more threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdlite.errors import StartupError

NO_THREAD = "no thread can be started: raise the limit on processes and threads (ulimit -u, and pids of a container)"


@contextmanager
def thread_shortage_told() -> Iterator[None]:
    """Around the start of a thread, of Python's or of native code, while a world begins; raises StartupError."""
    try:
        yield
    except RuntimeError as error:  # that of threading, and what std::system_error becomes
        raise StartupError(NO_THREAD, concerns_all=False) from error
