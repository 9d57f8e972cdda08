"""Ranks and hosts of a batch scheduler, by variables as it makes them."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from hvdlite.cli import run
from hvdlite.cli.allocation import Allocation, expand_nodes, find_allocation
from hvdlite.cli.arguments import parse
from hvdlite.cli.job import Host, Launch
from hvdlite.errors import ConfigError

HERE = socket.gethostname()
AB = (Host("a", 2), Host("b", 1))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("a,b", "a b"),
        ("node[01-03,07],b1", "node01 node02 node03 node07 b1"),
        ("node[9-11]", "node9 node10 node11"),
        ("rack[1-2]n[3,5]-ib,x", "rack1n3-ib rack1n5-ib rack2n3-ib rack2n5-ib x"),
    ],
)
def test_slurms_lists_of_nodes(text: str, hosts: str) -> None:
    assert expand_nodes(text) == hosts.split()


def slurm(nodes: str, tasks: str) -> dict[str, str]:
    return {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks}


@pytest.mark.parametrize(
    ("environ", "scheduler", "hosts"),
    [
        (slurm("a,b", "2,1"), "Slurm", AB),
        (slurm("n[1-3]", "2(x2),1"), "Slurm", (Host("n1", 2), Host("n2", 2), Host("n3", 1))),
        ({"LSB_MCPU_HOSTS": "a 2 b 1"}, "LSF", AB),
        ({"LSB_MCPU_HOSTS": "a 1 b 1 a 1"}, "LSF", AB),
        ({"PBS_NODEFILE": "a\nb\na\n"}, "PBS", AB),
        ({"OMPI_MCA_orte_default_hostfile": "a slots=2\nb\n"}, "MPIJob", AB),
        ({"HYDRA_HOST_FILE": "a:2\nb:1\n"}, "MPIJob", AB),
    ],
)
def test_schedulers(environ: dict[str, str], scheduler: str, hosts: tuple[Host, ...], tmp_path: Path) -> None:
    """A value of several lines is that of a file."""
    path = tmp_path / "hosts"
    path.write_text("".join(environ.values()))
    found = find_allocation({name: str(path) if "\n" in text else text for name, text in environ.items()})
    assert found is not None
    assert (found.scheduler, found.hosts, found.slots) == (scheduler, hosts, sum(host.slots for host in hosts))


def test_none() -> None:
    assert find_allocation({"SLURM_JOB_ID": "7", "PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (slurm("a,b", "2"), "SLURM_TASKS_PER_NODE=2 does not fit"),
        ({"LSB_MCPU_HOSTS": "a 2 b"}, "LSB_MCPU_HOSTS='a 2 b' is not"),
        ({"PBS_NODEFILE": "/nonexistent"}, "PBS_NODEFILE=/nonexistent: No such file"),
        ({"HYDRA_HOST_FILE": "/nonexistent"}, "hostfile /nonexistent: No such file"),
        (slurm("a[x-y]", "1"), "'x-y' is nothing that Slurm says of its nodes"),
        (slurm("a[1-999999999]", "1"), "'1-999999999' is nothing"),
        (slurm("[1-999][1-999]", "1"), "is nothing that Slurm says"),
        (slurm("a", "2(x999999999)"), "is nothing that Slurm says"),
        (slurm("-oProxyCommand=x", "1"), "SLURM_JOB_NODELIST: '-oProxyCommand=x 1' is not a host"),
        ({"LSB_MCPU_HOSTS": "-oProxyCommand=x 2"}, "LSB_MCPU_HOSTS: '-oProxyCommand=x 2' is not a host"),
        ({"LSB_MCPU_HOSTS": "a 0"}, "'a 0' is not a host"),
        (
            {"LSB_MCPU_HOSTS": "fd00::2 4"},
            "LSB_MCPU_HOSTS: 'fd00::2 4' is an address of IPv6, which",
        ),
        ({"LSB_MCPU_HOSTS": "a \u00b2"}, "is not a host"),
        ({"PBS_NODEFILE": b"a\n-oProxyCommand=x\n"}, "'-oProxyCommand=x 1' is not a host"),
        ({"PBS_NODEFILE": b"$(x)\n"}, "is not a host"),
        ({"PBS_NODEFILE": b"\xff\n"}, "is not a host"),
    ],
)
def test_what_makes_no_sense(environ: dict[str, str | bytes], text: str, tmp_path: Path) -> None:
    """Names among it that mpirun or ssh would take for options, or a shell for commands; bytes are those of a file."""
    path = tmp_path / "hosts"
    given = {}
    for name, value in environ.items():
        if isinstance(value, bytes):
            path.write_bytes(value)
        given[name] = str(path) if isinstance(value, bytes) else value
    with pytest.raises(ConfigError, match=re.escape(text)):
        find_allocation(given)


@pytest.mark.parametrize(("ranks", "hosts"), [(1, AB[:1]), (2, AB[:1]), (3, AB), (9, AB)])
def test_hosts_that_ranks_fill(ranks: int, hosts: tuple[Host, ...]) -> None:
    assert Allocation("PBS", AB).first(ranks) == hosts


def launch(words: str, environ: dict[str, str]) -> Launch:
    return run.launch_of(parse([*words.split(), "train.py"]), environ)


LSF = {"LSB_MCPU_HOSTS": "a 2 b 1"}


def test_ranks_are_the_allocations() -> None:
    assert launch("", slurm("a,b", "2,1")).ranks == 3
    assert launch("-np 2", slurm("a,b", "2,1")).ranks == 2


def test_this_machine_needs_no_mpi() -> None:
    alone = launch("", slurm(HERE, "4"))
    assert (alone.ranks, alone.is_local) == (4, True)
    assert launch("-np 4", slurm(f"{HERE},b", "4,4")).is_local  # they fill the first host
    assert launch("", {"LSB_MCPU_HOSTS": f"{HERE} 2"}).is_local


@pytest.mark.parametrize(("nodes", "tasks", "count"), [("a,b", "2,1", 2), ("a", "2", 1)], ids=["", "from a login node"])
def test_slurms_hosts_are_left_to_mpirun(nodes: str, tasks: str, count: int) -> None:
    found = launch("", slurm(nodes, tasks))
    assert (found.hosts, found.host_count, found.is_local) == ((), count, False)


def test_other_schedulers_hosts_are_told_to_mpirun() -> None:
    several = launch("", LSF)
    assert (several.hosts, several.is_local) == (AB, False)


def test_more_ranks_than_were_given_are_said() -> None:
    given = "LSF has given 3 ranks on 2 hosts"
    assert launch("-np 3", LSF).notes == (given,)
    assert launch("-np 5", LSF).notes == (given, "5 ranks are more than that: they share cores")


def test_jsrun_is_named_where_lsf_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsrun = tmp_path / "jsrun"
    jsrun.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "jsrun does: jsrun -n 3 -a 1 -c CORES python train.py" in launch("", LSF).notes[-1]
    assert len(launch("", {"LSB_MCPU_HOSTS": f"{HERE} 2"}).notes) == 1
    jsrun.unlink()
    assert len(launch("", LSF).notes) == 1


def test_hosts_of_the_user_win() -> None:
    assert launch("-H c:4", LSF).hosts == (Host("c", 4),)
