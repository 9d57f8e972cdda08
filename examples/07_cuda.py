"""A small convolutional network on GPUs, in 16 bits where that is enough: what a script for GPUs adds to one for CPUs.

    python -m hvdlite run -np 4 07_cuda.py

Any number of ranks works on any number of GPUs; ranks that share one take turns. Without a GPU it says so, and ends.
The lines marked (gpu) are all that differs from a script for CPUs.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

CLASSES = 10


def new_batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of noise, each with a square of its class's size in the middle; the same for the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (rows,), generator=generator)
    images = torch.randn(rows, 1, 32, 32, generator=generator)
    distance = (torch.arange(32) - 15.5).abs()
    inside = torch.maximum(distance[:, None], distance[None]) < classes[:, None, None] + 2
    return images + inside[:, None].float(), classes


def build_model() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, CLASSES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=256, help="of a rank (default: %(default)s)")
    options = parser.parse_args()

    hvd.init()
    if not torch.cuda.is_available():
        if hvd.rank() == 0:
            print("torch sees no GPU here, so there is nothing to show")
        sys.exit()
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())  # (gpu)
    torch.cuda.set_device(device)  # (gpu) before the first tensor is made

    torch.manual_seed(0)
    model = build_model().to(device)  # (gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler("cuda")  # (gpu) keeps gradients in the range of float16

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        images, classes = new_batch(options.batch_size, seed=step * hvd.size() + hvd.rank())
        images, classes = images.to(device), classes.to(device)  # (gpu)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):  # (gpu)
            loss = cross_entropy(model(images), classes)
        scaler.scale(loss).backward()  # (gpu)
        scaler.step(optimizer)  # (gpu) waits for the gradients of all ranks, on the GPU's stream
        scaler.update()  # (gpu)
        if step % 50 == 0 or step == options.steps:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step} of {options.steps}, loss {mean:.3f}")

    images, classes = (tensor.to(device) for tensor in new_batch(1000, seed=hvd.rank() - hvd.size()))
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        right = (model(images).argmax(dim=1) == classes).float().mean()
    accuracy = hvd.allreduce(right, name="accuracy").item()
    if hvd.rank() == 0:
        seconds = time.perf_counter() - start
        gpus = f"{min(hvd.local_size(), torch.cuda.device_count())} GPU(s) of a node"
        print(f"accuracy {accuracy:.4f} on images it has not seen, {seconds:.1f} s with {hvd.size()} rank(s) on {gpus}")


if __name__ == "__main__":
    main()
