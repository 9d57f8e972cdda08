"""The virtual ranks of benchmarks/ say what real ranks say: the same messages and bytes, on every grouping."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mpi4py import MPI

from runtime_lab import LAYOUTS, TINY, Machines, agree, running

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from scale_check import TENSORS, compare, differences

pytestmark = pytest.mark.any_mpi

# With three ranks only where those of one node are no neighbours: four have all else.
NOT_WITH_THREE = pytest.mark.not_with_three_ranks
STEPS = 5  # three until the order is known to repeat, one in which it is frozen


@pytest.mark.parametrize(
    ("machine_of", "fanout"),
    [
        pytest.param(machine_of, fanout, marks=NOT_WITH_THREE if sorted(machine_of) == list(machine_of) else ())
        for machine_of, fanout in [*((machine_of, 4) for machine_of in LAYOUTS), (LAYOUTS[-1], 1)]
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "".join(map(str, value)),
)
@pytest.mark.parametrize("freezes", [True, False], ids=["frozen", "claimed"])
def test_virtual_ranks_say_what_real_ranks_say(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, machine_of: Machines, fanout: int, freezes: bool
) -> None:
    if not freezes:
        monkeypatch.setattr("hvdlite.coordinator.plan_leader.OrderWatch.period", lambda watch: 0)
    # Who has waited long says so, for the stall check; on a busy machine that would be more messages.
    # On one node real ranks say nothing at all where plans run free, which the model, of many nodes, does not know.
    config = replace(TINY, tree_fanout=fanout, stall_check_disable=True, prepared_operations=False)
    with running(comm, config, machine_of) as runtime:
        steps = [counts for _, counts in compare(runtime, comm, freezes, STEPS)]
    assert steps[0]["messages_spelled_out"][0] == len(TENSORS)
    assert steps[2]["messages_cached"][0] == len(TENSORS)
    assert [step["counted"][0] for step in steps[STEPS - 1 :]] == [len(TENSORS) * freezes] * (STEPS + 1)
    agree(comm, *(f"step {i}: {text}" for i, step in enumerate(steps) for text in differences(step)))
