"""`hvdliterun --doctor` on emulated hosts: what is wrong is named with its cure, before MPI hangs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from lab import Lab
from launching import python_of

Hosts = Callable[..., Lab]


def consult(lab: Lab, *options: str, ranks_per_host: int = 1, mpi: str = "current") -> subprocess.CompletedProcess[str]:
    """What the doctor says of ``lab``; nothing of it may be left."""
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    variables = {**lab.launch_environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    hosts = ",".join(f"{name}:{ranks_per_host}" for name in lab.names)
    command = [python_of(mpi), "-m", "hvdlite", "run", "--doctor", "-H", hosts, *options]
    done = lab.run(0, "env", *(f"{name}={value}" for name, value in variables.items()), *command, timeout=90)
    for host in range(len(lab)):
        assert lab.pids(host) == [], done.stdout + done.stderr
    return done


def shape(lab: Lab, host: int, rate: str) -> None:
    """Let ``host`` send at ``rate``."""
    done = lab.run(host, *f"tc qdisc change dev eth0 root tbf rate {rate} burst 256kb latency 400ms".split())
    assert done.returncode == 0, done.stderr


def test_healthy_hosts(hosts: Hosts) -> None:
    done = consult(hosts(2, rate="1gbit"), "--json", ranks_per_host=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and found["nodes"] == [[0, 1], [2, 3]]
    assert not [note for note in found["notes"] if "differs" in note], found["notes"]
    assert found["found by"].startswith("who can pass file descriptors")
    assert [(rank["host"], rank["rank"]) for rank in found["ranks"]] == [(f"node{r // 2}", r) for r in range(4)]
    assert {(link["source"], link["target"]) for link in found["links"]} == {(0, 1), (1, 0)}
    for link in found["links"]:
        assert link["interfaces"] == ["eth0", "eth0"] and link["frame_bytes"] == link["mtu"] == 1500
        assert 0 < link["gbit_per_s"] < 2 and link["latency_us"] > 0 and abs(link["clock_offset_s"]) < 1
    assert all(memory["GB/s"] > 0 for memory in found["shared memory"])
    assert found["check"]["wrong elements"] == 0


def test_an_interface_that_leads_nowhere(hosts: Hosts) -> None:
    """MPI would wait on it for minutes."""
    done = consult(hosts(2, dead_interface=True))
    assert done.returncode == 1
    assert "eth1 is up and does not connect node0 to node1 (no answer)" in done.stdout, done.stdout + done.stderr
    assert "`hvdliterun --network-interfaces eth0`" in done.stdout


# What mpirun's daemons say to hvdliterun's host is dropped as well where that has a firewall.
BLIND = "node1: mpirun's daemon there has not called this machine; check that no firewall drops connections between"


@pytest.mark.parametrize(
    ("mpi", "firewalls", "said"),
    [
        ("openmpi", [1], "node0 cannot reach node1: node1 (port "),
        ("openmpi", [0, 1], BLIND),
        pytest.param("mpich", [1], "node0 cannot reach node1: node1 (port ", marks=pytest.mark.thorough),
        pytest.param("mpich", [0], "node0 cannot reach node1: node1 (port ", marks=pytest.mark.thorough),
    ],
    ids=["at the other", "at both", "at the other, MPICH", "at the first, MPICH"],
)
def test_firewalls_that_drop_what_goes_to_ports_that_programs_choose(
    hosts: Hosts, mpi: str, firewalls: list[int], said: str
) -> None:
    began_s = time.monotonic()
    done = consult(hosts(2, firewalls=firewalls), "--start-timeout", "6", mpi=mpi)
    text = done.stdout + done.stderr
    assert done.returncode == 1 and said in text, text
    assert said == BLIND or "allow all TCP ports between them" in done.stdout, text
    assert time.monotonic() - began_s < 40


@pytest.mark.thorough
def test_that_interface_left_out(hosts: Hosts) -> None:
    done = consult(hosts(2, dead_interface=True), "--network-interfaces", "eth0")
    assert done.returncode == 0 and done.stdout.startswith("No problems."), done.stdout + done.stderr


@pytest.mark.thorough
def test_hosts_that_do_not_reach_one_another(hosts: Hosts) -> None:
    lab = hosts(3)
    assert lab.run(2, "ip", "route", "add", "blackhole", f"{lab.address(1)}/32").returncode == 0
    done = consult(lab)
    assert done.returncode == 1
    assert "node2 cannot reach node1: " in done.stdout or "node1 cannot reach node2: " in done.stdout, done.stderr
    assert "cannot reach node0" not in done.stdout


@pytest.mark.thorough
def test_jumbo_frames_that_are_lost_on_the_way(hosts: Hosts) -> None:
    """Interfaces of two hosts have a larger MTU than the bridge between them."""
    lab = hosts(3)
    for host in (1, 2):
        assert lab.run(host, "ip", "link", "set", "eth0", "mtu", "9000").returncode == 0
    done = consult(lab)
    assert done.returncode == 1
    assert "frames of 1500 bytes arrive, and full ones of 9000" in done.stdout, done.stdout + done.stderr
    assert "`ip link set eth0 mtu 1500`" in done.stdout


@pytest.mark.thorough
def test_a_slow_host(hosts: Hosts) -> None:
    lab = hosts(3, rate="1gbit")
    shape(lab, 1, "100mbit")
    done = consult(lab)
    assert done.returncode == 1
    assert "all that node1 sends is slow: 0.1 Gbit/s, and other links carry 9." in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.thorough
def test_ranks_that_see_different_things(hosts: Hosts) -> None:
    """Under plain mpirun, where nobody has invited the hosts."""
    lab = hosts(2)
    script = 'ulimit -n $((512 + 1024 * ${OMPI_COMM_WORLD_RANK:-$PMI_RANK})); exec "$0" -m hvdlite doctor'
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    variables = {**lab.launch_environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    command = [
        sys.executable,
        "-m",
        "hvdlite",
        "run",
        "-H",
        "node0:1,node1:1",
        "--",
        "sh",
        "-c",
        script,
        sys.executable,
    ]
    done = lab.run(0, "env", *(f"{name}={value}" for name, value in variables.items()), *command, timeout=90)
    assert done.returncode == 1
    assert "node0: only 512 files may be open" in done.stdout, done.stdout + done.stderr
