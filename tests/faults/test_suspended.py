"""Processes that do not run for a while, or not in Python; and a stderr that takes nothing."""

from __future__ import annotations

import re

import pytest

from fault_lab import check_end, run

IMPATIENT = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "2"}

# A process of its own stops ranks for longer than a neighbour may be silent, and wakes them one after the other.
STOPPED = """
import subprocess, tempfile
from hvdlite.operations.allgather import allgather_async

victims = [int(word) for word in sys.argv[1].split(",")]
stop = "import os, sys, time; pids = list(map(int, sys.argv[1:])); [os.kill(pid, 19) for pid in pids]; time.sleep(5)"
wake = "[(os.kill(pid, 18), time.sleep(0.2)) for pid in pids]"
hvdlite.init()
step()
pids = np.zeros(hvdlite.size(), np.int64)
pids[hvdlite.rank()] = os.getpid()
reduce("pids", TensorView.of_numpy(pids)).wait()
if hvdlite.rank() == 0:
    subprocess.Popen([sys.executable, "-c", f"{stop}; {wake}", *[str(pids[rank]) for rank in victims]])
began = last = time.monotonic()
slept_s = 0.0
have_slept = np.zeros(1, np.float32)
try:
    while have_slept[0] < hvdlite.size():  # agreed on: some are stopped in one step, others in the next
        step()
        now = time.monotonic()
        slept_s, last = max(slept_s, now - last), now
        have_slept[0] = slept_s > 2.0 or now - began > 30.0  # it takes a while to start on a busy machine
        reduce("have slept", TensorView.of_numpy(have_slept)).wait()
    for _ in range(20):
        time.sleep(0.1)
        step()
    say("slept for", slept_s)
except hvdlite.RankFailedError as error:
    say("dying at" if hvdlite.rank() in victims else "noticed at", time.time(), error)
    if hvdlite.rank() not in victims:
        time.sleep(5)  # for the rank that was stopped to wake
    raise
"""


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_a_job_that_is_suspended_goes_on(mpi: str) -> None:
    result = run(STOPPED, "0,1,2", n=3, machines="001" if mpi == "current" else "", env=IMPATIENT, mpi=mpi).check()
    slept = [float(text) for text in re.findall(r"^slept for ([\d.]+)$", result.stdout, re.MULTILINE)]
    assert len(slept) == 3 and min(slept) > 2.0, result


@pytest.mark.parametrize(("victim", "mpi"), [(0, "none"), (2, "none"), (2, "current")])
def test_a_rank_that_was_stopped_accuses_nobody_else(victim: int, mpi: str) -> None:
    """The leader, and a rank that leads nothing. It wakes before the others end."""
    env = {**IMPATIENT, "HVDLITE_FAILURE_GRACE_SECONDS": "8"}
    result = run(STOPPED, str(victim), n=3, mpi=mpi, env=env)
    (own,) = re.findall(r"^dying at [\d.]+ (.*)$", result.stdout, re.MULTILINE)
    others = re.findall(r"^noticed at [\d.]+ (.*)$", result.stdout, re.MULTILINE)
    assert len(others) == 2, result
    assert all(f"rank {victim} (pid " in text and "has not answered for" in text for text in others), result
    assert f"rank {victim} (pid " in own, result
    accused = re.sub(r"unreachable from that of rank \d", "", own)  # of who has found it so
    assert "rank" not in accused.replace(f"rank {victim}", ""), result


# JOB is stopped for longer than a start may take, while rank 0 waits for rank 1.
STARTS = """
import subprocess
from hvdlite.launched import launched_rank

if launched_rank() == 0:
    job = JOB
    command = f"exec >/dev/null 2>&1; sleep 1; kill -STOP {job}; sleep 7; kill -CONT {job}"
    subprocess.Popen(["sh", "-c", command], start_new_session=True)
else:
    time.sleep(LATE_S)
hvdlite.init()
step()
say("started")
"""
# All processes of a job without MPI, whose ranks have hvdliterun for a parent, which keeps the time.
WITH_LAUNCHER = 'f"{os.getppid()} $(pgrep -P {os.getppid()})"'


def starts_though_suspended(job: str, late_s: int, mpi: str) -> None:
    program = STARTS.replace("JOB", job).replace("LATE_S", str(late_s))
    result = run(program, n=2, env={"HVDLITE_START_TIMEOUT": "6"}, mpi=mpi).check()
    assert result.stdout.count("started") == 2, result


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_job_that_is_suspended_while_it_starts_goes_on(mpi: str) -> None:
    starts_though_suspended("os.getpid()", 9, mpi)


def test_a_job_without_mpi_that_is_suspended_while_it_starts_goes_on() -> None:
    starts_though_suspended(WITH_LAUNCHER, 3, "none")


BUSY_IN_C = """
import ctypes
hvdlite.init()
step()
if hvdlite.rank() == 1:
    ctypes.PyDLL(None).sleep(6)  # without giving up the GIL
step()
say("done")
"""


def test_a_long_call_that_keeps_the_gil_is_no_death() -> None:
    result = run(BUSY_IN_C, n=3, mpi="none", env=IMPATIENT).check()
    assert result.stdout.count("done") == 3


# Rank 0's stderr is a pipe that is full, and nobody reads it.
BLOCKED = """
hvdlite.init()
step()
if hvdlite.rank() == 1:
    time.sleep(0.5)
    say("dying at", time.time())
    os.kill(os.getpid(), signal.SIGKILL)
if hvdlite.rank() == 0:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(1 << 16))
    except BlockingIOError:
        os.set_blocking(writer, True)
    os.dup2(writer, 2)
try:
    while True:
        step()
except hvdlite.RankFailedError as error:
    say("noticed", error)
    raise
"""


def test_a_blocked_stderr_holds_no_failure_up() -> None:
    result = run(BLOCKED, n=3, mpi="none", env={"HVDLITE_FAILURE_GRACE_SECONDS": "2"})
    check_end(result, "rank 1 (pid", "died without a word")
    assert "noticed rank 1 (pid" in result.ranks[0].stdout, result
