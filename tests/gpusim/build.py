"""Builds the simulated driver."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
ELSEWHERE = ["nccl_sim.cpp"]  # libraries of their own


def sources() -> list[Path]:
    return sorted(path for path in HERE.glob("*.cpp") if path.name not in ELSEWHERE)


def command(library: Path, *compiler: str | Path) -> list[str | Path]:
    """Compiles the simulated driver to ``library`` by ``compiler`` with its options."""
    return [
        *compiler,
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-pthread",
        "-ffp-contract=off",
        "-iquote",
        CSRC,
        *sources(),
        "-ldl",
        "-o",
        library,
    ]


def built() -> Path:
    """The simulated driver, compiled once per version of its sources and user."""
    headers = sorted([*HERE.glob("*.h"), *CSRC.rglob("*.h")])
    version = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources(), *headers])).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"hvdlite-cuda-sim-{os.getuid()}-{version}.so")
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several ranks, one compiles
        if not library.exists():
            own = library.with_suffix(f".{os.getpid()}")
            subprocess.run(command(own, "c++", "-O1"), check=True)
            own.replace(library)
    return library
