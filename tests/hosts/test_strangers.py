"""A host that is none of the job's, in its network, and another user of a host: get nothing, and hold nothing up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_program import TRAINS
from hvdlite.links.proof import Caller
from lab import Lab

Hosts = Callable[..., Lab]

# Node 0 listens for node 1; before node 1 comes, the stranger does.
JOB = """
import json, pathlib, sys, time
import numpy as np
import hvdlite
from hvdlite import TensorView
from hvdlite.links import leader_links
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


# Another user of a host, who lists what listens there: sockets of hvdlite's, and, of TCP, the first one in this network
# namespace. It comes with junk, says nothing, and fills the queues, until its stdin ends; then it tells how it was.
ANOTHER_USER = """
import json, os, selectors, socket, sys, time
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
JUNK = [b"", b"GET / HTTP/1.0\\r\\n\\r\\n" * 9, bytes(16), bytes(20), bytes(21), bytes(64), bytes(range(256)) * 64]
HELD = 300
seen, gone, held, links, got = set(), set(), [], [], {}

def listening():
    with open("/proc/net/unix") as listed:
        names = [line.split()[-1] for line in listed if " @hvdlite-" in line]
    with open("/proc/net/tcp") as listed:
        ports = [line.split()[1] for line in listed if " 0A " in line]
    return names + ports[:1] * (not any(":" in place for place in seen))

def come(place, junk, links):
    if place.startswith("@"):
        link, address = socket.socket(socket.AF_UNIX), "\\0" + place[1:]
    else:
        digits, port = place.split(":")
        link, address = socket.socket(), (socket.inet_ntoa(bytes.fromhex(digits)[::-1]), int(port, 16))
    links.append((place, link))
    link.setblocking(False)
    try:
        link.connect(address)
    except ConnectionRefusedError:
        gone.add(place)
    except OSError:
        pass  # TCP takes its time, and queues are full
    try:
        link.send(junk)
    except OSError:
        pass  # hung up on, or not there yet
    if links is not held and len(links) > HELD:
        part(*links.pop(0))

def part(place, link):
    try:
        got[place] = max(got.get(place, 0), len(link.recv(1 << 16)))
    except OSError:
        pass
    link.close()

ends = selectors.DefaultSelector()
ends.register(0, selectors.EVENT_READ)
print("ready", flush=True)
number = 0
while not ends.select(0.001):
    for place in listening():
        if place not in seen:
            seen.add(place)
            for junk in JUNK * 5:
                come(place, junk, links)
            for _ in range(HELD):
                come(place, b"", held)
    for place in seen - gone:
        for _ in range(60):
            come(place, JUNK[number % len(JUNK) if number % 3 else 0], links)
            number += 1
for place, link in links + held:
    part(place, link)
print(json.dumps({"places": sorted(seen), "got": got}), flush=True)
"""

FILES = 200  # that processes of the job may have open: fewer than the stranger holds connections

CALLS = """
import os, sys
import hvdlite

def work():
    import hvdlite, numpy as np
    from hvdlite import TensorView
    from hvdlite.operations.allreduce import allreduce_async
    hvdlite.init()
    array = np.full(1000, hvdlite.rank() + 1.0, np.float32)
    view = TensorView.of_numpy(array)
    for _ in range(300):
        allreduce_async(hvdlite.runtime().group, [view], [view]).wait()
        array[:] = hvdlite.rank() + 1.0
    return hvdlite.rank(), os.getuid()

if __name__ == "__main__":
    print(hvdlite.run(work, num_proc=2))
"""

SAYS = 'print("weights", weights.tolist(), "rank", hvd.rank(), flush=True)'


def beside_another_user(lab: Lab, words: list[str]) -> tuple[str, dict[str, Any]]:
    """What ``words``, in the first host, have said, and what became of another user there."""
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    variables = {**lab.launch_environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    command = [*lab.enter(0), sys.executable, "-c", ANOTHER_USER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None and stranger.stdout.readline() == "ready\n"
            settings = [f"{name}={value}" for name, value in variables.items()]
            few = ["sh", "-c", f'ulimit -Sn {FILES}; exec "$@"', "sh"]
            done = lab.run(0, "env", *settings, *few, *words, timeout=60)
            told = json.loads(stranger.communicate(timeout=30)[0])
        finally:
            stranger.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [lab.pids(host) for host in range(len(lab))] == [[]] * len(lab)
    return done.stdout, told


def test_another_user_at_the_call_of_a_function(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    said, told = beside_another_user(hosts(1), [sys.executable, str(script)])
    assert said == "[(0, 0), (1, 0)]\n"
    assert any(place.startswith("@hvdlite-run-") for place in told["places"])
    assert {*told["got"].values()} <= {0}, told


def test_another_user_at_the_doors_of_keepers(hosts: Hosts, tmp_path: Path) -> None:
    """That of hvdliterun, to which they call, is of TCP, and theirs for ranks are unix sockets."""
    script = tmp_path / "trains.py"
    script.write_text(TRAINS + SAYS)
    front = [sys.executable, "-m", "hvdlite", "run", "--elastic", "-np", "2", "-H", "node0:1,node1:1"]
    said, told = beside_another_user(hosts(2), [*front, str(script)])
    assert said.count("weights [40.0, 40.0, 40.0]") == 2, said
    assert any(place.startswith("@hvdlite-keeper-") for place in told["places"])
    (door,) = (place for place in told["places"] if ":" in place)
    assert {count for place, count in told["got"].items() if place != door} <= {0}, told
    assert told["got"].get(door, 0) <= Caller.answer_bytes, told  # a challenge at most


def test_a_host_of_the_same_network_that_is_none_of_the_job(hosts: Hosts, tmp_path: Path) -> None:
    said = beside_a_stranger(hosts(3), JOB, tmp_path)
    assert said.count("sum 6.0 nodes 2") + said.count("sum 6.0 nodes 1") == 3


def test_a_stranger_at_the_doors_of_a_process_group(hosts: Hosts, tmp_path: Path) -> None:
    said = beside_a_stranger(hosts(3), GROUP, tmp_path)
    assert "sum 5.0" in said
