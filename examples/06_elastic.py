"""Handwritten digits, while ranks die: the others go on, and the accuracy is the same.

    python -m hvdlite run --elastic -np 3 06_elastic.py

The last rank kills itself at step 60. The others notice, go back to their last commit, and go on at once; a new process
takes the place of the dead one, and joins them at a later commit. Lines marked (elastic) are all that differs from a
script whose ranks must all live.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd

COMMIT_EVERY = 5  # steps: what a failure costs at most


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8 pixels, which come with scikit-learn; every fifth is for the test."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together (default: 64)")
    parser.add_argument("--kill-at", type=int, default=60, metavar="STEP", help="0: nobody dies (default: 60)")
    options = parser.parse_args()
    if 0 < options.kill_at < COMMIT_EVERY:  # without a commit all would begin anew, and die one after the other
        parser.error(f"--kill-at {options.kill_at}: nothing is committed before step {COMMIT_EVERY}")

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = load_data()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # What must not be lost. Whatever else a step needs has to follow from it. (elastic)
    sampler = hvd.elastic.ElasticSampler(train_set)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)

    @hvd.elastic.run  # (elastic) gives all ranks the same state, and calls the function again after a failure
    def train(state: hvd.elastic.TorchState) -> None:
        is_first_time = state.step == 0
        print(f"rank {hvd.rank()} of {hvd.size()} starts at step {state.step}", flush=True)
        while state.epoch < options.epochs:
            batch_size = max(1, options.batch_size // hvd.size())
            for number, (images, labels) in enumerate(DataLoader(train_set, batch_size, sampler=sampler)):
                optimizer.zero_grad()
                cross_entropy(model(images), labels).backward()
                if is_first_time and 0 < state.step == options.kill_at and hvd.rank() == hvd.size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                sampler.record_batch(number, batch_size)  # (elastic) or else it is trained on again
                state.step += 1
                if state.step % COMMIT_EVERY == 0:
                    state.commit()  # (elastic)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    images, labels = test_set.tensors
    with torch.no_grad():
        reached = (model(images).argmax(dim=1) == labels).float().mean().item()
    if hvd.rank() == 0:
        print(f"test accuracy {reached:.4f} after {state.step} steps, in the end with {hvd.size()} rank(s)")


if __name__ == "__main__":
    main()
