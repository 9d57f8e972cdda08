"""Learning rate: N ranks with the same batch each take N times larger steps, after a warm-up.

    hvdliterun -np 2 learning_rate.py

An epoch has N times fewer steps then. (Or divide the batch by N, as examples/02_digits.py does; then nothing changes.)
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

BATCH, EPOCHS, WARMUP_EPOCHS = 32, 15, 3  # images of each rank in one step
BASE_LR = 0.05  # good for one rank

hvd.init()
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
dataset = TensorDataset(images, labels)
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
loader = DataLoader(dataset, BATCH, sampler=sampler)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def share_of_the_rate(step):
    """From that of one rank to that of all, linearly."""
    progress = min(1.0, step / (WARMUP_EPOCHS * len(loader)))
    return (1 + (hvd.size() - 1) * progress) / hvd.size()


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_the_rate)
rates = []
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()

accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
if hvd.rank() == 0:
    print(f"{len(rates)} steps, at a rate of {rates[0]:g} first and {rates[-1]:g} at last:", end=" ")
    print(f"accuracy {accuracy:.4f} with {hvd.size()} rank(s)")
