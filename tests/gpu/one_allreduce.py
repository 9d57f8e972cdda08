"""One allreduce of tensors on a GPU, small enough for compute-sanitizer: packed, reduced, unpacked."""

from __future__ import annotations

import torch

import hvdlite.torch as hvd

hvd.init()
where = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
torch.cuda.set_device(where)
sizes = [1, 3, 1001, 70_001]
results = hvd.grouped_allreduce([torch.full((numel,), 2.0, device=where) for numel in sizes], op=hvd.Sum)
assert all(bool((result == 2 * hvd.size()).all()) for result in results)
print("right")
