"""_native's deadline, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LONG_S = 60.0  # never reached unless a test fails


def python(program: str) -> subprocess.CompletedProcess[str]:
    program = "import ctypes, os, sys, time\nfrom hvdlite._native import Deadline\n" + program
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LONG_S
    )


def test_deadline_ends_a_process_that_holds_the_gil() -> None:
    result = python("d = Deadline(0.2, 'MPI did not start', 7); ctypes.PyDLL(None).sleep(50)")
    assert result.returncode == 7
    assert result.stderr == "MPI did not start\n"


def test_deadline_of_no_time_at_all() -> None:
    assert python("d = Deadline(-1.0, 'late', 3); time.sleep(50)").returncode == 3


@pytest.mark.parametrize("end", ["d.cancel(); d.cancel()", "del d"])
def test_deadline_cancelled(end: str) -> None:
    result = python(f"d = Deadline(1.0, 'late', 7); {end}; time.sleep(1.3); print('alive')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "alive\n", "")


def test_deadline_does_not_count_the_time_that_the_process_was_stopped() -> None:
    result = python("""
import subprocess
stop = f"sleep 0.3; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"
subprocess.Popen(["sh", "-c", stop], start_new_session=True)
d = Deadline(3.0, "late", 7)
began = time.monotonic()
while time.monotonic() - began < 4.0:
    time.sleep(0.1)
time.sleep(0.5)
print("alive", flush=True)
time.sleep(50)
""")
    assert (result.returncode, result.stdout, result.stderr) == (7, "alive\n", "late\n")


def test_deadline_that_begins_with_the_end_of_a_process() -> None:
    result = python("""
import subprocess
others = [subprocess.Popen("cat", stdin=subprocess.PIPE) for _ in range(2)]
ends = [(os.pidfd_open(other.pid), f"{number}") for number, other in enumerate(others)]
d = Deadline(0.0, " has ended", 7, after=ends)
time.sleep(0.7)
print("alive", flush=True)
others[1].kill()
ctypes.PyDLL(None).sleep(50)
""")
    assert (result.returncode, result.stdout, result.stderr) == (7, "alive\n", "1 has ended\n")


def test_deadline_does_not_keep_a_forked_child_from_ending() -> None:
    result = python("""
import warnings
warnings.simplefilter("ignore")  # newer Pythons warn of threads and fork
d = Deadline(30.0, "the parent's", 7)
time.sleep(0.2)  # AddressSanitizer's allocator does not survive a fork while the thread still starts
child = os.fork()
if child == 0:
    d.cancel()
    del d
    sys.exit(5)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert (result.returncode, result.stderr) == (5, "")


def test_deadline_fires_where_nobody_reads_stderr() -> None:
    result = python("""
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(writer, True)
os.dup2(writer, 2)
d = Deadline(0.1, "nobody will read this", 9)
time.sleep(50)
""")
    assert result.returncode == 9
