"""The collectives of torch.distributed over hvdlite, on any grouping of the ranks into nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from distributed_lab import NODES, RANK, SIZE, SIZES, of_rank, process_group, told, total

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning", "ignore:Sparse invariant checks"),
]
LAST = SIZE - 1


@pytest.fixture(scope="module", params=NODES, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    with process_group(request.param) as group:
        yield group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.int16], ids=str)
def test_movements(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    for numel in SIZES:
        mine, theirs = of_rank(RANK, numel, dtype), [of_rank(rank, numel, dtype) for rank in range(SIZE)]
        tensor = mine.clone()
        dist.broadcast(tensor, LAST)
        assert torch.equal(tensor, theirs[LAST]), numel
        found = [torch.empty(numel, dtype=dtype) for _ in range(SIZE)]
        dist.all_gather(found, mine)
        assert all(map(torch.equal, found, theirs)), numel
        block = torch.empty(SIZE, numel, dtype=dtype)
        dist.all_gather_into_tensor(block, mine.view(1, numel))
        assert torch.equal(block, torch.stack(theirs)), numel
        found = [torch.empty(numel, dtype=dtype) for _ in range(SIZE)]
        dist.gather(mine, found if RANK == LAST else None, LAST)
        assert RANK != LAST or all(map(torch.equal, found, theirs)), numel
        dist.scatter(tensor, theirs if RANK == LAST else None, LAST)
        assert torch.equal(tensor, mine), numel
        exchanged = torch.empty(SIZE * numel, dtype=dtype)
        dist.all_to_all_single(exchanged, of_rank(RANK, SIZE * numel, dtype))
        parts = [of_rank(rank, SIZE * numel, dtype)[RANK * numel : (RANK + 1) * numel] for rank in range(SIZE)]
        assert torch.equal(exchanged, torch.cat(parts)), numel
        found = [torch.empty(numel, dtype=dtype) for _ in range(SIZE)]
        dist.all_to_all(found, [of_rank(RANK + rank, numel, dtype) for rank in range(SIZE)])
        assert all(torch.equal(part, of_rank(rank + RANK, numel, dtype)) for rank, part in enumerate(found)), numel


def test_uneven_shares(group: dist.ProcessGroup) -> None:
    found = [torch.empty(rank * 300) for rank in range(SIZE)]
    dist.all_gather(found, of_rank(RANK, RANK * 300))
    assert all(torch.equal(part, of_rank(rank, rank * 300)) for rank, part in enumerate(found))
    rows = [(RANK + rank) % 3 * 200 for rank in range(SIZE)]  # to each rank, and from it
    output = torch.empty(sum(rows), 2)
    dist.all_to_all_single(output, torch.full((sum(rows), 2), float(RANK)), rows, rows)
    assert torch.equal(output, torch.cat([torch.full((count, 2), float(rank)) for rank, count in enumerate(rows)]))
    outputs = [torch.empty(count) for count in rows]
    dist.all_to_all(outputs, [torch.full((count,), float(RANK)) for count in rows])
    assert all((output == rank).all() for rank, output in enumerate(outputs))
    share = torch.empty(RANK * 10)
    dist.reduce_scatter(share, [torch.ones(rank * 10) for rank in range(SIZE)])
    assert torch.equal(share, torch.full((RANK * 10,), float(SIZE)))


def test_memory_that_is_not_contiguous(group: dist.ProcessGroup) -> None:
    tensor = of_rank(RANK, 12).view(3, 4).t()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total(12).view(3, 4).t())
    tensor = of_rank(RANK, 12).view(3, 4).t()
    dist.broadcast(tensor, LAST)
    assert torch.equal(tensor, of_rank(LAST, 12).view(3, 4).t())
    block = torch.zeros(4, SIZE).t()
    dist.all_gather_into_tensor(block, of_rank(RANK, 8)[::2].view(1, 4))
    assert torch.equal(block, torch.stack([of_rank(rank, 8)[::2] for rank in range(SIZE)]))


@pytest.mark.parametrize("numel", [4, 1500])  # of a share: below and above what travels at once
def test_results_that_lie_over_inputs(group: dist.ProcessGroup, numel: int) -> None:
    def shares(rank: int = RANK) -> torch.Tensor:
        return of_rank(rank, SIZE * numel).view(SIZE, numel)

    half = numel // 2
    summed = total(SIZE * numel).view(SIZE, numel)
    firsts = torch.stack([shares(rank)[0] for rank in range(SIZE)])
    mine = torch.stack([shares(rank)[RANK] for rank in range(SIZE)])
    block = shares()
    dist.all_gather_into_tensor(block, block[:1])
    assert torch.equal(block, firsts)
    block = shares()
    dist.all_gather(list(block), block[0])
    assert torch.equal(block, firsts)
    block = shares()
    dist.gather(block[0], list(block) if RANK == LAST else None, LAST)
    assert torch.equal(block, firsts if RANK == LAST else shares())
    block = torch.cat([shares().flatten(), torch.empty(half)])
    share = block[half : half + numel]
    dist.reduce_scatter_tensor(share, block[: SIZE * numel])
    assert torch.equal(share, summed[RANK])
    block = shares()
    dist.reduce_scatter(block[RANK - 1], list(block))
    assert torch.equal(block[RANK - 1], summed[RANK])
    block = shares()
    dist.scatter(block[0], list(block) if RANK == LAST else None, LAST)
    assert torch.equal(block[0], shares(LAST)[RANK])
    block = shares()
    dist.all_to_all(list(block)[::-1], list(block))
    assert torch.equal(block.flip(0), mine)
    block = torch.cat([shares().flatten(), torch.empty(half)])
    dist.all_to_all_single(block[half:], block[: SIZE * numel])
    assert torch.equal(block[half:].view(SIZE, numel), mine)
    block = shares()
    dist.all_to_all_single(block, block)
    assert torch.equal(block, mine)


def test_sparse_tensors_add_up(group: dist.ProcessGroup) -> None:
    tensor = torch.sparse_coo_tensor([[0, RANK]], torch.ones(2), (SIZE,))
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [SIZE + 1.0] + [1.0] * (SIZE - 1)
    both = [torch.eye(SIZE)[:, RANK].to_sparse(), torch.eye(SIZE)[RANK].to_sparse()]
    dist.all_reduce_coalesced(both)
    assert [tensor.to_dense().tolist() for tensor in both] == [[1.0] * SIZE] * 2


def test_several_tensors_at_once(group: dist.ProcessGroup) -> None:
    tensors = [of_rank(RANK, numel) for numel in (3, 0, 700)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(torch.equal(tensor, total(tensor.numel())) for tensor in tensors)
    outputs = [torch.empty(SIZE * numel) for numel in (3, 700)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, of_rank(RANK, output.numel() // SIZE))
    manager.wait()
    for output in outputs:
        numel = output.numel() // SIZE
        assert torch.equal(output, torch.cat([of_rank(rank, numel) for rank in range(SIZE)]))
    shares = [torch.empty(numel) for numel in (3, 700)]
    with dist._coalescing_manager():
        for share in shares:
            dist.reduce_scatter_tensor(share, of_rank(RANK, SIZE * share.numel()))
    for share in shares:
        assert torch.equal(share, total(SIZE * share.numel())[RANK * share.numel() :][: share.numel()])


def test_calls_that_nobody_waits_for_are_done_in_order(group: dist.ProcessGroup) -> None:
    tensor = torch.ones(1000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(6)]
    future = works[3].get_future().then(lambda done: done.value()[0].numel())
    works[5].wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    assert torch.equal(tensor, torch.full((1000,), float(SIZE**6)))
    assert future.wait() == 1000
    assert works[0].exception() is None


def test_futures_of_gathers_hold_the_list_of_the_caller(group: dist.ProcessGroup) -> None:
    """Not a list of it, as those of Gloo."""
    work = dist.all_gather([torch.empty(3) for _ in range(SIZE)], of_rank(RANK, 3), async_op=True)
    assert work is not None
    assert [each.tolist() for each in work.get_future().wait()] == [of_rank(rank, 3).tolist() for rank in range(SIZE)]


def test_futures_of_coalesced_gathers_hold_the_lists_of_the_caller(group: dist.ProcessGroup) -> None:
    """One per rank, as those of Gloo."""
    by_rank = [[torch.empty(3), torch.empty(700)] for _ in range(SIZE)]
    future = dist.all_gather_coalesced(by_rank, [of_rank(RANK, numel) for numel in (3, 700)], async_op=True)
    for rank, of_this in enumerate(future.wait()):
        assert [tensor.tolist() for tensor in of_this] == [of_rank(rank, numel).tolist() for numel in (3, 700)]


def test_several_calls_that_nobody_waits_for_do_not_block(group: dist.ProcessGroup) -> None:
    tensors = [of_rank(RANK, numel) for numel in (3, 700)]
    if RANK != SIZE - 1:
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        told(None)  # the last rank calls after that
    else:
        told(None)
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(tensor, total(tensor.numel())) for tensor in tensors)


def test_a_callback_may_wait_for_another_call(group: dist.ProcessGroup) -> None:
    """By torch's future, as PowerSGD's hook does."""
    first, second = torch.ones(5), torch.ones(5)

    def then(done: torch.futures.Future[list[torch.Tensor]]) -> float:
        later = dist.all_reduce(second, async_op=True).get_future().wait()
        return float(done.value()[0][0] + later[0][0])

    assert dist.all_reduce(first, async_op=True).get_future().then(then).wait() == 2 * SIZE


def test_a_callback_may_call_the_group(group: dist.ProcessGroup) -> None:
    first, second = torch.ones(5), torch.ones(5)

    def then(done: torch.futures.Future[list[torch.Tensor]]) -> float:
        dist.all_reduce(second)
        return float(done.value()[0][0] + second[0])

    assert dist.all_reduce(first, async_op=True).get_future().then(then).wait() == 2 * SIZE


def test_calls_of_callbacks_come_in_the_same_order_on_all_ranks(group: dist.ProcessGroup) -> None:
    """Whatever a rank has called meanwhile; hooks of DistributedDataParallel rely on that, as PowerSGD's."""
    first, of_callback, second = torch.ones(5), torch.full((5,), 10.0), torch.full((5,), 100.0)

    def then(done: torch.futures.Future[list[torch.Tensor]]) -> float:
        dist.all_reduce(of_callback, async_op=True).get_future().wait()
        return float(done.value()[0][0])

    if RANK == LAST:
        told(None)  # the others have made both of their calls
    called = dist.all_reduce(first, async_op=True).get_future().then(then)
    if RANK == LAST:
        called.wait()
    work = dist.all_reduce(second, async_op=True)
    if RANK != LAST:
        told(None)
    work.wait()
    assert called.wait() == SIZE
    assert of_callback.tolist() == [10.0 * SIZE] * 5
    assert second.tolist() == [100.0 * SIZE] * 5


