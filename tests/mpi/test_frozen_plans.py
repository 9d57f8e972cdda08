"""An order that repeats is frozen, and what deviates from it is claimed until that repeats: messages are counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import pytest
import torch
from mpi4py import MPI

import hvdlite.torch as hvd
from backend_lab import RANK, SIZE
from hvdlite.dtypes import DType
from hvdlite.job_runtime import Runtime
from hvdlite.operations.join import join_async
from runtime_lab import TINY, Difference, Machines, Tensor, agree, allreduce, machines, running

ORDER = ["first", "second", "third"]
NUMEL = {"first": 16, "second": 1024, "third": 5008}
FRAME = 17  # bytes of a message that names its request by a number, or counts
UNTIL_FROZEN = 3 * len(ORDER) + 1  # operations that must be claimed: the order comes again twice, unless it is known
WORTH_IT = 10  # steps, after which the end of a plan is no reason to wait longer for the next

LAYOUTS: list[Machines] = {2: [(0, 0), (0, 1)], 3: [(0, 1, 0)], 4: [(0, 0, 1, 1)]}.get(SIZE, [(0,) * SIZE])

pytestmark = [pytest.mark.skipif(SIZE == 1, reason="needs ranks that agree on something"), pytest.mark.any_mpi]


@pytest.fixture(scope="module")
def world() -> Iterator[MPI.Intracomm]:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
def runtime(world: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    # Who has waited long says so, for the stall check; on a busy machine that would be more messages.
    with running(world, replace(TINY, stall_check_disable=True), request.param) as made:
        yield made


def step(runtime: Runtime, order: Sequence[str] = ORDER, at_once: bool = False) -> None:
    handles = []
    for name in order:
        handles.append(allreduce(runtime, Tensor.input(NUMEL[name], DType.FLOAT32), name=name))
        if not at_once:
            handles[-1].wait()
    for handle in handles:
        handle.wait()


def freeze(runtime: Runtime, world: MPI.Intracomm) -> None:
    """Steps until none is claimed any more, and so many that the end of this plan is no reason to be careful."""
    steady = 0
    while steady < WORTH_IT:
        with Difference(runtime.statistics, world) as counts:
            step(runtime)
        steady += world.allreduce(counts["counted"], MPI.MIN) == len(ORDER)


def edges(runtime: Runtime) -> int:
    """Of the tree, over which this rank has messages."""
    topology = runtime.topology
    if not topology.is_leader:
        return 0
    return len(topology.children(TINY.tree_fanout)) + (topology.node_index > 0)


def check(world: MPI.Intracomm, counts: Difference, **expected: int) -> None:
    found = {name: counts[name] for name in expected}
    agree(world, None if found == expected else f"{found} instead of {expected}")


def check_claims(runtime: Runtime, world: MPI.Intracomm, counts: Difference, claimed: int, counted: int) -> None:
    """So many operations were claimed, by every rank but the root once, and so many counted."""
    claims = claimed * (runtime.rank > 0)
    check(world, counts, responses=claimed, counted=counted, claims_sent=claims)


def check_messages_of_an_end(runtime: Runtime, world: MPI.Intracomm, counts: Difference, operations: int) -> None:
    """For a plan that ends: HOLD and END down, HELD up, and what ranks complained, each of them once at most."""
    sent = counts["tree_messages_sent"] + counts["tree_messages_received"]
    least, most = 2 * operations, 2 * operations + 3 + SIZE
    problem = None if least * edges(runtime) <= sent <= most * edges(runtime) else f"{sent} messages between nodes"
    agree(world, problem)


def test_a_bucket_of_a_frozen_plan(runtime: Runtime, world: MPI.Intracomm) -> None:
    """A count up and a count down each edge of the tree; inside a node one word of the leader, and nothing to it.

    On one node nothing at all: every rank sees all counts.
    """
    freeze(runtime, world)
    with Difference(runtime.statistics, world) as counts:
        for _ in range(4):
            step(runtime)
    count = 4 * len(ORDER)
    check_claims(runtime, world, counts, claimed=0, counted=count)
    if len(runtime.topology.nodes) == 1:
        count = 0
    check(
        world,
        counts,
        claims_heard=0,
        messages_cached=0,
        messages_spelled_out=0,
        page_bytes_written=FRAME * count * (runtime.topology.is_leader and runtime.topology.local_size > 1),
        page_bytes_read=FRAME * count * (not runtime.topology.is_leader),
        tree_messages_sent=edges(runtime) * count,
        tree_bytes_sent=FRAME * edges(runtime) * count,
        tree_messages_received=edges(runtime) * count,
        tree_bytes_received=FRAME * edges(runtime) * count,
        plans=0,
    )


def test_an_order_that_changes_at_once_is_counted_all_the_same(
    runtime: Runtime, world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing comes before anybody has waited for it, on every rank in an order of its own."""
    monkeypatch.setattr("hvdlite.coordinator.plan_member._GAP_S", inf)
    freeze(runtime, world)
    with Difference(runtime.statistics, world) as counts:
        step(runtime, ORDER[RANK % 3 :] + ORDER[: RANK % 3], at_once=True)
    check_claims(runtime, world, counts, claimed=0, counted=len(ORDER))
    agree(world, None if counts["tree_messages_sent"] <= len(ORDER) * edges(runtime) else f"{counts}")


