"""Process sets: two models trained side by side, each on half of the ranks, and asked together at the end.

    hvdliterun -np 4 process_sets.py

Each set reduces the gradients of its own model, with an optimizer and at a pace of its own. With one rank there is one
model.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

BATCH, EPOCHS = 64, 10  # images of all ranks of a set in one step

hvd.init()
# Every rank registers every set, in the same order, whether it is a member or not.
sets = [hvd.add_process_set(range(i, hvd.size(), 2)) for i in (0, 1)] if hvd.size() > 1 else [hvd.global_process_set]
mine = next(number for number, members in enumerate(sets) if members.included())
ours = sets[mine]

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train, test = torch.arange(len(images)).split([1400, len(images) - 1400])

torch.manual_seed(mine)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), [torch.nn.ReLU(), torch.nn.Tanh()][mine], torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=ours)
hvd.broadcast_parameters(model.state_dict(), root_rank=ours.ranks[0], process_set=ours)  # ranks are always global ones

for epoch in range(EPOCHS * (1 + mine)):  # the second model takes twice as long, and the first does not wait for it
    order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
    for batch in order.split(BATCH):
        own = batch[ours.rank() :: ours.size()]
        optimizer.zero_grad()
        cross_entropy(model(images[own]), labels[own]).backward()
        optimizer.step()

with torch.no_grad():
    votes = model(images[test]).softmax(dim=1)
# A part of the job for all ranks: the first rank of each set has the votes of its model.
votes_of_all = [hvd.broadcast(votes, root_rank=members.ranks[0]) for members in sets]
accuracies = [(v.argmax(dim=1) == labels[test]).float().mean().item() for v in [*votes_of_all, sum(votes_of_all)]]
if hvd.rank() == 0:
    for members, accuracy in zip(sets, accuracies, strict=False):
        print(f"the model of ranks {members.ranks}: test accuracy {accuracy:.4f}")
    print(f"together: {accuracies[-1]:.4f}")
