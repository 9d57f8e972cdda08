"""Several models: a generator and a discriminator, each with an optimizer of its own.

    hvdliterun -np 2 several_models.py

The generator learns to make numbers with the mean and the deviation of those that it never sees.
"""

import torch

import hvdlite.torch as hvd

MEAN, DEVIATION, BATCH, STEPS = 1.0, 0.5, 512, 400  # BATCH: of each rank

hvd.init()
torch.manual_seed(hvd.rank())  # every rank draws numbers of its own
generator = torch.nn.Linear(1, 1)
discriminator = torch.nn.Linear(2, 1, bias=False)
generator_optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(generator.parameters(), lr=0.1), generator.named_parameters(prefix="generator")
)
discriminator_optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(discriminator.parameters(), lr=0.5, weight_decay=0.5),
    discriminator.named_parameters(prefix="discriminator"),
)
for model in (generator, discriminator):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def judge(numbers):
    """How real they look on average."""
    return discriminator(torch.cat([numbers, numbers**2], dim=1)).mean()


for _ in range(STEPS):
    real = torch.randn(BATCH, 1) * DEVIATION + MEAN
    discriminator_optimizer.zero_grad()
    (judge(generator(torch.randn(BATCH, 1)).detach()) - judge(real)).backward()
    discriminator_optimizer.step()

    # The generator's loss goes through the discriminator, whose gradients nobody wants: they would travel, and its
    # next zero_grad() would find them on their way.
    discriminator.requires_grad_(False)
    generator_optimizer.zero_grad()
    (-judge(generator(torch.randn(BATCH, 1)))).backward()
    generator_optimizer.step()
    discriminator.requires_grad_(True)

if hvd.rank() == 0:
    mean, deviation = generator.bias.item(), abs(generator.weight.item())
    print(f"mean {mean:.2f} of {MEAN}, deviation {deviation:.2f} of {DEVIATION}, with {hvd.size()} rank(s)")
