"""Process groups over hvdlite: messages, subgroups, their end, who is late, and what profilers show."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distributed_lab import NODES, RANK, SIZE, of_rank, process_group, told

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
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
def test_messages(nodes: tuple[int, ...]) -> None:
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
        dist.isend(torch.ones(4), after, tag=6)
        with pytest.raises(ValueError, match="has sent 16 bytes, and the tensor for them has 12"):
            dist.recv(torch.empty(3), before, tag=6)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
def test_who_is_late_is_named() -> None:
    with process_group(timeout_s=1.0):
        if RANK == LAST:
            told(None)
        else:
            with pytest.raises(RuntimeError, match=f"rank {LAST} did not come within the timeout of 1 s"):
                dist.all_reduce(torch.ones(3))
            told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody leaves")
def test_who_has_left_is_named() -> None:
    with process_group():
        group = dist.new_group(range(SIZE))
        dist.barrier(group)
        if RANK == LAST:
            dist.destroy_process_group(group)
        told(None)
        if RANK != LAST:
            with pytest.raises(RuntimeError, match=f"rank {LAST} has left"):
                dist.recv(torch.ones(3), LAST, group=group)
            with pytest.raises(RuntimeError, match=f"rank {LAST} has left the group"):
                dist.all_reduce(torch.ones(3), group=group)
        told(None)
        dist.barrier()


def test_profilers_show_calls() -> None:
    with process_group():
        with torch.profiler.profile() as profile:
            dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(3), 0, async_op=True).wait()
            dist.barrier()
        names = [event.name for event in profile.events()]
        assert {"hvdlite:all_reduce", "hvdlite:broadcast", "hvdlite:barrier"} <= set(names)


def test_other_devices_have_other_backends() -> None:
    import torch.testing._internal.distributed.fake_pg

    assert torch.testing._internal.distributed.fake_pg  # registers "fake", which does nothing
    with process_group(backend="cpu:hvdlite,meta:fake"):
        dist.all_reduce(torch.ones(3, device="meta"))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == SIZE
    with process_group(), pytest.raises(ValueError, match="the tensor is on meta, and hvdlite has those of the host"):
        dist.all_reduce(torch.ones(3, device="meta"))
