"""What tests of hvdliterun have in common: an mpirun, hosts, a program, and scripts that stand for some of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdlite import control_groups
from hvdlite.cli.job import Host
from hvdlite.cli.mpirun import Mpi, Mpirun

OPEN_MPI_5 = Mpirun("/opt/5/bin/mpirun", Mpi.OPEN_MPI, (5, 0, 11))
TWO_HOSTS = (Host("a", 2), Host("b", 2))
PROGRAM = ("python", "train.py")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user's, with 8 cores and no limit."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(control_groups, "cores", lambda: None)


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def says(path: Path, text: str) -> Path:
    """A program that prints ``text``, such as the version of an mpirun."""
    return executable(path, f"cat <<'END'\n{text}\nEND")


def gone(pids: Path) -> bool:
    """Whether the processes whose ids are in the file have ended."""
    return not any(os.path.exists(f"/proc/{pid}/ns/net") for pid in pids.read_text().split())