def test_results_of_functional_collectives_are_waited_for(group: dist.ProcessGroup) -> None:
    def result() -> torch.Tensor:
        return functional.all_reduce(torch.full((SIZE,), 1.0 + RANK), "sum", group)

    of_all = SIZE * (SIZE + 1) / 2
    in_place, out, everything = result(), result(), torch.empty(SIZE * SIZE)
    dist.all_reduce(in_place)
    dist.all_gather_into_tensor(everything, result())
    dist.all_to_all_single(out, torch.full((SIZE,), float(RANK)))
    assert (in_place + 0).tolist() == [SIZE * of_all] * SIZE
    assert everything.tolist() == [of_all] * SIZE * SIZE
    assert (out + 0).tolist() == list(range(SIZE))


OVERWRITING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all_gather": lambda shares, share: dist.all_gather(list(shares.detach().split(1)), share),
    "all_gather_into_tensor": dist.all_gather_into_tensor,
    "gather": lambda shares, share: dist.gather(share, list(shares.detach().split(1)) if RANK == 0 else None),
    "reduce_scatter": lambda shares, _: dist.reduce_scatter(shares.detach()[:1], list(torch.ones(SIZE).split(1))),
    "reduce_scatter_tensor": lambda shares, _: dist.reduce_scatter_tensor(shares.detach()[:1], torch.ones(SIZE)),
    "all_to_all": lambda shares, _: dist.all_to_all(list(shares.detach().split(1)), list(torch.ones(SIZE).split(1))),
}


