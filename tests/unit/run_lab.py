"""What tests of hvdliterun have in common: an mpirun, hosts, a program, and scripts that stand for some of them."""

from __future__ import annotations

import os
from pathlib import Path

from hvdlite.cli.job import Host
from hvdlite.cli.mpirun import Mpi, Mpirun

OPEN_MPI_5 = Mpirun("/opt/5/bin/mpirun", Mpi.OPEN_MPI, (5, 0, 11))
TWO_HOSTS = (Host("a", 2), Host("b", 2))
PROGRAM = ("python", "train.py")


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def gone(pids: Path) -> bool:
    """Whether the processes whose ids are in the file have ended."""
    return not any(os.path.exists(f"/proc/{pid}/ns/net") for pid in pids.read_text().split())
