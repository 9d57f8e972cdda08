"""Hosts of which nothing is heard: the launcher is ended in time, and what is wrong is said by evidence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lab import NETWORK, Lab
from launching import on_one_mpi, python_of

Hosts = Callable[..., Lab]

IMPATIENT = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "3", "HVDLITE_FAILURE_GRACE_SECONDS": "2"}
PROGRAM = """
import os, pathlib, sys, time
import numpy as np
import hvdlite
from hvdlite import TensorView
from hvdlite.operations.allreduce import allreduce_async
hvdlite.init()
view = TensorView.of_numpy(np.zeros(100_000, np.float32))
end = time.monotonic() + float(sys.argv[2])
pathlib.Path(sys.argv[1], str(hvdlite.rank())).write_text(str(os.getpid()))
while True:  # until one of them has done it for long enough
    for _ in range(10):
        allreduce_async(hvdlite.runtime().group, [view], [view], name="gradient").wait()
    time.sleep(0.02)
    break_at = np.array([float(time.monotonic() < end)], np.float32)
    allreduce_async(hvdlite.runtime().group, [TensorView.of_numpy(break_at)], [TensorView.of_numpy(break_at)]).wait()
    if break_at[0] < hvdlite.size():
        break
print("through", flush=True)
if "linger" in sys.argv and hvdlite.rank() == 1:  # the others wait for it at the end of MPI
    time.sleep(60)
if "works on" in sys.argv and hvdlite.rank() == 1:
    hvdlite.shutdown()
    from mpi4py import MPI
    MPI.Finalize()
    time.sleep(15)
"""
ENDS_EARLY = """
import os, sys, time
if os.environ["PMI_RANK"] == sys.argv[3]:
    time.sleep(1)
    os._exit(0)
import hvdlite
hvdlite.init()
"""


class Job:
    """``program`` under hvdliterun on host 0, with a rank on each of ``hosts``, by default on all."""

    def __init__(
        self,
        lab: Lab,
        mpi: str,
        directory: Path,
        seconds: float,
        env: Mapping[str, str],
        *more: str,
        hosts: str = "",
        program: str = PROGRAM,
    ) -> None:
        self.directory = directory
        self._size = len(lab)
        script = directory / "script.py"
        script.write_text(program)
        variables = {**lab.launch_environment, "OMP_NUM_THREADS": "1", **env}
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        words = [f"{name}={value}" for name, value in variables.items()]
        hosts = hosts or ",".join(f"{name}:1" for name in lab.names)
        front = [python_of(mpi), "-m", "hvdlite", "run", "-H", hosts]
        self.process = subprocess.Popen(
            [*lab.enter(0), "env", *words, *front, str(script), str(directory), str(seconds), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def when_running(self, action: Callable[[], None]) -> threading.Thread:
        def act() -> None:
            deadline = time.monotonic() + 60
            while not all((self.directory / str(rank)).exists() for rank in range(self._size)):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.05)
            time.sleep(0.5)
            action()

        thread = threading.Thread(target=act)
        thread.start()
        return thread

    def end(self, timeout: float) -> tuple[int, str]:
        """Exit status, and all output."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"not at its end\n{self.process.communicate()}", pytrace=False)
        return self.process.returncode, stdout + stderr


