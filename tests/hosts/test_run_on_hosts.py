"""`hvdlite.run` with ranks on several emulated hosts: they reach the caller over the network, and nothing is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab

CALLER = """
import os, sys
import hvdlite

def where(word):
    import hvdlite
    hvdlite.init()
    print("rank", hvdlite.rank(), "speaks")
    if word == "fail" and hvdlite.rank() == 1:
        raise LookupError("no data on this host")
    return word, os.environ["NOT_A_SETTING"], hvdlite.rank(), os.uname().nodename

if __name__ == "__main__":
    try:
        print(hvdlite.run(where, (sys.argv[1],), hosts="node0:1,node1:1", env={"NOT_A_SETTING": "seen"}))
    except LookupError as error:
        print("rank", error.__cause__.rank, "raised", error)
"""


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("well", "[('well', 'seen', 0, 'node0'), ('well', 'seen', 1, 'node1')]"),
        ("fail", "rank 1 raised no data on this host"),
    ],
)
def test_results_and_exceptions_cross_hosts(hosts: Callable[..., Lab], tmp_path: Path, word: str, said: str) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    lab = hosts(2, dead_interface=True)
    variables = {**lab.launch_environment, "HVDLITE_NETWORK_INTERFACES": "eth0", "OMP_NUM_THREADS": "1"}
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    words = [f"{name}={value}" for name, value in {**variables, "PYTHONPATH": search}.items()]
    done = lab.run(0, "env", *words, sys.executable, str(script), word, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == said, done.stdout + done.stderr
    assert done.stdout.count("speaks") == 2 or word == "fail"
    assert lab.pids(0) == [] and lab.pids(1) == []