@pytest.mark.parametrize("call", OVERWRITING.values(), ids=OVERWRITING.keys())
def test_backward_does_not_take_what_was_overwritten(
    group: dist.ProcessGroup, call: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    weight = torch.ones(SIZE, requires_grad=True)
    shares = weight * 2
    loss = (shares * shares).sum()
    with torch.no_grad():
        call(shares, torch.full((1,), 5.0))
    if call is OVERWRITING["gather"] and RANK != 0:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_torchs_default_device_is_for_tensors_of_the_program(group: dist.ProcessGroup) -> None:
    tensor = torch.sparse_coo_tensor([[0, RANK]], torch.ones(2), (SIZE,))
    torch.set_default_device("meta")
    try:
        dist.all_reduce(tensor, async_op=True).wait()
        dist.monitored_barrier()
    finally:
        torch.set_default_device(None)
    assert tensor.to_dense().tolist() == [SIZE + 1.0] + [1.0] * (SIZE - 1)


@pytest.mark.skipif(SIZE == 1, reason="nobody to contradict")
def test_sparse_tensors_of_other_dimensions_contradict(group: dist.ProcessGroup) -> None:
    with pytest.raises(RuntimeError, match=f"but 1 on rank {LAST}"):
        dist.all_reduce(torch.eye(3).to_sparse(1 if RANK == LAST else 2))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_are_refused(group: dist.ProcessGroup) -> None:
    """Their integers alone would arrive, and be read by the scale that the result has had before."""

    def quantized(numel: int = 2) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.ones(numel), 0.5 + RANK, 0, torch.quint8)

    for call in (
        lambda: dist.broadcast(quantized(), 0),
        lambda: dist.all_gather([quantized() for _ in range(SIZE)], quantized()),
        lambda: dist.all_to_all_single(quantized(SIZE), quantized(SIZE)),
        lambda: dist.recv(quantized(), 0),
    ):
        with pytest.raises(ValueError, match="no quantized tensors"):
            call()


