"""The NCCL of this process: what HVDLITE_NCCL_LIBRARY names; else torch's, else a wheel's, else the system's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdlite import _native, environment

_SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARES_GPUS_SINCE = 23000


class NcclLibrary(NamedTuple):
    """A library that is loaded.

    Attributes:
        version: as 22809 for 2.28.9.
    """

    path: str
    version: int

    @property
    def shares_gpus(self) -> bool:
        """Whether it connects ranks that have one GPU, as it does if its own setting says so."""
        return self.version >= _SHARES_GPUS_SINCE and environment.variables().get(_SHARES_GPUS) == "1"

    def __str__(self) -> str:
        return f"{version_name(self.version)}, {self.path}"


def load() -> NcclLibrary:
    """The library, from now on that of this process. Starts no CUDA.

    Raises:
        RuntimeError: there is none, or one that is too old; says why.
    """
    return NcclLibrary(*_native.load_nccl(wheels(sys.path)))


def wheels(path: Sequence[str]) -> list[str]:
    """The libraries that pip has installed in the directories of ``path``."""
    candidates = [Path(directory, "nvidia", "nccl", "lib", "libnccl.so.2") for directory in path]
    return [str(candidate) for candidate in candidates if candidate.exists()]


def version_name(version: int) -> str:
    """22809 as "2.28.9"."""
    major, rest = divmod(version, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"
