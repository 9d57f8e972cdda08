"""Uneven data: ranks that run out of batches join(), and the others go on.

    hvdliterun -np 2 uneven_data.py

Every example counts the same here, on whichever rank it is: gradients of sums of losses are added up, and divided by
the number of examples, to which ranks that have joined add nothing.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

BATCH, EPOCHS = 32, 10  # images of one rank in one step

hvd.init()
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
# Rank 1 has twice, rank 2 three times as many images as rank 0.
parts = hvd.size() * (hvd.size() + 1) // 2
first, last = (len(images) * r * (r + 1) // 2 // parts for r in (hvd.rank(), hvd.rank() + 1))
own_images, own_labels = images[first:last], labels[first:last]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

steps = 0
for _ in range(EPOCHS):
    for x, y in zip(own_images.split(BATCH), own_labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y, reduction="sum").backward()
        examples = hvd.allreduce(torch.tensor(len(x)), op=hvd.Sum, name="examples")
        optimizer.synchronize()
        for parameter in model.parameters():
            parameter.grad /= examples
        with optimizer.skip_synchronize():
            optimizer.step()
        steps += 1
    # Ranks that have joined take no steps. Whoever joined last took all of them, and hands out what has come of it.
    last_rank = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last_rank)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last_rank)

accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
everywhere = hvd.allgather_object((len(own_images), steps))
if hvd.rank() == 0:
    for rank, (count, taken) in enumerate(everywhere):
        print(f"rank {rank}: {count} images, {taken} steps")
    print(f"accuracy {accuracy:.4f}")