def test_a_changed_order(runtime: Runtime, world: MPI.Intracomm) -> None:
    freeze(runtime, world)
    other = ["second", "first", "third"]
    with Difference(runtime.statistics, world) as counts:
        step(runtime, other)
    check_claims(runtime, world, counts, claimed=len(ORDER), counted=0)
    check_messages_of_an_end(runtime, world, counts, len(ORDER))
    with Difference(runtime.statistics, world) as counts:
        for _ in range(4):
            step(runtime, other)
    claimed = UNTIL_FROZEN - len(ORDER)
    check_claims(runtime, world, counts, claimed=claimed, counted=4 * len(ORDER) - claimed)
    check(world, counts, plans=1)
    for _ in range(WORTH_IT):
        step(runtime, other)


def test_an_operation_that_nobody_does(runtime: Runtime, world: MPI.Intracomm) -> None:
    freeze(runtime, world)
    with Difference(runtime.statistics, world) as counts:
        step(runtime, ["first", "third"])
    check_claims(runtime, world, counts, claimed=1, counted=1)
    check_messages_of_an_end(runtime, world, counts, 2)
    with Difference(runtime.statistics, world) as counts:
        for _ in range(4):
            step(runtime)
    # The log ends with the third and then the first two: the order has come again.
    claimed = len(ORDER) - 1
    check_claims(runtime, world, counts, claimed=claimed, counted=4 * len(ORDER) - claimed)
    check(world, counts, plans=1)


def test_a_rank_that_joins(runtime: Runtime, world: MPI.Intracomm) -> None:
    freeze(runtime, world)
    with Difference(runtime.statistics, world) as counts:
        if runtime.rank < SIZE - 1:
            step(runtime)
        join_async(runtime.group).wait()
    join = 1
    own = join + len(ORDER) * (runtime.rank < SIZE - 1)
    check(world, counts, responses=len(ORDER) + join, counted=0, submissions=own)
    # A leader with a joined rank below it passes on claims as they come.
    topology = runtime.topology
    agree(world, None if topology.is_leader or counts["claims_sent"] == own else f"{counts['claims_sent']} claims")
    with Difference(runtime.statistics, world) as counts:
        for _ in range(4):
            step(runtime)
    claimed = len(ORDER)  # until the order has come again
    check_claims(runtime, world, counts, claimed=claimed, counted=4 * len(ORDER) - claimed)
    check(world, counts, plans=1)


@pytest.mark.parametrize("machine_of", LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
def test_an_unused_parameter(world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, machine_of: Machines) -> None:
    """Whose bucket the last rank submits only when backward is over, long after the one behind it."""
    monkeypatch.setenv("HVDLITE_STALL_CHECK_DISABLE", "1")
    with machines(machine_of):
        hvd.init()
    try:
        layers = [torch.nn.Linear(3, 3, bias=False) for _ in ORDER]
        parameters = [(f"layer{i}", layer.weight) for i, layer in enumerate(layers)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight for _, weight in parameters], lr=0.0), parameters, groups=len(ORDER)
        )

        def train(skipped: int | None = None) -> Difference:
            with Difference(hvd.statistics, world) as counts:
                optimizer.zero_grad()
                x = torch.ones(3)
                for i, layer in enumerate(layers):
                    x = x if i == skipped else layer(x)
                claims = hvd.statistics()["claims_sent"]
                x.sum().backward()
                while skipped is not None and hvd.statistics()["claims_sent"] == claims:
                    time.sleep(1e-3)
                optimizer.step()
            return counts

        def steps_until_frozen() -> int:
            """How many steps it takes until nothing is claimed in one."""
            steps = 1
            while world.allreduce(train()["counted"], MPI.MIN) < len(ORDER):
                steps += 1
            return steps

        steps_until_frozen()
        counts = train(skipped=1 if RANK == SIZE - 1 else None)
        claimed = counts["responses"]  # whether the first bucket was done by then depends on when it was ready
        agree(world, None if claimed in (2, 3) else f"{claimed} were claimed")
        check(world, counts, counted=len(ORDER) - claimed, claims_sent=claimed * (RANK > 0), submissions=len(ORDER))
        assert steps_until_frozen() <= 2 + 4 + 1  # this plan was soon at its end, so the next waits for more periods
    finally:
        hvd.shutdown()
