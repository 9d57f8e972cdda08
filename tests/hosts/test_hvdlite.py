"""hvdlite across emulated hosts: who is where, right sums, and failures on another host."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab
from launching import Result, mpirun_of, python_of

Hosts = Callable[..., Lab]

# MPI_Comm_split_type and Open MPI's collectives across hosts of the same name hang; what hvdlite uses of MPI must not.
WORK = """
import os, signal, sys, threading, time
import numpy as np
import hvdlite
from hvdlite import ReduceOp, TensorView
from hvdlite.dtypes import Reduction
from hvdlite.operations.allgather import allgather_async
from hvdlite.operations.allocate import allocate as allocate_buffer
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.barrier import barrier_async
from hvdlite.operations.broadcast import broadcast_async

def say(*words):
    print(*words, flush=True)

def reduce(array, name=None, op=ReduceOp.SUM):
    view = TensorView.of_numpy(array)
    return allreduce_async(hvdlite.runtime().group, [view], [view], Reduction(op), name=name)

def check_sums():
    runtime = hvdlite.runtime()
    rank, size = runtime.rank, runtime.size
    for numel in (0, 1, 1000, 300_001):
        work = []
        for dtype in (np.float32, np.float16, np.int64, np.uint8):
            array = (np.arange(numel) % 7 + rank + 1).astype(dtype)
            work.append((reduce(array, f"{numel}.{dtype.__name__}"), array))
        for handle, array in work:
            handle.wait()
            assert np.array_equal(array, (np.arange(numel) % 7 * size + size * (size + 1) // 2).astype(array.dtype))
    slot = allocate_buffer(runtime.group, 1 << 20).memory.view(np.float32)
    slot[:] = rank + 1
    reduce(slot, "slot", op=ReduceOp.AVERAGE).wait()
    assert (slot == (size + 1) / 2).all()
    for root in range(size):
        array = np.full(100_000, rank, np.int32)
        broadcast_async(runtime.group, [TensorView.of_numpy(array)], root_rank=root).wait()
        assert (array == root).all()
    results = []
    def allocate(index, shape):
        results.append(np.zeros(shape, np.int16))
        return TensorView.of_numpy(results[-1])
    rows = np.full((1000 * rank + 1, 3), rank, np.int16)
    allgather_async(runtime.group, [TensorView.of_numpy(rows)], allocate).wait()
    assert np.array_equal(results[0], np.concatenate([np.full((1000 * r + 1, 3), r) for r in range(size)]))
    try:
        reduce(np.zeros(2 + (rank == size - 1), np.float32), "contradiction").wait()
        raise AssertionError("no error")
    except hvdlite.MismatchError as error:
        assert f"(3,) on rank {size - 1}" in str(error)
    barrier_async(runtime.group).wait()

def step():
    reduce(large, "gradient").wait()

large = np.zeros(500_000, np.float32)
hvdlite.init()
"""
CHECKS = (
    WORK
    + """
check_sums()
across = hvdlite.cross_rank(), hvdlite.cross_size(), hvdlite.is_homogeneous()
say("is", hvdlite.rank(), hvdlite.local_rank(), hvdlite.local_size(), *across)
hvdlite.shutdown()
hvdlite.init()
check_sums()
"""
)


def identities(result: Result) -> list[tuple[object, ...]]:
    """(local rank, local size, cross rank, cross size, homogeneous) by rank."""
    rows = {}
    for line in re.findall(r"^is (.*)$", result.stdout, re.MULTILINE):
        *numbers, homogeneous = line.split()
        rank, *rest = map(int, numbers)
        rows[rank] = (*rest, homogeneous == "True")
    return [rows[rank] for rank in sorted(rows)]


@pytest.mark.parametrize(
    ("ranks_per_host", "expected"),
    [
        ([2, 2], [(0, 2, 0, 2, True), (1, 2, 0, 2, True), (0, 2, 1, 2, True), (1, 2, 1, 2, True)]),
        ([1, 1, 1], [(0, 1, 0, 3, True), (0, 1, 1, 3, True), (0, 1, 2, 3, True)]),
        ([2, 1], [(0, 2, 0, 2, False), (1, 2, 0, 1, False), (0, 1, 1, 2, False)]),
    ],
    ids=["2+2", "1+1+1", "2+1"],
)
def test_hosts_of_any_shape(
    hosts: Hosts, mpi: str, ranks_per_host: list[int], expected: list[tuple[object, ...]]
) -> None:
    result = hosts(len(ranks_per_host)).launch(CHECKS, ranks_per_host=ranks_per_host, mpi=mpi).check()
    assert identities(result) == expected


def test_hosts_that_share_a_name_are_told_apart(hosts: Hosts, mpi: str) -> None:
    """As cloned containers do: nodes are found by trying."""
    ranks_per_host = [2, 2] if mpi == "openmpi" else [2, 1]  # Open MPI 5 itself does not start on uneven ones
    result = hosts(2, same_hostname="worker").launch(CHECKS, ranks_per_host=ranks_per_host, mpi=mpi).check()
    if mpi == "openmpi":
        assert identities(result) == [(0, 2, 0, 2, True), (1, 2, 0, 2, True), (0, 2, 1, 2, True), (1, 2, 1, 2, True)]
    else:
        assert identities(result) == [(0, 2, 0, 2, False), (1, 2, 0, 1, False), (0, 1, 1, 2, False)]


def test_hosts_that_share_a_name_work_under_a_plain_mpirun(hosts: Hosts, tmp_path: Path) -> None:
    """Of Open MPI, whose collectives would hang, and which `Lab.launch` tells so."""
    lab = hosts(2, same_hostname="worker")
    python = python_of("openmpi")
    script = tmp_path / "script.py"
    script.write_text(
        "import hvdlite\nhvdlite.init()\nprint('node', hvdlite.cross_rank(), 'of', hvdlite.cross_size())\n"
    )
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    variables = {**lab.launch_environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    words = [f"{name}={value}" for name, value in variables.items()]
    options = "--allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 --host node0:2,node1:2"
    front = [mpirun_of(python).path, *options.split(), "-x", "PYTHONPATH", "-np", "4"]
    done = lab.run(0, "env", *words, *front, python, str(script), timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:4]) == ["node 0 of 2"] * 2 + ["node 1 of 2"] * 2, done.stdout


@pytest.mark.parametrize("variable", ["HVDLITE_NETWORK_INTERFACES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_a_dead_interface_is_kept_out(hosts: Hosts, mpi: str, variable: str) -> None:
    lab = hosts(2, dead_interface=True)
    result = lab.launch(CHECKS, ranks_per_host=[2, 1], mpi=mpi, env={variable: "=eth0"}).check()
    assert len(identities(result)) == 3


def test_a_bridge_of_containers_is_kept_out_by_itself(hosts: Hosts, mpi: str) -> None:
    result = hosts(2, docker0=True).launch(CHECKS, ranks_per_host=[1, 1], mpi=mpi).check()
    assert identities(result) == [(0, 1, 0, 2, True), (0, 1, 1, 2, True)]


def test_a_host_that_calls_its_interfaces_otherwise(hosts: Hosts, mpi: str) -> None:
    """The first one names those that MPI is to use, as it has a bridge to keep out."""
    lab = hosts(2, docker0=True)
    renamed = lab.run(1, "sh", "-ec", "ip link set eth0 down; ip link set eth0 name ens5; ip link set ens5 up")
    assert renamed.returncode == 0, renamed.stderr
    result = lab.launch(CHECKS, ranks_per_host=[1, 1], mpi=mpi).check()
    assert identities(result) == [(0, 1, 0, 2, True), (0, 1, 1, 2, True)]


def test_a_dead_interface_that_was_not_kept_out_is_explained(hosts: Hosts, mpi: str) -> None:
    """Or it works: Open MPI and MPICH may choose the right one."""
    lab = hosts(2, dead_interface=True)
    result = lab.launch(CHECKS, ranks_per_host=[1, 1], mpi=mpi, env={"HVDLITE_START_TIMEOUT": "6"}, timeout=40)
    assert not result.leftovers, result
    if result.returncode == 0:
        assert len(identities(result)) == 2
    else:
        for words in ["init() was not through after 6 s", "HVDLITE_NETWORK_INTERFACES", "ip -br address"]:
            assert words in result.stderr, result


def test_leaders_that_cannot_reach_one_another_are_explained(hosts: Hosts, mpi: str) -> None:
    """MPI was given the interface that works, hvdlite the one that does not."""
    right = {
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "UCX_NET_DEVICES": "eth0",
        "FI_TCP_IFACE": "eth0",
        "FI_SOCKETS_IFACE": "eth0",
    }
    env = {**right, "HVDLITE_NETWORK_INTERFACES": "eth1", "HVDLITE_START_TIMEOUT": "12"}
    result = hosts(2, dead_interface=True).launch(CHECKS, ranks_per_host=[1, 1], mpi=mpi, env=env, timeout=50)
    assert result.returncode != 0
    assert not result.leftovers, result
    assert re.search(
        r"node 1 \(node1\) did not connect to node 0|"
        r"node 1 cannot reach node 0 at any of its addresses \(10\.78\.0\.1:",
        result.stderr,
    ), result
    assert "HVDLITE_NETWORK_INTERFACES" in result.stderr


FAULT = (
    WORK
    + """
kind, victim = sys.argv[1], int(sys.argv[2])
step()
if hvdlite.rank() == victim:
    time.sleep(0.3)
    say("dying at", time.time())
    if kind == "raise":
        raise ValueError("the loss is not a number")
    os.kill(os.getpid(), getattr(signal, kind))
try:
    while True:
        step()
except hvdlite.RankFailedError as error:
    say("noticed at", time.time(), str(error).splitlines()[0])
    raise
"""
)


def seconds(result: Result, word: str) -> list[float]:
    return [float(text) for text in re.findall(rf"^{word} at ([\d.]+)", result.stdout, re.MULTILINE)]


@pytest.mark.parametrize(("kind", "victim"), [("SIGKILL", 0), ("SIGKILL", 2), ("SIGKILL", 3), ("raise", 3)])
def test_a_death_on_one_host_is_known_on_the_other(hosts: Hosts, mpi: str, kind: str, victim: int) -> None:
    """The first rank, a leader, and one that leads nothing. What a launcher has not killed by then says so."""
    options = ["-disable-auto-cleanup"] if mpi == "mpich" else []
    result = hosts(2).launch(FAULT, kind, str(victim), ranks_per_host=[2, 2], mpi=mpi, options=options)
    ended = time.time()
    assert not result.leftovers, result
    (died,) = seconds(result, "dying")
    assert ended - died < 10, result
    assert result.returncode != 0, result
    words = f"rank {victim} raised ValueError: the loss is not a number" if kind == "raise" else f"rank {victim} (pid"
    survivors = [rank.stderr for rank in result.ranks if "dying at" not in rank.stdout]
    assert any(words in text for text in survivors), result


CUT = (
    WORK
    + """
def launcher():
    pid = os.getppid()
    while True:
        stat = open(f"/proc/{pid}/stat").read()
        if stat[stat.index("(") + 1 : stat.rindex(")")] in ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun"):
            return pid
        pid = int(stat[stat.rindex(")") + 2 :].split()[1])

step()
if hvdlite.rank() == 0:
    open(sys.argv[1], "w").close()
try:
    while True:
        step()
except hvdlite.RankFailedError as error:
    say("noticed at", time.time(), str(error).splitlines()[0])
    time.sleep(2.5)  # for the other side to notice as well
    if hvdlite.rank() == 0:
        os.kill(launcher(), signal.SIGKILL)  # no mpirun notices; it would wait for its daemon there for ever
    raise
"""
)


def test_a_host_that_is_cut_off_is_noticed_by_its_silence(hosts: Hosts, mpi: str, tmp_path: Path) -> None:
    """On both sides of the cut."""
    lab = hosts(2)
    running = tmp_path / "running"
    cut_at: list[float] = []

    def cut() -> None:
        for _ in range(600):
            if running.exists():
                break
            time.sleep(0.1)
        time.sleep(0.5)
        lab.cut(1)
        cut_at.append(time.time())

    cutter = threading.Thread(target=cut)
    cutter.start()
    result = lab.launch(
        CUT, str(running), ranks_per_host=[2, 1], mpi=mpi, env={"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "3"}
    )
    cutter.join()
    text = result.stdout + result.stderr
    assert "on node1) has not answered for" in text, result
    assert "on node0) has not answered for" in text, result
    noticed = seconds(result, "noticed")
    assert len(noticed) == 3, result
    assert all(2 < at - cut_at[0] < 10 for at in noticed), (cut_at, result)