@pytest.mark.skipif(SIZE == 1, reason="nobody to contradict")
def test_contradictions_are_named_on_all_ranks(group: dist.ProcessGroup) -> None:
    odd = RANK == LAST

    def shape() -> None:
        dist.all_reduce(torch.ones(4 if odd else 3))

    def dtype() -> None:
        dist.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32))

    def op() -> None:
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)

    def root() -> None:
        dist.broadcast(torch.ones(3), 0 if odd else LAST)

    def order() -> None:
        dist.barrier() if odd else dist.all_reduce(torch.ones(3))

    def factor() -> None:
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(0.5 + 1e-9 * odd))

    def sizes() -> None:
        rows = [3 if odd else 2] * SIZE
        dist.all_to_all_single(torch.ones(2 * SIZE), torch.ones(sum(rows)), [2] * SIZE, rows)

    for way, text in (
        (shape, f"shape is (3,) on rank{'' if SIZE == 2 else 's'} 0"),
        (dtype, f"but torch.float64 on rank {LAST}"),
        (op, f"but MAX on rank {LAST}"),
        (root, f"but 0 on rank {LAST}"),
        (order, f"but barrier() on rank {LAST}"),
        (factor, f"but PREMUL_SUM of 0.500000001 on rank {LAST}"),
        (sizes, "other sizes of one another than they send"),
    ):
        with pytest.raises(RuntimeError) as caught:
            way()
        texts = told(str(caught.value))
        assert len(set(texts)) == 1, texts
        assert text in str(caught.value)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == SIZE  # the group is as good as before


