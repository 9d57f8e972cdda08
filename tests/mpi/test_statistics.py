"""statistics(): what a step costs in messages, on every rank and every grouping of the ranks into nodes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hvdlite
import hvdlite.torch as hvd
from backend_lab import RANK, SIZE, reduced
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.job_runtime import Runtime
from hvdlite.memory.views import TensorView
from hvdlite.operations.alltoall import alltoall_async
from hvdlite.operations.reducescatter import reducescatter_async
from hvdlite.topology import Topology
from runtime_lab import LAYOUTS, TINY, Difference, Tensor, agree, allreduce, machines, running

pytestmark = pytest.mark.any_mpi

BUCKETS = {"first": 16, "second": 1024, "third": 5008}  # numel; whole cache lines of float32
TREE = ["tree_messages_sent", "tree_bytes_sent", "tree_messages_received", "tree_bytes_received"]
CACHED = 17  # bytes of a message that names its request by a number
VERDICT = 2 * CACHED  # a response and the end of its batch


@pytest.fixture(scope="module")
def world() -> Iterator[MPI.Intracomm]:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module", params=[1, 4], ids=["chain", "fanout 4"])
def fanout(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda machine_of: "".join(map(str, machine_of)))
def runtime(world: MPI.Intracomm, request: pytest.FixtureRequest, fanout: int) -> Iterator[Runtime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvdlite.coordinator.plan_leader.OrderWatch.period", lambda watch: 0)
        # Who has waited long says so, for the stall check; on a busy machine that would be more messages.
        config = replace(TINY, tree_fanout=fanout, stall_check_disable=True)
        with running(world, config, request.param) as made:
            yield made


def reduce_all(runtime: Runtime, at_once: bool = False) -> None:
    handles = []
    for name, numel in BUCKETS.items():
        handles.append(allreduce(runtime, Tensor.input(numel, DType.FLOAT32), name=name))
        if not at_once:
            handles[-1].wait()
    for handle in handles:
        handle.wait()


def per_bucket(topology: Topology, fanout: int) -> dict[str, int]:
    """What a bucket that all ranks know costs this rank, on its own; all control messages are here."""
    own = dict.fromkeys(["submissions", "responses", "batches", "buckets"], 1)
    if not topology.is_leader:
        own |= {"claims_sent": 1, "messages_cached": 1, "page_bytes_written": CACHED, "page_bytes_read": VERDICT}
        return own
    children = len(topology.children(fanout))
    parents = int(topology.node_index > 0)
    return own | {
        "claims_sent": parents,
        "claims_heard": topology.local_size + children,
        "messages_cached": 1,  # a claim to the parent; of the root, the response
        "page_bytes_written": VERDICT * (topology.local_size > 1),
        "page_bytes_read": CACHED * (topology.local_size - 1),
        "tree_messages_sent": parents + children,
        "tree_bytes_sent": parents * CACHED + children * VERDICT,
        "tree_messages_received": parents + children,
        "tree_bytes_received": parents * VERDICT + children * CACHED,
    }


def test_a_bucket_in_steady_state(runtime: Runtime, world: MPI.Intracomm, fanout: int) -> None:
    """At most ``fanout`` + 1 messages each way per rank and bucket between nodes, however many ranks there are."""
    reduce_all(runtime)
    steps = 4
    with Difference(runtime.statistics, world) as counted:
        for _ in range(steps):
            reduce_all(runtime)
    count = steps * len(BUCKETS)
    expected = {name: count * number for name, number in per_bucket(runtime.topology, fanout).items()}
    expected["reduced_bytes"] = steps * 4 * sum(BUCKETS.values())
    of_control = {name: n for name, n in counted.items() if n and name != "cycles" and not name.startswith("ring")}
    difference = {name for name in of_control | expected if of_control.get(name, 0) != expected.get(name, 0)}
    agree(world, f"{difference}: {of_control} instead of {expected}" if difference else None)
    assert counted["cycles"] >= count
    if len(runtime.topology.nodes) == 1:
        assert not any(counted[name] for name in TREE)


def test_buckets_that_are_ready_together_share_messages(runtime: Runtime, world: MPI.Intracomm, fanout: int) -> None:
    """Claims and responses are as many; only what carries them may be less."""
    reduce_all(runtime)
    with Difference(runtime.statistics, world) as counted:
        reduce_all(runtime, at_once=True)
    expected = {name: len(BUCKETS) * number for name, number in per_bucket(runtime.topology, fanout).items()}
    for name in ("submissions", "claims_sent", "claims_heard", "responses", "messages_cached"):
        assert counted[name] == expected.get(name, 0), name
    for name in ("batches", "buckets", *TREE):
        assert counted[name] <= expected.get(name, 0), name
    assert 1 <= counted["batches"] <= counted["buckets"]


def test_a_request_is_spelled_out_once(runtime: Runtime, world: MPI.Intracomm) -> None:
    """By a leader to its parent, by the root in the log, by any other rank to its leader."""
    with Difference(runtime.statistics, world) as first:
        allreduce(runtime, Tensor.input(3, DType.FLOAT32), name="new to all").wait()
    with Difference(runtime.statistics, world) as second:
        allreduce(runtime, Tensor.input(3, DType.FLOAT32), name="new to all").wait()
    assert (first["messages_spelled_out"], first["messages_cached"]) == (1, 0)
    assert (second["messages_spelled_out"], second["messages_cached"]) == (0, 1)
    assert first["page_bytes_written"] > second["page_bytes_written"] or runtime.topology.local_size == 1


def test_data_between_nodes(runtime: Runtime, world: MPI.Intracomm) -> None:
    """A ring takes each byte over 2(n-1) links, whoever of a node has sent it."""
    nodes = len(runtime.topology.nodes)
    tensor = Tensor.input(5003, DType.FLOAT32)
    with Difference(runtime.statistics, world) as counted:
        allreduce(runtime, tensor, name="large").wait()
    sums = world.allreduce(Counter(counted))
    assert counted["reduced_bytes"] == tensor.view.nbytes
    assert sums["ring_bytes_sent"] == sums["ring_bytes_received"] == 2 * (nodes - 1) * tensor.view.nbytes
    assert sums["ring_messages_sent"] == sums["ring_messages_received"] >= 2 * (nodes - 1) * nodes
    assert counted["ring_bytes_sent"] == 0 or runtime.topology.local_rank < runtime.topology.rails


def test_a_reducescatter_sends_half_of_what_an_allreduce_does(runtime: Runtime, world: MPI.Intracomm) -> None:
    """Each byte of the sum is needed on one rank, so on one node."""
    topology = runtime.topology
    tensor, result = Tensor.input(SIZE * 1024, DType.FLOAT32), Tensor.empty(1024, DType.FLOAT32)
    with Difference(runtime.statistics, world) as counted:
        reducescatter_async(runtime.group, [tensor.view], [result.view], name="large").wait()
    sums = world.allreduce(Counter(counted))
    nodes = len(topology.nodes)
    assert sums["ring_bytes_sent"] == sums["ring_bytes_received"] == (nodes - 1) * tensor.view.nbytes
    expected = reduced(ReduceOp.SUM, SIZE * 1024, DType.FLOAT32)[1024 * RANK : 1024 * (RANK + 1)]
    agree(world, result.problem(expected))


def test_contradictions_and_alltoall(runtime: Runtime, world: MPI.Intracomm) -> None:
    with Difference(runtime.statistics, world) as counted:
        handle = allreduce(runtime, Tensor.input(2 + (RANK > 0), DType.FLOAT32), name="contradiction")
        with pytest.raises(hvd.HorovodInternalError) if SIZE > 1 else nullcontext():
            handle.wait()
        rows = 10_000  # more than goes with the numbers of rows
        source, target = np.arange(rows * SIZE, dtype=np.int32), np.empty(rows * SIZE, np.int32)
        alltoall_async(
            runtime.group, TensorView.of_numpy(source), [rows] * SIZE, lambda *_: TensorView.of_numpy(target)
        ).wait()
    assert counted["faults"] == int(SIZE > 1)
    assert counted["responses"] == counted["submissions"] - counted["faults"]
    others = SIZE - 1
    for direction in ("sent", "received"):
        assert counted[f"alltoall_messages_{direction}"] == others
        assert counted[f"alltoall_bytes_{direction}"] == rows * 4 * others


def test_process_sets_add_up_and_stay_counted() -> None:
    with machines((0,) * SIZE):
        hvd.init()
    try:
        made = hvd.add_process_set([SIZE - 1]) if SIZE > 1 else hvd.global_process_set
        before = hvd.statistics()
        with pytest.raises(ValueError, match="process_set is 3; pass hvd.global_process_set or an hvd.ProcessSet"):
            hvd.statistics(3)  # type: ignore[arg-type]
        if made.included():
            for _ in range(3):
                hvd.allreduce(torch.ones(2), process_set=made)
            if SIZE > 1:
                assert hvd.statistics(made)["submissions"] == 3
                assert hvd.statistics(hvd.global_process_set)["submissions"] == before["submissions"]
            assert hvd.statistics()["submissions"] == before["submissions"] + 3
        else:
            with pytest.raises(ValueError, match="not a member"):
                hvd.statistics(made)
        if SIZE > 1:
            hvd.remove_process_set(made)
            mine = 3 * (RANK == SIZE - 1)
            assert hvd.statistics()["submissions"] == before["submissions"] + mine + 1  # the removal is one too
            assert hvd.statistics(hvd.global_process_set)["submissions"] == before["submissions"] + 1
    finally:
        hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.statistics()


def test_counts_do_not_go_back_after_a_look_while_a_process_set_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    if SIZE == 1:
        return
    with machines((0,) * SIZE):
        hvd.init()
    try:
        made = hvd.add_process_set([0])
        if RANK == 0:
            hvd.allreduce(torch.ones(2), process_set=made)
            (subset,) = hvdlite.runtime().world.subsets.values()
            own = subset.own_statistics()
            removal = threading.Thread(target=hvd.remove_process_set, args=[made])

            def meanwhile() -> dict[str, int]:
                if removal.ident is None:
                    removal.start()
                    removal.join()
                return own

            monkeypatch.setattr(subset, "own_statistics", meanwhile)
            seen, later = hvd.statistics(), hvd.statistics()
            assert {name for name, count in seen.items() if later[name] < count} == set()
        else:
            hvd.remove_process_set(made)
    finally:
        hvd.shutdown()
