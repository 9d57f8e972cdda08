"""The virtual ranks of benchmarks/ say what real ranks say: the same messages and bytes, on every grouping."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mpi4py import MPI

from runtime_lab import LAYOUTS, TINY, Machines, agree, running

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from scale_check import compare, differences


@pytest.mark.parametrize("fanout", [1, 4])
@pytest.mark.parametrize("machine_of", LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
@pytest.mark.parametrize("alone", [True, False], ids=["one at a time", "at once"])
def test_virtual_ranks_say_what_real_ranks_say(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, machine_of: Machines, fanout: int, alone: bool
) -> None:
    # A leader that has waited long passes on what it has; on a busy machine that would be more messages.
    monkeypatch.setattr("hvdlite.coordinator.negotiation._PATIENCE_S", 1e9)
    monkeypatch.setattr("hvdlite.coordinator.frozen_plan._FREEZABLE", ())
    with running(comm, replace(TINY, tree_fanout=fanout), machine_of) as runtime:
        steps = [*compare(runtime, comm, alone, steps=3)]
    assert steps[0]["messages_spelled_out"][0] == steps[2]["messages_cached"][0] > 0
    agree(comm, *(f"step {i}: {text}" for i, step in enumerate(steps) for text in differences(step)))