@pytest.mark.parametrize("root", [-1, SIZE])
def test_a_root_is_a_rank_of_the_group(group: dist.ProcessGroup, root: int) -> None:
    one, several = torch.ones(3), [torch.ones(3) for _ in range(SIZE)]
    for call in (
        lambda: dist.broadcast(one, root),
        lambda: dist.reduce(one, root),
        lambda: group.gather([], [one], root),
        lambda: group.scatter([one], [], root),
    ):
        with pytest.raises(ValueError, match=f"root {root} is no rank of the {SIZE}"):
            call()
    dist.all_gather(several, one)


def test_a_reduction_of_no_tensors_is_refused_and_the_group_goes_on(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="there are no tensors to reduce"):
        dist.all_reduce_coalesced([])
    dist.barrier()


def test_a_message_to_nobody_is_refused_and_the_group_goes_on(group: dist.ProcessGroup) -> None:
    one = torch.ones(3)
    for call in (
        lambda: dist.send(one, SIZE, tag=1),
        lambda: dist.recv(one, SIZE, tag=1),
        lambda: group.send([one], -1, 1),
        lambda: group.recv([one], -2, 1),
    ):
        with pytest.raises(ValueError, match=f"is no rank of the {SIZE}"):
            call()
    with pytest.raises(ValueError, match="more than 64 bits"):
        group.send([one], (RANK + 1) % SIZE, 2**63)
    for peer, tag in ((1.0, 0), (0, 1.0)):
        with pytest.raises(TypeError, match="integer"):
            group.send([one], peer, tag)
    work = group.send([one * RANK], (RANK + 1) % SIZE, -(2**63))
    group.recv([one], (RANK - 1) % SIZE, -(2**63)).wait()
    work.wait()
    assert one.tolist() == [(RANK - 1) % SIZE] * 3


def test_lists_have_a_tensor_for_each_rank_and_one_type(group: dist.ProcessGroup) -> None:
    one, others = torch.ones(3), [torch.ones(3, dtype=torch.int32) for _ in range(SIZE)]
    for count in (0, SIZE + 1):
        with pytest.raises(ValueError, match=f"{count} inputs for {SIZE} ranks"):
            dist.reduce_scatter(one, [torch.ones(3)] * count)
    for call in (
        lambda: group.allgather([others], [one]),
        lambda: group.reduce_scatter([one], [others]),
        lambda: group.gather([others], [one], RANK),
        lambda: group.scatter([one], [others], RANK),
    ):
        with pytest.raises(ValueError, match="of different types"):
            call()


def test_objects_and_subgroups(group: dist.ProcessGroup) -> None:
    found: list[object] = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK, "text": "x" * 3000 * RANK})
    assert [entry["rank"] for entry in found] == list(range(SIZE))  # type: ignore[index]
    listed = [RANK, "kept"] if RANK == 0 else [None, None]
    dist.broadcast_object_list(listed, 0)
    assert listed == [0, "kept"]
    found = [None] * SIZE
    dist.gather_object({"rank": RANK}, found if RANK == LAST else None, LAST)
    assert found == ([{"rank": rank} for rank in range(SIZE)] if RANK == LAST else [None] * SIZE)


@pytest.mark.skipif(SIZE == 1, reason="nobody to send to")
def test_objects_as_messages(group: dist.ProcessGroup) -> None:
    listed = [RANK, "x" * 100_000]
    if RANK == 0:
        dist.send_object_list(listed, LAST)
    if RANK == LAST:
        listed = [None, None]
        assert dist.recv_object_list(listed, 0) == 0
        assert listed == [0, "x" * 100_000]
