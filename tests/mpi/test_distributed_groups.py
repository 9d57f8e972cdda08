"""Process groups over hvdlite: messages, subgroups, and their end."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from distributed_lab import NODES, RANK, SIZE, SIZES, beside_hvdlite, of_rank, process_group, told
from hvdlite import mpi
from hvdlite.collectives import shm_exchange
from hvdlite.config import Config
from hvdlite.distributed import doors
from hvdlite.errors import ShutDownError, StartupError
from hvdlite.garbage import uncollected
from hvdlite.naps import Patience
from hvdlite.rank_list import rank_list

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]
LAST = SIZE - 1


def test_groups_of_some_ranks_end_in_any_order() -> None:
    with process_group():
        groups = [dist.new_group(range(first, SIZE)) for first in range(SIZE)]
        for first, group in enumerate(groups):
            if first <= RANK:
                tensor = torch.ones(10)
                dist.all_reduce(tensor, group=group)
                assert tensor[0] == SIZE - first
        for number, group in enumerate(groups[1:]):
            if number % 2 == 0 and number < RANK:
                dist.destroy_process_group(group)
        alone = dist.new_group([RANK], use_local_synchronization=True)
        dist.barrier(alone)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor[0] == SIZE
        assert dist.get_backend() == "hvdlite"


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_number_in_the_node_is_known_without_local_rank(
    nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with process_group(nodes):
        monkeypatch.delenv("LOCAL_RANK")
        expected = nodes[:RANK].count(nodes[RANK])
        assert dist.get_node_local_rank() == dist.get_node_local_rank(fallback_rank=9) == expected
        monkeypatch.setenv("LOCAL_RANK", "7")
        assert dist.get_node_local_rank() == 7
        monkeypatch.delenv("LOCAL_RANK")
    assert dist.get_node_local_rank(fallback_rank=9) == 9
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_group_that_has_ended_keeps_no_descriptor(nodes: tuple[int, ...]) -> None:
    """Nor the memory behind it, until garbage is collected."""

    def use_groups() -> None:
        with process_group(nodes):
            group = dist.new_group()
            for each in (None, group):
                dist.all_reduce(torch.ones(3), group=each)
                dist.all_reduce(torch.ones(100_000), group=each, async_op=True).wait()
            sent, received = torch.ones(3), torch.empty(3)
            sending = dist.isend(sent, (RANK + 1) % SIZE)
            dist.recv(received, (RANK - 1) % SIZE)
            sending.wait()

    use_groups()  # what is made once in a process, is made
    gc.collect()
    with uncollected():
        before = len(os.listdir("/proc/self/fd"))
        use_groups()
        assert len(os.listdir("/proc/self/fd")) <= before  # one of before may be on its way to be closed


def test_groups_that_only_their_ranks_make() -> None:
    """torch names them by the number of groups of a rank, too."""
    with process_group():
        for ranks in ([rank for rank in range(SIZE) if rank % 2 == RANK % 2], list(range(SIZE))):
            group = dist.new_group(ranks, use_local_synchronization=True)
            tensor = torch.full((3,), RANK)
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == sum(ranks)


def listening() -> set[str]:
    """Where this process does, by TCP: addresses and ports, as the kernel writes them."""
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory
            own.add(os.readlink(f"/proc/self/fd/{entry}"))
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()]
    return {words[1] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in own}


def test_the_store_of_a_group_on_one_machine_is_at_its_loopback() -> None:
    before = listening()
    with process_group():
        new = listening() - before
        dist.barrier()
    assert [place.partition(":")[0] for place in new] == ["0100007F"] * (RANK == 0 and SIZE > 1)


@pytest.mark.skipif(SIZE < 3, reason="groups of two sizes")
def test_groups_of_one_name_in_one_store_differ_in_size(tmp_path: Path) -> None:
    """torch counts groups anew with each default group."""
    store = dist.FileStore(str(told(str(tmp_path))[0]) + "/store", SIZE)
    for ranks in ([0, 1], list(range(SIZE)), [1, 2]):
        with process_group(store=store, rank=RANK, world_size=SIZE):
            group = dist.new_group(ranks)
            if RANK in ranks:
                tensor = torch.ones(1)
                dist.all_reduce(tensor, group=group)
                assert tensor[0] == len(ranks)


@pytest.mark.skipif(SIZE == 1, reason="a rank alone tells nobody")
def test_a_rank_without_descriptors_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with process_group():
        with monkeypatch.context() as patch:
            if RANK == 1:
                patch.setattr(doors, "new_key", short)
            begun_s = time.monotonic()
            with pytest.raises(StartupError, match=r"Too many open files\): raise the limit on open files"):
                dist.new_group()
            assert time.monotonic() - begun_s < 10
        dist.all_reduce(torch.ones(1), group=dist.new_group())


@pytest.mark.skipif(SIZE == 1, reason="alone it meets nobody")
def test_ranks_that_meet_again_have_the_whole_time_for_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_s: list[float] = []
    wait_for = Patience.wait_for

    def used_up(patience: Patience, is_done: Callable[[float], object]) -> bool:
        limits_s.append(patience.left_s)
        try:
            return wait_for(patience, is_done)
        finally:
            patience.left_s -= 1.0

    monkeypatch.setattr(Patience, "wait_for", used_up)
    for _ in range(2):
        with process_group():
            dist.barrier()
    start_s, half = Config.from_env().start_timeout_s, len(limits_s) // 2
    assert limits_s[:half].count(start_s) == limits_s[half:].count(start_s) > 0


def test_what_goes_past_the_caches_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_exchange, "_STREAMED_BYTES", 0)
    with process_group():
        for numel in SIZES:
            tensor, block = of_rank(RANK, numel, torch.uint8), torch.empty(SIZE * numel, dtype=torch.uint8)
            dist.all_gather_into_tensor(block, tensor)
            assert torch.equal(block, torch.cat([of_rank(rank, numel, torch.uint8) for rank in range(SIZE)])), numel
            dist.all_to_all_single(block, torch.full_like(block, RANK))
            assert torch.equal(block, torch.arange(SIZE, dtype=torch.uint8).repeat_interleave(numel)), numel
            dist.broadcast(tensor, LAST)
            assert torch.equal(tensor, of_rank(LAST, numel, torch.uint8)), numel


@pytest.mark.parametrize("reads_memory", [True, False])
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_messages(nodes: tuple[int, ...], reads_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reads_memory:  # as where the system forbids it
        monkeypatch.setattr(doors, "reaches", lambda *_: False)
    with process_group(nodes):
        after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        for numel in (0, 1, 300_000):  # more than sockets hold: ranks that all send first wait for nobody
            dist.isend(of_rank(RANK, numel), after).wait()
            tensor = torch.empty(numel)
            dist.recv(tensor, before)
            assert torch.equal(tensor, of_rank(before, numel))
        for tag in (1, 2):
            dist.isend(torch.full((2,), float(tag)), after, tag=tag)
        for tag in (2, 1):
            tensor = torch.empty(2)
            dist.recv(tensor, before, tag=tag)
            assert tensor[0] == tag
        if RANK != 0:
            dist.send(torch.full((3,), float(RANK)), 0, tag=5)
        else:
            found = {}
            for _ in range(SIZE - 1):
                tensor = torch.empty(3)
                source = dist.recv(tensor, tag=5)
                found[source] = float(tensor[0])
            assert found == {rank: float(rank) for rank in range(1, SIZE)}
        received = torch.empty(2)
        pair = [
            dist.P2POp(dist.isend, torch.full((2,), float(RANK)), after),
            dist.P2POp(dist.irecv, received, before),
        ]
        for work in dist.batch_isend_irecv(pair) if SIZE > 1 else ():
            work.wait()
        assert SIZE == 1 or received[0] == before
        large = of_rank(RANK, 300_000)
        works = dist.isend(large, after), dist.irecv(found := torch.empty(300_000), before)
        while not all(work.is_completed() for work in works):  # nobody waits
            time.sleep(1e-3)
        assert torch.equal(found, of_rank(before, 300_000))
        dist.isend(torch.ones(4), after, tag=6)
        with pytest.raises(ValueError, match="has sent 16 bytes, and the tensor for them has 12"):
            dist.recv(torch.empty(3), before, tag=6)


@pytest.mark.skipif(SIZE == 1, reason="nobody leaves")
@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.7 and later tell groups that they end")
def test_who_has_left_is_named() -> None:
    with process_group():
        group = dist.new_group(range(SIZE))
        dist.barrier(group)
        work = None if RANK == LAST else dist.irecv(torch.ones(3), LAST, group=group)
        told(None)
        if work is not None:
            work.wait()
        else:
            for rank in range(LAST):
                dist.send(torch.ones(3), rank, group=group)
            dist.destroy_process_group(group)
        told(None)
        if RANK != LAST:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=f"rank {LAST} has left"):
                    dist.recv(torch.ones(3), LAST, group=group)
            with pytest.raises(RuntimeError, match=f"rank {LAST} left the group"):
                dist.all_reduce(torch.ones(3), group=group)
        told(None)
        dist.barrier()


@pytest.mark.skipif(SIZE == 1, reason="nobody leaves")
@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.7 and later tell groups that they end")
def test_all_that_have_left_are_named() -> None:
    with process_group():
        group = dist.new_group(range(SIZE))
        if RANK:
            dist.destroy_process_group(group)
        told(None)
        if RANK == 0:
            with pytest.raises(RuntimeError, match=f"{rank_list(range(1, SIZE))} left the group"):
                dist.all_reduce(torch.ones(3), group=group)
        told(None)


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_parts_of_a_group(nodes: tuple[int, ...]) -> None:
    with process_group(nodes) as group:
        for ranks in ([LAST], [LAST, 0] if SIZE > 1 else [0], range(SIZE), range(SIZE)):
            part = group.split_group(ranks, timeout=timedelta(seconds=20), group_desc="some")
            assert (part is None) == (RANK not in ranks)
            if part is not None:
                assert (part.rank(), part.size(), part.group_desc) == (sorted(ranks).index(RANK), len(ranks), "some")
                tensor = torch.full((3,), RANK + 1.0)
                part.allreduce([tensor]).wait()
                assert torch.equal(tensor, torch.full((3,), sum(rank + 1.0 for rank in ranks)))
                part.shutdown()
        for wrong in ([], [SIZE], [0, 0]):
            with pytest.raises(ValueError, match="are no distinct ranks below"):
                group.split_group(wrong)
        with pytest.raises(ValueError, match="not of .*meta"):
            group.split_group([RANK], device_types=[torch.device("meta")])


@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="torch.accelerator is there from torch 2.6 on")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_torch_splits_groups_where_there_are_gpus(nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the backend of the GPU to which init_process_group has bound the rank."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    parts = [[*range(SIZE // 2)], [*range(SIZE // 2, SIZE)]] if SIZE > 1 else [[0]]
    own = next(part for part in parts if RANK in part)
    with process_group(nodes, device_id=gpu) as group:
        assert group.bound_device_id == gpu
        part = dist.split_group(split_ranks=parts)
        assert part is not None
        assert dist.get_process_group_ranks(part) == own
        tensor = torch.full((3,), float(RANK))
        dist.all_reduce(tensor, group=part)
        assert tensor[0] == sum(own)
        of_one = dist.split_group(split_ranks=[[0]])
        assert (of_one in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (RANK != 0)  # either, by the version of torch
        assert dist.new_group([0]) is not None
        # Of hvdlite's no other backend's group can be split, as NCCL's would be.
        assert dist.distributed_c10d._get_split_source(group) is None
        mesh = dist.init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("across", "inside"))
        assert mesh.get_group("inside").size() == SIZE
        dist.destroy_process_group(part)
        dist.barrier()


@pytest.mark.parametrize("hvdlite_first", [True, False])
def test_beside_hvdlite(hvdlite_first: bool) -> None:
    with beside_hvdlite(hvdlite_first=hvdlite_first):
        assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
        upper = dist.new_group(range(SIZE // 2, SIZE))
        members = hvd.ProcessSet.from_group(upper)
        assert (members is not None) == (RANK >= SIZE // 2)
        works = dist.all_reduce(torch.ones(100), async_op=True), hvd.allreduce_async(torch.ones(100), op=hvd.Sum)
        works[0].wait()
        assert hvd.synchronize(works[1])[0] == SIZE
        if members is not None:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=members)[0] == SIZE - SIZE // 2
            assert members.process_group() is upper
        everybody = hvd.global_process_set.process_group()
        assert hvd.global_process_set.process_group() is everybody
        assert hvd.global_process_set.process_group(group_desc="another") is not everybody
        some = hvd.ProcessSet([0]).process_group()
        assert (some is None) == (RANK != 0)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=everybody)
        assert tensor[0] == SIZE


@pytest.mark.parametrize("hvdlite_ends_first", [True, False])
def test_either_may_end_first(hvdlite_ends_first: bool) -> None:
    tensor = torch.ones(10)
    hvd.init()
    try:
        with process_group():
            if hvdlite_ends_first:
                hvd.shutdown()
                dist.all_reduce(tensor)
                assert tensor[0] == SIZE
        if not hvdlite_ends_first:
            assert hvd.allreduce(tensor, op=hvd.Sum)[0] == SIZE
    finally:
        hvd.shutdown()


def test_a_forked_child_has_no_part_in_it() -> None:
    with process_group():
        tensor = torch.ones(10)
        dist.all_reduce(tensor, async_op=True).wait()
        child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(tensor)
            except ShutDownError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        dist.all_reduce(tensor)
        assert tensor[0] == SIZE**2


def test_nothing_is_left_of_a_group() -> None:
    def used() -> tuple[int, set[str]]:
        gc.collect()
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("hvdlite")}
        return len(os.listdir("/proc/self/fd")), names

    def use() -> None:
        with process_group():
            dist.all_reduce(torch.ones(10), async_op=True).wait()
            work = dist.isend(torch.ones(3), (RANK + 1) % SIZE)
            dist.irecv(torch.empty(3), (RANK - 1) % SIZE).wait()
            work.wait()
            dist.new_group(range(SIZE))

    use()
    before = used()
    for _ in range(3):
        use()
    after = used()
    assert after[1] == before[1]
    assert after[0] <= before[0] + 3, (before, after)  # a store that ends later


@pytest.mark.skipif(SIZE == 1 or mpi.was_imported(), reason="ranks reach one another")
def test_several_nodes_without_mpi_are_refused_with_the_way_out() -> None:
    way_out = "between those hvdlite needs MPI. Start them with `hvdliterun -np"
    with pytest.raises(StartupError, match=way_out), process_group(tuple(range(SIZE))):
        pass
    assert not dist.is_initialized()
