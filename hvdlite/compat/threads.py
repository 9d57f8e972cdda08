"""`horovod.runner.util.threads`, as far as programs and tests use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_thread(
    target: Callable[..., Any], args: Iterable[Any] = (), name: str | None = None, daemon: bool = True
) -> threading.Thread:
    """A thread that runs ``target(*args)``, started."""
    thread = threading.Thread(target=target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
