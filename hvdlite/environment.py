"""The environment variables of this process. No other module touches os.environ, nor does the compiled extension."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def variables() -> dict[str, str]:
    """All variables as they are now."""
    return dict(os.environ)


def at_start() -> dict[str, str]:
    """Those that this process was started with, whatever it has set since; of a fork: those of its parent."""
    try:
        return of_process("self")
    except OSError:
        return variables()


def of_process(pid: int | str) -> dict[str, str]:
    """Those that process ``pid`` was started with.

    Raises:
        OSError: it has ended, or is another user's.
    """
    content = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    pairs = (entry.partition("=") for entry in content.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def cache_directory() -> str:
    """Where this user keeps what can be made again, by the XDG Base Directory Specification; empty: nowhere."""
    cache, home = os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")
    if cache:
        return os.path.join(cache, "hvdlite")
    return os.path.join(home, ".cache", "hvdlite") if home else ""


def add(values: Mapping[str, str]) -> None:
    """Set variables, for this process and those that it starts."""
    os.environ.update(values)


def add_defaults(values: Mapping[str, str]) -> None:
    """Set those variables that are not set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def remove(names: Iterable[str]) -> None:
    """Unset variables, where they are set."""
    _put(dict.fromkeys(names))


def take(name: str) -> str:
    """The value of a variable, which processes that this one starts do not see.

    Raises:
        KeyError: the variable is not set.
    """
    return os.environ.pop(name)


@contextmanager
def changed(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while; remove those whose value is None."""
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
