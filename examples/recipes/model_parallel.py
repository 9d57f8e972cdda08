"""Model parallelism: each pair of ranks holds one model, half of the hidden layer each; pairs share the data.

    hvdliterun -np 4 model_parallel.py

With an odd number of ranks every rank holds a whole model. Where batches divide among the pairs, the result is that of
one process with the whole model and the whole batch.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, linear, relu

import hvdlite.torch as hvd

BATCH, HIDDEN, EPOCHS = 64, 64, 5  # images of all ranks in one step

hvd.init()
parts = 2 if hvd.size() % 2 == 0 else 1


def process_set(ranks):
    return hvd.global_process_set if len(ranks) == hvd.size() else hvd.add_process_set(ranks)


# Every rank registers every set, in the same order: those that hold a model together, those with the same part of it.
holders = [process_set(range(first, first + parts)) for first in range(0, hvd.size(), parts)]
replicas = [process_set(range(part, hvd.size(), parts)) for part in range(parts)]
pair, part = hvd.rank() // parts, hvd.rank() % parts

torch.manual_seed(0)  # the same whole model on every rank, which keeps its part
half = slice(part * HIDDEN // parts, (part + 1) * HIDDEN // parts)
inner = torch.nn.Parameter(torch.nn.init.kaiming_uniform_(torch.empty(HIDDEN, 64), 5**0.5)[half].clone())
outer = torch.nn.Parameter(torch.nn.init.kaiming_uniform_(torch.empty(10, HIDDEN), 5**0.5)[:, half].clone())
optimizer = torch.optim.AdamW([inner, outer], lr=5e-3)
named = [("inner", inner), ("outer", outer)]
optimizer = hvd.DistributedOptimizer(optimizer, named, process_set=replicas[part])


def model(x):
    """Each rank of a pair adds what its hidden units have to say."""
    return hvd.allreduce(linear(relu(linear(x, inner)), outer), op=hvd.Sum, process_set=holders[pair])


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
for epoch in range(EPOCHS):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order[: -(len(order) % BATCH)].split(BATCH):
        own = batch[pair :: len(holders)]
        optimizer.zero_grad()
        # The gradient of a sum over ranks is the sum of what they send back: both count the same loss, so half of it.
        (cross_entropy(model(images[own]), labels[own]) / parts).backward()
        optimizer.step()

with torch.no_grad():
    own = slice(pair, None, len(holders))
    correct = (model(images[own]).argmax(dim=1) == labels[own]).sum()
    accuracy = hvd.allreduce(correct, op=hvd.Sum).item() / parts / len(images)  # every rank of a pair has counted
if hvd.rank() == 0:
    print(f"{hvd.size()} rank(s), {inner.numel() + outer.numel()} parameters on each: accuracy {accuracy:.4f}")