def test_a_host_whose_daemon_does_not_call_is_named(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """As where a firewall drops all but ssh."""
    lab = hosts(2)
    for host, peer in ((0, 1), (1, 0)):  # else the kernel soon finds that nobody has the other's address
        hardware = lab.run(peer, "cat", "/sys/class/net/eth0/address").stdout.strip()
        entry = [lab.address(peer), "lladdr", hardware, "dev", "eth0", "nud", "permanent"]
        lab.run(host, "ip", "neigh", "replace", *entry).check_returncode()
    lab.cut(1)
    status, text = Job(lab, mpi, tmp_path, 0, {"HVDLITE_START_TIMEOUT": "6"}).end(40)
    assert status != 0, text
    # With Open MPI no rank starts; MPICH starts those here, which end by themselves.
    assert re.search("hvdlite run: ended: (no rank has started here within 6 s|mpirun has not ended)", text), text
    assert "node1: mpirun's daemon there has not called this machine; check that no firewall" in text, text
    assert lab.pids(0) == lab.pids(1) == []


def test_a_launcher_does_not_wait_for_a_host_that_fell_silent(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    lab = hosts(3)
    job = Job(lab, mpi, tmp_path, 60, IMPATIENT)
    cutter = job.when_running(lambda: lab.cut(1))
    status, text = job.end(60)
    cutter.join()
    assert status != 0, text
    assert "rank 1 (pid" in text and "on node1) has not answered for" in text, text
    by_itself = re.search(r"Remote daemon: .* on node node1\n", text)  # so mpirun ends, if it notices that first
    assert by_itself or "  node1 does not answer at port 22 any more" in text, text
    assert "  node2" not in text, text


@on_one_mpi("mpich")
def test_a_launcher_does_not_wait_for_a_rank_that_is_stopped(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """Its host lives, and nothing speaks against it; those that end after it say so."""
    lab = hosts(3)
    job = Job(lab, mpi, tmp_path, 60, IMPATIENT)
    stopper = job.when_running(lambda: os.kill(int((tmp_path / "1").read_text()), signal.SIGSTOP))
    status, text = job.end(60)
    stopper.join()
    assert status != 0, text
    assert "rank 1 (pid" in text and "on node1) has not answered for" in text, text
    assert "daemon" not in text and "MTU" not in text and "port 22" not in text, text
    assert lab.pids(0) == lab.pids(1) == lab.pids(2) == []


@pytest.mark.parametrize("ranks", [1, 2], ids=["alone on its host", "beside another"])
@pytest.mark.parametrize("mpi", ["mpich", "intelmpi"])
def test_a_rank_elsewhere_that_ends_before_its_start(hosts: Hosts, mpi: str, ranks: int, tmp_path: Path) -> None:
    """Others of its host say so, or that there are none is seen by the launcher's way there."""
    lab = hosts(2)
    last = 2 * ranks - 1
    patient = {"HVDLITE_START_TIMEOUT": "100"}
    where = f"node0:{ranks},node1:{ranks}"
    status, text = Job(lab, mpi, tmp_path, 0, patient, str(last), hosts=where, program=ENDS_EARLY).end(60)
    assert status == 1, text
    # One that has ended before the other looks has no number.
    said = f"(rank {last}|a rank) of node1 has" if ranks > 1 else "ended: all ranks on node1 have"
    assert re.search(f"{said} ended before", text) and "init() was not through" not in text, text
    assert lab.pids(0) == lab.pids(1) == []


@pytest.mark.parametrize("first", ["root@node0", f"{NETWORK}1"])  # which is the launcher's own host
def test_a_launcher_waits_for_a_rank_elsewhere_that_has_more_to_do_and_says_so(
    hosts: Hosts, tmp_path: Path, first: str
) -> None:
    lab = hosts(2)
    limit = {"HVDLITE_START_TIMEOUT": "8"}
    status, text = Job(lab, "openmpi", tmp_path, 0, limit, "works on", hosts=f"{first}:1,root@node1:1").end(60)
    assert status == 0, text
    assert text.count("through") == 2, text
    said = r"the ranks on this machine ended \d+ s ago, and mpirun has not: ranks on node1 still work, or mpirun"
    assert len(re.findall(said, text)) == 1, text


@on_one_mpi("openmpi")
def test_a_link_that_is_down_for_a_while_is_no_end(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """For 20 s; MPICH 5.0.2 itself crashes then now and then, in MPI_Start, and is spared with 12."""
    lab = hosts(2)
    job = Job(lab, mpi, tmp_path, 24, {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "60"})

    def interrupt() -> None:
        lab.cut(1)
        time.sleep(12 if mpi == "mpich" else 20)
        lab.mend(1)

    cutter = job.when_running(interrupt)
    status, text = job.end(100)
    cutter.join()
    assert status == 0, text
    assert text.count("through") == 2, text


@pytest.mark.thorough
def test_a_host_that_is_lost_at_the_end_is_said(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """The others have done their work, and end with that, and with a warning."""
    lab = hosts(2)
    job = Job(lab, mpi, tmp_path, 0, IMPATIENT, "linger")
    cutter = job.when_running(lambda: lab.cut(1))
    _, text = job.end(60)
    cutter.join()
    assert text.count("through") == 2, text
    assert "WARNING: rank 0 ends, without the others: rank 1 (pid" in text, text
    assert "node1 does not answer at port 22 any more" in text, text


def test_packets_that_are_too_large_for_the_way_are_recognised(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """Hosts with jumbo frames, and a switch without. MPICH's mpirun mostly gives up by itself."""
    lab = hosts(2)
    for host in range(2):
        lab.run(host, "ip", "link", "set", "eth0", "mtu", "9000").check_returncode()
    env = {"HVDLITE_START_TIMEOUT": "8", "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "6"}
    status, text = Job(lab, mpi, tmp_path, 5, env).end(90)
    assert status != 0, text
    assert "check that the MTU is the same on all hosts and on the way" in text, text
