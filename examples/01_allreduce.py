# python -m hvdlite run -np 2 01_allreduce.py
import torch

import hvdlite.torch as hvd

hvd.init()
mine = torch.tensor([1.0, 10.0, 100.0]) * (hvd.rank() + 1)

total = hvd.allreduce(mine, op=hvd.Sum, name="total")
mean = hvd.allreduce(mine, name="mean")  # the average, unless op says otherwise
rows = hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()), name="rows")  # as many rows as each rank has
word = hvd.broadcast_object(f"hello from rank {hvd.rank()}", root_rank=0)

print(
    f"rank {hvd.rank()} of {hvd.size()}: I have {mine.tolist()}, all have {total.tolist()}, "
    f"on average {mean.tolist()}; rows {rows.tolist()}; {word}"
)
