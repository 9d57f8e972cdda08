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


def test_a_host_of_the_same_network_that_is_none_of_the_job(hosts: Hosts, tmp_path: Path) -> None:
    lab = hosts(3)
    command = [*lab.enter(2), sys.executable, "-c", STRANGER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            result = lab.launch(JOB, str(tmp_path), ranks_per_host=[2, 1], mpi="openmpi").check()
            told = json.loads(stranger.communicate(timeout=30)[0])
        finally:
            stranger.kill()
    assert result.stdout.count("sum 6.0 nodes 2") + result.stdout.count("sum 6.0 nodes 1") == 3
    assert [address for address, _ in told["addresses"]][:1] == [lab.address(0)]
    assert set(told["answers"]) <= {0, Caller.answer_bytes}  # a challenge at most
