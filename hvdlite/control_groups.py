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


def cores() -> float | None:
    """The least share of the processors' time, in cores: 2.5, as of ``docker run --cpus 2.5``; None without one."""
    shares = []
    for directory, version in _groups("cpu"):
        if version == 1:
            words = [_text_of(directory / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        else:
            words = _text_of(directory / "cpu.max").split()
        if all(map(str.isdigit, words)) and len(words) == 2:  # without a limit the first is "max", or -1
            shares.append(int(words[0]) / int(words[1]))
    return min(shares, default=None)


def _limits(controller: str, name: str, name_in_version_1: str) -> Iterator[int]:
    for directory, version in _groups(controller):
        text = _text_of(directory / (name_in_version_1 if version == 1 else name))
        if text.isdigit() and int(text) < _NONE:
            yield int(text)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """This process's group and all above it, as far as they can be seen from here, and of which version they are."""
    for line in _text_of(_OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _ROOT / controllers
        place = top / path.lstrip("/")
        for directory in (place, *place.parents):  # a container may see the groups of its host by their names alone
            if directory.is_relative_to(top):
                yield directory, 1 if controllers else 2


def _text_of(path: Path) -> str:
    """Nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
