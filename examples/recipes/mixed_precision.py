"""Mixed precision: bfloat16 with autocast alone, float16 with autocast and a GradScaler, here with clipping as well.

    hvdliterun -np 2 mixed_precision.py

Parameters and gradients stay float32. All ranks skip a step in which one of them had an overflow, so their scales and
parameters stay alike.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

BATCH, EPOCHS = 64, 10  # images of all ranks in one step

hvd.init()
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)


def batches():
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            own = batch[hvd.rank() :: hvd.size()]
            yield images[own], labels[own]


def new_model(**arguments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)


# bfloat16 has float32's range and needs no scaling. Compression is apart from it: gradients travel in 16 bits.
model, optimizer = new_model(compression=hvd.Compression.bf16)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()

# float16 needs a scaler. This one begins too high, so that the first steps overflow and are skipped.
half_model, optimizer = new_model()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = cross_entropy(half_model(x), y)
    scaler.scale(loss).backward()
    optimizer.synchronize()  # the gradients of all ranks, scaled
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(half_model.parameters(), 5.0)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)  # without clipping this line alone, outside of skip_synchronize(), is enough
    scaler.update()

for name, trained in [("bfloat16", model), ("float16", half_model)]:
    accuracy = (trained(images).argmax(dim=1) == labels).float().mean().item()
    if hvd.rank() == 0:
        print(f"{name}: accuracy {accuracy:.4f} with {hvd.size()} rank(s)")
scales = hvd.allgather_object(scaler.get_scale())
if hvd.rank() == 0:
    print(f"the scale came down from 2^28 to {scales} on the ranks")
