"""Gradient accumulation: a batch that does not fit into memory, in several backward passes before one step.

    hvdliterun -np 2 accumulation.py

Gradients of the passes are added up, so each loss is divided by the number of passes. There are two ways to say which
pass is the last one, whose gradients travel; they lead to the same parameters.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

BATCH, MICRO_BATCH, EPOCHS = 192, 32, 8  # images: of all ranks in one step, of one rank in one pass

hvd.init()
passes = max(1, BATCH // MICRO_BATCH // hvd.size())  # of each rank: 6 with 1 rank, 3 with 2
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)


def batches():
    """For each step this rank's share of the next BATCH images, in parts of MICRO_BATCH."""
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            own = order[start : start + BATCH][hvd.rank() :: hvd.size()]
            yield [(images[part], labels[part]) for part in own.split(MICRO_BATCH)[:passes]]


def new_model(**arguments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)


# One way: announce how many passes there are.
model, optimizer = new_model(backward_passes_per_step=passes)
for batch in batches():
    optimizer.zero_grad()
    for x, y in batch:
        (cross_entropy(model(x), y) / passes).backward()
    optimizer.step()

# The other: all passes but the last one inside no_sync(), however many they are.
other, optimizer = new_model()
for batch in batches():
    optimizer.zero_grad()
    with optimizer.no_sync():
        for x, y in batch[:-1]:
            (cross_entropy(other(x), y) / passes).backward()
    x, y = batch[-1]
    (cross_entropy(other(x), y) / passes).backward()
    optimizer.step()

accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
difference = max((a - b).abs().max().item() for a, b in zip(model.parameters(), other.parameters(), strict=True))
if hvd.rank() == 0:
    print(f"{hvd.size()} rank(s), {passes} passes of {MICRO_BATCH} images before each step: accuracy {accuracy:.4f},")
    print(f"and the parameters of the two ways differ by {difference:g}")
