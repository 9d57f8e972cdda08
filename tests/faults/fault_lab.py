"""Scripts for jobs that go wrong, and what must be true of their end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping

import pytest

from hvdlite.cli.mpirun import Mpi
from launching import Result, launch, mpirun_of

END_S = 10.0  # every rank has ended by then

# The start of every script. MACHINES groups the ranks of this machine into nodes that reach one another through MPI and
# TCP only; `step` is an allreduce of 4 MB, so that ranks that go wrong find the others in the middle of one.
PREAMBLE = """
import os, signal, sys, threading, time
import numpy as np
import hvdlite, hvdlite.node
from hvdlite import TensorView
from hvdlite.operations.allocate import allocate
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.barrier import barrier_async

machines = os.environ.get("MACHINES", "0" * 64)
connect = hvdlite.node._connect_to_leader

def reach(doors, rank, deadline_s):
    return connect({r: door for r, door in doors.items() if machines[r] == machines[rank]}, rank, deadline_s)

hvdlite.node._connect_to_leader = reach

def tensor(numel=1000, value=1.0):
    return TensorView.of_numpy(np.full(numel, value, np.float32))

def reduce(name, view):
    return allreduce_async(hvdlite.runtime().group, [view], [view], name=name)

def step():
    reduce("gradient", large).wait()

def say(*words):
    print(*words, flush=True)

large = tensor(1_000_000, 0.0)
"""


def run(
    script: str,
    *args: str,
    n: int = 4,
    machines: str = "",
    env: Mapping[str, str] | None = None,
    alone: bool = False,
    mpi: str = "current",
) -> Result:
    """Run ``script`` after the preamble; its ranks are on ``machines``, one if that is empty.

    With ``alone``, MPICH's mpirun leaves the ranks alone when one of them dies. By default it kills them within a
    millisecond; so they have time to say why they end, and end by themselves. Open MPI's has no such option, and leaves
    more time.
    """
    added = {"MACHINES": machines} if machines else {}
    is_mpich = mpi == "current" and mpirun_of(sys.executable).mpi is Mpi.MPICH
    options = ["-disable-auto-cleanup"] if alone and is_mpich else []
    return launch(n, PREAMBLE + script, *args, env={**added, **(env or {})}, options=options, timeout=90, mpi=mpi)


def check_end(result: Result, *words: str) -> None:
    """It failed, in time, left nothing, and a rank that lived on has said all of ``words`` in its error.

    Launchers end a job as soon as a rank ends with an error, so not every rank gets to speak.
    """
    now = time.time()
    problems = []
    if result.returncode == 0:
        problems.append("exit status 0")
    if result.leftovers:
        problems.append(f"left behind: {result.leftovers}")
    died = re.search(r"^dying at ([\d.]+)$", result.stdout, re.MULTILINE)
    if died is None:
        problems.append("no rank has said when it goes wrong")
    elif now - float(died[1]) > END_S:
        problems.append(f"the end came {now - float(died[1]):.1f} s after the fault")
    survivors = [rank.stderr for rank in result.ranks if "dying at" not in rank.stdout]
    if not any(all(word in text for word in words) for text in survivors):
        problems.append(f"no other rank has said {words}")
    if "went on" in result.stdout:
        problems.append("a rank went on")
    if problems:
        pytest.fail(f"{'; '.join(problems)}\n{result}", pytrace=False)
