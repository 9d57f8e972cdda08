"""FSDP2 over hvdlite on tensors of a simulated GPU, against the same on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_distributed import taken_for_the_cpu
from cuda_lab import simulated
from cuda_torch import TorchOnGpu
from distributed_lab import RANK, SIZE, net, process_group, trained
from hvdlite.distributed.device_site import DeviceSite

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("fully_shard is public from torch 2.6 on", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks]


def shards() -> list[torch.Tensor]:
    """Of a model that was trained, those of this rank."""
    model = net()
    for layer in (model[0], model[3], model):
        fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (SIZE,)))
    trained(model, lambda tensor: tensor)
    return [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.skipif(SIZE == 1, reason="nobody to shard with")
def test_is_that_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    begin = DeviceSite.work

    def noted(site: DeviceSite, run: Any, result: Any, title: str, limit_s: Any) -> Any:
        begun.append(title)
        return begin(site, run, result, title, limit_s)

    monkeypatch.setattr(DeviceSite, "work", noted)
    gpu = TorchOnGpu(simulated(), seed=RANK, late=0.1)
    with process_group():
        on_host = shards()
        assert not begun
        with taken_for_the_cpu(gpu, monkeypatch):
            on_device = shards()
            assert {"hvdlite:_all_gather_base", "hvdlite:_reduce_scatter_base"} <= {*begun}
            assert all(map(gpu.has, on_device))
            assert all(map(torch.equal, map(gpu.to_host, on_device), on_host))
