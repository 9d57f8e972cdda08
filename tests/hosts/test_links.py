"""Links between hosts that are slow, or lose frames: said once, at the start or when it happens."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab

Hosts = Callable[..., Lab]

START = """
import hvdlite
hvdlite.init()
print("started, and watches", sorted(hvdlite.runtime()._links._rates._hosts.values()))
"""

# Rank 0 says by a file that links have been busy for a while, and by another how long that has to go on.
TRAIN = """
import sys, time
from pathlib import Path
import torch
import hvdlite.torch as hvd

hvd.init()
gradient, going = torch.zeros(1 << 20), torch.ones(1)
start = time.monotonic()
while hvd.broadcast(going, 0).item():
    hvd.allreduce_(gradient, name="gradient")
    if hvd.rank() == 0:
        if time.monotonic() - start > 5:
            Path(sys.argv[1]).touch()
        going[0] = time.monotonic() - start < 60 and not Path(sys.argv[2]).exists()
"""


def shape(lab: Lab, host: int, rate: str) -> None:
    """Let ``host`` send at ``rate``."""
    done = lab.run(host, *f"tc qdisc change dev eth0 root tbf rate {rate} burst 256kb latency 400ms".split())
    assert done.returncode == 0, done.stderr


def test_a_slow_link_at_the_start(hosts: Hosts) -> None:
    lab = hosts(4, rate="1gbit")
    hub = ["nsenter", "-t", str(lab._hub.pid), "--net"]  # type: ignore[union-attr]
    slow = "tc qdisc change dev host2 root tbf rate 20mbit burst 64kb latency 400ms".split()  # what it receives
    assert lab.run(0, *hub, *slow).returncode == 0
    result = lab.launch(START, ranks_per_host=[1, 1, 1, 1]).check()
    names = [f"node{host}" for host in range(4)]
    watched = [f"started, and watches {[other for other in names if other != name]}" for name in names]
    assert sorted(result.stdout.splitlines()) == sorted(watched), result
    said = [line for line in result.stderr.splitlines() if "the link from" in line]
    assert len(said) == 1, result
    assert re.search(r"hvdlite \[0\] WARNING: the link from node0 to node2 carries 0\.0[12]\d* Gbit/s", said[0]), result


@pytest.mark.thorough
def test_a_link_that_becomes_slow(hosts: Hosts, tmp_path: Path) -> None:
    lab = hosts(3, rate="1gbit")
    is_busy, is_over = tmp_path / "busy", tmp_path / "over"

    def disturb() -> None:
        while not is_busy.exists():
            time.sleep(0.1)
        shape(lab, 1, "50mbit")
        time.sleep(10)
        is_over.touch()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        variables = {"HVDLITE_LINK_CHECK_SECONDS": "0.5"}
        result = lab.launch(
            TRAIN, str(is_busy), str(is_over), ranks_per_host=[2, 2, 2], env=variables, timeout=90
        ).check()
    finally:
        is_busy.touch()
        thread.join()
    said = [line for line in result.stderr.splitlines() if "times slower than at the start" in line]
    assert len(said) == 1, result  # though both ranks of node1 see it
    assert re.search(r"what rank [23] sends to node2 \(10\.77\.0\.3\) arrives at 0\.0", said[0]), result


@pytest.mark.thorough
def test_frames_that_are_lost_end_the_start(hosts: Hosts) -> None:
    lab = hosts(3)
    for host in (1, 2):
        assert lab.run(host, "ip", "link", "set", "eth0", "mtu", "9000", "gso_max_segs", "1").returncode == 0
    variables = {"HVDLITE_TREE_FANOUT": "1"}  # so that these two are neighbours
    result = lab.launch(START, ranks_per_host=[1, 1, 1], env=variables, timeout=90)
    assert "started" not in result.stdout
    assert "between node1 and node2 a few bytes pass" in result.stderr, result


# Rank 0 says by a file that it is at work.
REDUCE = """
import sys
from pathlib import Path
import torch
import hvdlite.torch as hvd

hvd.init()
gradient = torch.ones(4_000_000)
for step in range(10**6):
    hvd.allreduce_(gradient, name="gradient")
    if step == 10 and hvd.rank() == 0:
        Path(sys.argv[1]).touch()
"""


@pytest.mark.thorough
def test_a_link_that_is_cut_is_named_though_a_third_host_waits_too(hosts: Hosts, tmp_path: Path) -> None:
    lab = hosts(3)
    at_work = tmp_path / "at work"

    def cut() -> None:
        while not at_work.exists():
            time.sleep(0.05)
        for here, there in ((1, 2), (2, 1)):  # frames for the other one go to nobody
            nobody = ["lladdr", "02:00:00:00:99:99", "dev", "eth0", "nud", "permanent"]
            lab.run(here, "ip", "neigh", "replace", lab.address(there), *nobody)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        variables = {"HVDLITE_COLLECTIVE_TIMEOUT_SECONDS": "12", "HVDLITE_LINK_CHECK_SECONDS": "0.5"}
        result = lab.launch(REDUCE, str(at_work), ranks_per_host=[2, 1, 1], env=variables, timeout=60)
    finally:
        at_work.touch()
        thread.join()
    assert result.returncode != 0
    said = re.findall(r"'gradient' was not through within 12 s; rank (\d) on node\d finds: (\S+) port", result.stderr)
    assert said and {*said} <= {("2", "10.77.0.3"), ("3", "10.77.0.2")}, result
    stuck = re.findall(r"what rank (\d) sends to node\d \((\S+)\) does not arrive", result.stderr)
    assert stuck and {*stuck} <= {("2", "10.77.0.3"), ("3", "10.77.0.2")}, result
