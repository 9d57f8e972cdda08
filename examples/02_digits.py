"""Handwritten digits with a small CNN: what turns a training script for one process into one for many.

    python -m hvdlite run -np 2 02_digits.py

The batch size is that of all ranks together, so any number of ranks takes the same steps and reaches the same accuracy;
more ranks only share the work. Lines marked (hvd) are all that differs from a script for one process.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvdlite.torch as hvd


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8 pixels, which come with scikit-learn; every fifth is for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Each rank counts its share of the images, and the counts are added."""
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in dataset.tensors)
    correct = (model(images).argmax(dim=1) == labels).sum()
    model.train()
    return hvd.allreduce(correct, op=hvd.Sum, name="correct").item() / len(dataset)  # (hvd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together (default: 64)")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()

    hvd.init()  # (hvd)
    # Ranks that share a machine share its cores.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))  # (hvd)
    torch.manual_seed(options.seed + hvd.rank())  # dropout differs from rank to rank, as it does from image to image

    train, test = load_data()
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=options.seed)  # (hvd)
    loader = DataLoader(train, batch_size=max(1, options.batch_size // hvd.size()), sampler=sampler)

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (hvd)

    start = time.perf_counter()
    with tqdm(total=options.epochs * len(loader), disable=hvd.rank() != 0, unit="step", mininterval=1.0) as progress:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)  # (hvd) another order in every epoch
            for images, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                progress.update()
            mean = hvd.allreduce(loss.detach(), name="loss").item()  # (hvd)
            progress.set_postfix(epoch=epoch + 1, loss=f"{mean:.3f}")

    reached = accuracy(model, test)
    if hvd.rank() == 0:  # (hvd)
        seconds = time.perf_counter() - start
        print(f"test accuracy {reached:.4f} on {len(test)} images, after {seconds:.1f} s with {hvd.size()} rank(s)")


if __name__ == "__main__":
    main()
