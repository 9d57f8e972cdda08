"""What a bucket costs in messages between hosts, and that more ranks on them do not make it more; what ends a plan."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lab import Lab
from launching import on_one_mpi

Hosts = Callable[..., Lab]

PATIENT = {"HVDLITE_STALL_CHECK_DISABLE": "1"}  # who has waited long says so: more messages on a busy machine
STEPS, BUCKETS = 3, 5
UNTIL_FROZEN = 3 * BUCKETS + 1  # operations that must be claimed: the order comes again twice
WORTH_IT, LATER = 10, 4  # steps; a plan that ends sooner makes the next come later
START = f"""
import json, sys, time
import numpy as np
import hvdlite
from hvdlite import TensorView
from hvdlite.coordinator.order_watch import OrderWatch
from hvdlite.memory.base import Home
from hvdlite.operations.allocate import allocate
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.join import join_async

freezes = sys.argv[1:] == ["frozen"]
if not freezes:
    OrderWatch.period = lambda watch: 0
hvdlite.init()
from mpi4py import MPI

group = hvdlite.runtime().group
# Too large for ranks to begin before all are ready, which takes no message between leaders at all.
slots = [allocate(group, 1 << 16) for _ in range({BUCKETS})]
views = [TensorView.of_numpy(slot.memory.view(np.float32)) for slot in slots]

def step(order=range({BUCKETS})):
    for i in order:
        allreduce_async(group, [views[i]], [views[i]], name=f"bucket.{{i}}", home=Home(slots[i], 0)).wait()

def counted():
    MPI.COMM_WORLD.Barrier()  # before, some may still be at it, and after the second others may have gone on
    counts = hvdlite.statistics()
    MPI.COMM_WORLD.Barrier()
    return counts

def difference(do, *arguments):
    before = counted()
    do(*arguments)
    after = counted()
    return {{name: after[name] - before[name] for name in after}}

def steps(count, order=range({BUCKETS})):
    for _ in range(count):
        step(order)

def report(value):
    print(json.dumps(value), flush=True)

step()
while freezes and not MPI.COMM_WORLD.allreduce(hvdlite.statistics()["plans"], MPI.MIN):
    step()
"""
COUNT = f"{START}\nreport(difference(steps, {STEPS}))"
DEVIATE = f"""{START}
last = MPI.COMM_WORLD.size - 1

def join():
    if hvdlite.rank() < last:
        step()
    join_async(group).wait()

def step_until_frozen():
    plans = hvdlite.statistics()["plans"]
    step()
    while hvdlite.statistics()["plans"] == plans:
        time.sleep(1e-3)

another = [1, 0, *range(2, {BUCKETS})]
steps({WORTH_IT})
found = {{"changed": difference(step, another), "changed, later": difference(steps, {LATER}, another)}}
steps({WORTH_IT}, another)
found["back"] = difference(step_until_frozen)
found["back, later"] = difference(steps, {LATER})
steps({WORTH_IT})
found["joined"] = difference(join)
found["joined, later"] = difference(steps, {LATER})
report(found)
"""


@on_one_mpi("openmpi")
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
    env = {"HVDLITE_TREE_FANOUT": str(fanout), **PATIENT}
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


def test_what_ends_a_plan_and_when_the_next_begins(hosts: Hosts) -> None:
    """On two hosts: an order that changes, and changes back; a rank that joins."""
    result = hosts(2).launch(DEVIATE, "frozen", ranks_per_host=[2, 2], env=PATIENT).check()
    for rank, found in enumerate(json.loads(rank.stdout) for rank in result.ranks):
        # What is new has to repeat itself, what was frozen before has to come once: that is the step "back" itself.
        claims_of = {"changed": UNTIL_FROZEN - BUCKETS, "back": 0, "joined": BUCKETS}
        for change, claims in claims_of.items():
            operations = BUCKETS + (change == "joined")
            counts, later = found[change], found[f"{change}, later"]
            assert (counts["responses"], counts["counted"]) == (operations, 0), (rank, change)
            assert (later["responses"], later["counted"]) == (claims, LATER * BUCKETS - claims), (rank, change)
            assert later["claims_sent"] == (claims if rank else 0), (rank, change)
            assert later["plans"] == (claims > 0), (rank, change)
            # Of the tree's only edge: what ends a plan is a word down, an answer up, and another word down.
            sent, received = (later[f"tree_messages_{way}"] for way in ("sent", "received"))
            begins = later["plans"]  # which is a word down, an answer up, and another word with the next count
            assert sent == received == (LATER * BUCKETS + begins if rank in (0, 2) else 0), (rank, change)
            if change != "joined" and rank in (0, 2):
                both = counts["tree_messages_sent"] + counts["tree_messages_received"]
                # Where the next plan begins at once, the first word of it comes with the last verdict.
                least = 2 * operations + 3 + 2 * (claims == 0)
                assert least <= both <= least + 4, (rank, change)  # up to four complaints
