"""What a bucket costs in messages between hosts, and that more ranks on them do not make it more."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lab import Lab

Hosts = Callable[..., Lab]

STEPS, BUCKETS = 3, 5
COUNT = f"""
import json, sys
import numpy as np
import hvdlite
import hvdlite.coordinator.frozen_plan as frozen_plan
import hvdlite.coordinator.negotiation as negotiation
from hvdlite import TensorView
from hvdlite.fusion.fusion_buffer import Home

negotiation._PATIENCE_S = 1e9  # a leader that has waited long passes on what it has: more messages on a busy machine
freezes = sys.argv[1:] == ["frozen"]
if not freezes:
    frozen_plan._FREEZABLE = ()
hvdlite.init()
from mpi4py import MPI

group = hvdlite.runtime().group
slots = [group.allocate(1 << 14) for _ in range({BUCKETS})]
views = [TensorView.of_numpy(slot.memory.view(np.float32)) for slot in slots]

def step():
    for i, (slot, view) in enumerate(zip(slots, views)):
        group.allreduce_async([view], [view], name=f"bucket.{{i}}", home=Home(slot, 0)).wait()

def counted():
    MPI.COMM_WORLD.Barrier()  # before, some may still be at it, and after the second others may have gone on
    counts = hvdlite.statistics()
    MPI.COMM_WORLD.Barrier()
    return counts

step()
while freezes and not MPI.COMM_WORLD.allreduce(hvdlite.statistics()["plans"], MPI.MIN):
    step()
before = counted()
for _ in range({STEPS}):
    step()
after = counted()
print(json.dumps({{name: after[name] - before[name] for name in after}}), flush=True)
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["claimed", "frozen"])
@pytest.mark.parametrize(
    ("ranks_per_host", "fanout", "edges_at"),
    [([1, 1, 1], 4, [2, 1, 1]), ([2, 2, 2], 4, [2, 1, 1]), ([2, 1, 2], 1, [1, 2, 1])],
    ids=["1+1+1", "2+2+2", "chain of 2+1+2"],
)
def test_two_messages_per_bucket_and_edge_of_the_tree(
    hosts: Hosts, mpi: str, ranks_per_host: list[int], fanout: int, edges_at: list[int], frozen: bool
) -> None:
    """A claim up and a verdict down, between leaders only: 17 bytes and 34; of a frozen plan two counts, of 17."""
    env = {"HVDLITE_TREE_FANOUT": str(fanout)}
    arguments = ["frozen"] if frozen else []
    result = (
        hosts(len(ranks_per_host)).launch(COUNT, *arguments, ranks_per_host=ranks_per_host, mpi=mpi, env=env).check()
    )
    counts = [json.loads(rank.stdout) for rank in result.ranks]
    rounds = STEPS * BUCKETS
    leaders = [sum(ranks_per_host[:host]) for host in range(len(ranks_per_host))]
    for rank, counted in enumerate(counts):
        edges = edges_at[leaders.index(rank)] if rank in leaders else 0
        assert counted["tree_messages_sent"] == counted["tree_messages_received"] == rounds * edges, (rank, counted)
        per_edge = 17 + 17 if frozen else 17 + 34
        assert counted["tree_bytes_sent"] + counted["tree_bytes_received"] == rounds * edges * per_edge, rank
        assert counted["claims_sent"] == (rounds if rank and not frozen else 0)
        assert counted["counted"] == (rounds if frozen else 0)
        assert (counted["messages_cached"], counted["messages_spelled_out"]) == (0 if frozen else rounds, 0), rank
