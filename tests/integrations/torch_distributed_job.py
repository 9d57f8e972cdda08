"""Launched by test_torch_distributed.py under torchrun: trains with Accelerate or Lightning over the process group that
the first argument names, and prints the weights as JSON.

torch_distributed_job.py BACKEND accelerate|lightning
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

import hvdlite.distributed  # noqa: F401 (registers the backend)
from small_problem import Rows, flat, loss_of, network

EPOCHS = 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def accelerate(backend: str) -> list[float]:
    """On CPUs Accelerate takes the process group that is there, and makes one over Gloo if there is none."""
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network(dist.get_rank())  # only rank 0's counts
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, sgd(model.parameters()), loader)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    seen = accelerator.gather_for_metrics(torch.full((1,), dist.get_rank()))
    assert seen.tolist() == [*range(dist.get_world_size())]
    return flat(accelerator.unwrap_model(model))


def lightning(backend: str) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

    module = Module()
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend=backend),
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        gradient_clip_val=0.1,
        barebones=True,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=4))
    return flat(module.net)


backend, library = sys.argv[1:]
weights = {"accelerate": accelerate, "lightning": lightning}[library](backend)
assert dist.get_backend() == backend
if dist.get_rank() == 0:
    print("RESULTS", json.dumps(weights), flush=True)
dist.destroy_process_group()
