"""Clipping: the norm that counts is that of the averaged gradients, which synchronize() waits for.

    hvdliterun -np 2 clipping.py

The data have outliers; without clipping each of them would throw the line that is fitted far off its way.
"""

import torch

import hvdlite.torch as hvd

BATCH, STEPS, LARGEST_NORM = 24, 300, 1.0  # BATCH: points of all ranks in one step

hvd.init()
generator = torch.Generator().manual_seed(0)  # the same points on every rank
x = torch.rand(STEPS, BATCH, 1, generator=generator) * 2 - 1
y = 3 * x + 1
y[torch.rand(y.shape, generator=generator) < 0.01] = 1000.0

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

norms = []
for step in range(STEPS):
    own = slice(hvd.rank(), None, hvd.size())
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x[step, own]), y[step, own]).backward()
    optimizer.synchronize()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM).item())
    with optimizer.skip_synchronize():
        optimizer.step()

if hvd.rank() == 0:
    clipped = sum(norm > LARGEST_NORM for norm in norms)
    print(f"{clipped} of {STEPS} gradients were clipped, the largest had the norm {max(norms):.1f};", end=" ")
    print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f} with {hvd.size()} rank(s)")
