"""hvdliterun's --ssh-port and --ssh-identity-file, as the ssh that mpirun runs gets them.

The ssh here writes down its arguments and runs the command on this machine, whatever the host.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launching import mpirun_of, python_of

SSH = """#!/bin/bash
echo "$@" >>{log}
while [ $# -gt 0 ]; do case $1 in -[piF]) shift 2;; -*) shift;; *) break;; esac; done
shift
exec /bin/bash -c "$*"
"""
# What a cluster may have set already stays.
NAMES = ("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_port_and_key_reach_ssh(tmp_path: Path, mpi: str) -> None:
    python, log = python_of(mpi), tmp_path / "log"
    mpirun_of(python)  # skips where there is none
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(log=log))
    ssh.chmod(0o755)
    (tmp_path / "key").touch()
    words = "-np 2 -H node0:1,node1:1 --ssh-port 2222 -i key -- sh -c".split()
    done = subprocess.run(
        [python, "-m", "hvdlite", "run", *words, "echo rank"],
        cwd=tmp_path,
        env={**os.environ, **dict.fromkeys(NAMES, "-F none"), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "rank\n" * 2), done.stderr
    calls = log.read_text().splitlines()
    assert len(calls) == 2
    assert all(f" -F none -p 2222 -i {tmp_path}/key " in call for call in calls), calls
