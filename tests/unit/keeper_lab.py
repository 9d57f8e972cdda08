"""Keepers of hosts that are other ones by their names only: what would be an ssh to them runs here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdlite.cli.job import Host, Launch
from hvdlite.cli.keepers import Keepers

HERE = Host("localhost", 2)
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Keepers]:
    """Those of hosts "a" and "b"."""
    keepers = Keepers(launch_by(tmp_path), ENVIRON, 20.0, lambda word, number: 0, is_local=True)
    yield keepers
    keepers.close()


def launch_by(directory: Path) -> Launch:
    agent = directory / "agent"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    return Launch(("train.py",), 2, options=("--mca", "plm_ssh_agent", str(agent)))


def wait_for(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
