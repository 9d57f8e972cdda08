"""Process groups over hvdlite that have another backend for another device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake", which does nothing

from distributed_lab import RANK, SIZE, process_group
from hvdlite.distributed.devices import OtherDevices
from hvdlite.distributed.work import GroupWork

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]
META = torch.device("meta")
BOTH = "cpu:hvdlite,meta:fake"


class Asked:
    """Stands for the group of another backend, the backend, and its works: notes what is asked of them, in order."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait(self) -> bool:
        return True

    def _get_backend(self, device: torch.device) -> Asked:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.calls.append(name) or self


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(OtherDevices, "_made", lambda self, device, name: asked)
    return asked


def test_each_device_has_its_backend() -> None:
    with process_group(backend=BOTH):
        dist.all_reduce(torch.ones(3, device=META))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == SIZE
        with dist._coalescing_manager(device=META, async_ops=True) as manager:
            dist.broadcast(torch.ones(3, device=META), 0)
        manager.wait()
        assert not isinstance(manager.works[0], GroupWork)
    with process_group(), pytest.raises(ValueError, match="is on meta, and hvdlite has those of the host and of CUDA"):
        dist.all_reduce(torch.ones(3, device=META))


def test_coalesced_calls_are_waited_for_by_the_backend_that_has_them(other: Asked) -> None:
    with process_group(backend=BOTH):
        with dist._coalescing_manager(device=META, async_ops=True) as manager:
            dist.broadcast(torch.ones(3, device=META), 0)
        assert manager.works == [other]
        assert other.calls == ["_start_coalescing", "broadcast", "_end_coalescing"]
        tensor = torch.full((3,), float(RANK))
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.broadcast(tensor, SIZE - 1)
        assert tensor[0] == SIZE - 1
        assert len(other.calls) == 3


@pytest.mark.skipif(SIZE == 1, reason="nobody to exchange with")
@pytest.mark.parametrize("coalesces", [True, False])
def test_a_batch_of_messages_begins_at_once_where_the_backend_wants_that(other: Asked, coalesces: bool) -> None:
    other.supports_coalescing = coalesces
    peer = (RANK + 1) % SIZE
    with process_group(backend=BOTH):
        tensors = torch.ones(3, device=META), torch.ones(3, device=META)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensors[0], peer), dist.P2POp(dist.irecv, tensors[1], peer)]
        )
        assert {*works} == {other}
        assert other.calls == (
            ["_start_coalescing", "send", "recv", "_end_coalescing"] if coalesces else ["send", "recv"]
        )
        with pytest.raises(ValueError, match="Invalid ``p2p_op_list``"):
            dist.batch_isend_irecv([None])


def test_a_barrier_is_of_the_device_that_it_names(other: Asked) -> None:
    with process_group(backend=BOTH) as group:
        dist.barrier()
        assert other.calls == []
        options = dist.BarrierOptions()
        options.device = META
        assert group.barrier(options) is other
        assert other.calls == ["barrier"]


def test_a_timeout_is_of_all_backends(other: Asked) -> None:
    with process_group(backend=BOTH) as group:
        dist.all_reduce(torch.ones(3, device=META))
        group.set_timeout(timedelta(seconds=20))
        assert other.calls == ["allreduce", "_set_default_timeout"]
        assert group.membership.timeout_s == 20  # type: ignore[attr-defined]
