"""An elastic job over hosts whose own connections are of IPv6: keepers to hvdliterun, leaders to one another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from elastic_program import TRAINS
from lab import IPV6_NETWORK, Lab

# For hvdliterun and for the ranks. mpirun and MPI have addresses of IPv4 beside.
IPV6_ONLY = """
from dataclasses import replace
import hvdlite.links.interfaces, hvdlite.links.leader_links, hvdlite.links.reception
import hvdlite.cli.keepers
select, listen_at, listened = hvdlite.links.interfaces.select, hvdlite.links.reception.listen_at, []

def select_ipv6(spec):
    return [replace(interface, address=interface.more[0], more=()) for interface in select(spec) if interface.more]

def listen(addresses, backlog):
    listened.extend(addresses)
    return listen_at(addresses, backlog)

for module in (hvdlite.cli.keepers, hvdlite.links.leader_links):
    module.select, module.listen_at = select_ipv6, listen
"""
FRONT = """
import sys
from hvdlite.cli.run import main
status = main(sys.argv[1:])
print("keepers called", *sorted({*listened}), flush=True)
sys.exit(status)
"""
SAYS = """
print("weights", weights.tolist(), "of", hvd.cross_size(), "hosts, leaders called", *sorted({*listened}), flush=True)
"""


def test_an_elastic_job(hosts: Callable[..., Lab], tmp_path: Path) -> None:
    lab = hosts(2, ipv6=True)
    script = tmp_path / "trains.py"
    script.write_text(IPV6_ONLY + TRAINS + SAYS)
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    variables = {**lab.launch_environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-c", IPV6_ONLY + FRONT]
    done = lab.run(0, *words, "--elastic", "-np", "2", "-H", "node0:1,node1:1", str(script), timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (f"weights [40.0, 40.0, 40.0] of 2 hosts, leaders called{end}" for end in (f" {IPV6_NETWORK}1", ""))
    assert sorted(done.stdout.splitlines()) == sorted([first, second, f"keepers called {IPV6_NETWORK}1"]), done.stdout
    assert lab.pids(0) == lab.pids(1) == []
