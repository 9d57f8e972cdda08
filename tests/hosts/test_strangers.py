"""A host that is none of the job's, in its network: it gets nothing, and holds nothing up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hvdlite.proof import Caller
from lab import Lab

Hosts = Callable[..., Lab]

# Node 0 listens for node 1; before node 1 comes, the stranger does.
JOB = """
import json, pathlib, sys, time
import numpy as np
import hvdlite
from hvdlite import TensorView, leader_links
from hvdlite.operations.allreduce import allreduce_async

directory = pathlib.Path(sys.argv[1])
make = leader_links.Listener.__init__

def make_and_wait(self, *arguments):
    make(self, *arguments)
    (directory / "partial").write_text(json.dumps(self.addresses))
    (directory / "partial").rename(directory / "addresses")
    while not (directory / "answers").exists():
        time.sleep(0.01)

leader_links.Listener.__init__ = make_and_wait
hvdlite.init()
array = np.full(1000, hvdlite.rank() + 1.0, np.float32)
view = TensorView.of_numpy(array)
allreduce_async(hvdlite.runtime().group, [view], [view]).wait()
print("sum", array[0], "nodes", hvdlite.cross_size(), flush=True)
hvdlite.shutdown()
"""

# Likewise the doors of a process group, which ranks of node 1 come to afterwards.
GROUP = """
import json, pathlib, sys, time
import torch, torch.distributed as dist
from hvdlite import mpi
from hvdlite.distributed import doors

directory = pathlib.Path(sys.argv[1])
make = doors.Entrance.__init__

def make_and_wait(self, *arguments, **options):
    make(self, *arguments, **options)
    if mpi.world_rank() == 0:
        (directory / "partial").write_text(json.dumps(self.door.addresses))
        (directory / "partial").rename(directory / "addresses")
        while not (directory / "answers").exists():
            time.sleep(0.01)

doors.Entrance.__init__ = make_and_wait
dist.init_process_group("hvdlite")
rank, size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    received = [torch.empty(100_000) for _ in range(1, size)]
    for source, tensor in enumerate(received, 1):
        dist.send(torch.ones(3), source)
        dist.recv(tensor, source)
    print("sum", sum(float(tensor[-1]) for tensor in received), flush=True)
else:
    dist.recv(torch.empty(3), 0)
    dist.send(torch.full((100_000,), rank + 1.0), 0)
dist.barrier()
dist.destroy_process_group()
"""

STRANGER = """
import json, pathlib, socket, sys, time
directory = pathlib.Path(sys.argv[1])
while not (directory / "addresses").exists():
    time.sleep(0.01)
addresses = json.loads((directory / "addresses").read_text())
links, answers = [], []
for number in range(300):
    link = socket.create_connection(tuple(addresses[number % len(addresses)]), timeout=10)
    link.sendall([b"", b"GET / HTTP/1.0\\r\\n\\r\\n" * 9, bytes(24), bytes(24 + 32)][number % 4])
    links.append(link)
for link in links[-100:]:  # older ones are hung up on
    link.settimeout(0.01)
    try:
        answers.append(len(link.recv(1 << 16)))
    except OSError:
        pass
(directory / "partial2").write_text(json.dumps(answers))
(directory / "partial2").rename(directory / "answers")
print(json.dumps({"addresses": addresses, "answers": answers}), flush=True)
sys.stdin.read()  # they stay open
"""


def beside_a_stranger(lab: Lab, program: str, directory: Path) -> str:
    """What ``program`` on the first two hosts, and a stranger on the third, have said."""
    command = [*lab.enter(2), sys.executable, "-c", STRANGER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            result = lab.launch(program, str(directory), ranks_per_host=[2, 1], mpi="openmpi").check()
            told = json.loads(stranger.communicate(timeout=30)[0])
        finally:
            stranger.kill()
    assert [address for address, _ in told["addresses"]][:1] == [lab.address(0)]
    assert set(told["answers"]) <= {0, Caller.answer_bytes}  # a challenge at most
    return result.stdout


def test_a_host_of_the_same_network_that_is_none_of_the_job(hosts: Hosts, tmp_path: Path) -> None:
    said = beside_a_stranger(hosts(3), JOB, tmp_path)
    assert said.count("sum 6.0 nodes 2") + said.count("sum 6.0 nodes 1") == 3


def test_a_stranger_at_the_doors_of_a_process_group(hosts: Hosts, tmp_path: Path) -> None:
    said = beside_a_stranger(hosts(3), GROUP, tmp_path)
    assert "sum 5.0" in said
