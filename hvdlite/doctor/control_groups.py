"""What the control groups of this process leave it: those of a container, of a Slurm step, of a unit of systemd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NONE = 1 << 60  # what version 1 calls no limit is some number above


def memory_bytes() -> int | None:
    """The least limit of memory; None without one."""
    return min(_limits("memory", "memory.max", "memory.limit_in_bytes"), default=None)


def processes() -> int | None:
    """The least limit of processes and threads; None without one."""
    return min(_limits("pids", "pids.max", "pids.max"), default=None)


def _limits(controller: str, name: str, name_in_version_1: str) -> Iterator[int]:
    """Those of this process's group and of all above it, as far as they can be seen from here."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, file = (_ROOT / controllers, name_in_version_1) if controllers else (_ROOT, name)
        place = top / path.lstrip("/")
        for directory in (place, *place.parents):  # a container may see the groups of its host by their names alone
            if directory.is_relative_to(top) and (limit := _number_in(directory / file)) is not None:
                yield limit


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NONE else None
