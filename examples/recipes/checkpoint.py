"""Checkpoints: rank 0 writes and reads them, the others get what rank 0 has.

    hvdliterun -np 2 checkpoint.py --file digits.pt --epochs 3
    hvdliterun -np 2 checkpoint.py --file digits.pt --epochs 6    # goes on with epoch 3

The second command ends with the parameters that 6 epochs at once would have led to.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--file", help="default: none is written")
parser.add_argument("--epochs", type=int, default=6)
options = parser.parse_args()

hvd.init()
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
dataset = TensorDataset(images, labels)
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

progress = {"epoch": 0}
if hvd.rank() == 0 and options.file and os.path.exists(options.file):
    checkpoint = torch.load(options.file, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    progress = {"epoch": checkpoint["epoch"], "scheduler": checkpoint["scheduler"]}
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
progress = hvd.broadcast_object(progress, root_rank=0)
if "scheduler" in progress:
    scheduler.load_state_dict(progress["scheduler"])

for epoch in range(progress["epoch"], options.epochs):
    sampler.set_epoch(epoch)  # the order of an epoch depends on its number only
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    if hvd.rank() == 0 and options.file:
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict()}, options.file + ".partial")
        os.replace(options.file + ".partial", options.file)  # whoever is killed meanwhile leaves the one before

accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
if hvd.rank() == 0:
    print(f"epochs {progress['epoch']} to {options.epochs} with {hvd.size()} rank(s): accuracy {accuracy:.4f}")
