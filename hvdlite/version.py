"""The version of hvdlite, for the package's metadata and for ranks that compare theirs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from functools import cache

__version__ = "0.1.0"


@cache
def exact_version(package: str = os.path.dirname(__file__)) -> str:
    """The version, and a number that differs between commits, as what ranks tell one another may.

    It is made of the names and sizes of the sources in ``package`` when this process has asked first: to read them all
    would take 10 ms, for 2. Where there are none to be seen, as in what PyInstaller makes, it is the version alone.
    """
    try:
        sources = sorted(_sources(package))
    except OSError:
        return __version__
    return f"{__version__} (sources {zlib.crc32(''.join(sources).encode()):08x})" if sources else __version__


def _sources(directory: str) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _sources(entry.path)
            elif entry.name.endswith(".py"):
                yield f"{entry.name} {entry.stat().st_size}\n"
