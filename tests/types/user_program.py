"""What a type checker makes of a program of a user; checked by pyright, see tests/run.py lint. Not run."""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import assert_type

import hvdlite.torch as hvd

hvd.init()
assert_type(hvd.rank(), int)
dataset = TensorDataset(torch.ones(8, 1))
sampler = hvd.sampler(dataset, shuffle=False)
assert_type(sampler, DistributedSampler[Any])
sampler.set_epoch(1)
loader = DataLoader(dataset, batch_size=2, sampler=sampler)

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
distributed = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
assert_type(distributed, hvd.DistributedOptimizer)
as_optimizer: torch.optim.Optimizer = distributed
torch.optim.lr_scheduler.StepLR(distributed, 1)
distributed.zero_grad(set_to_none=True)
distributed.synchronize()
with distributed.skip_synchronize():
    distributed.step()
with distributed.no_sync():
    pass

tensor = torch.ones(2)
assert_type(hvd.alltoall(tensor), torch.Tensor)
assert_type(hvd.alltoall(tensor, tensor), tuple[torch.Tensor, torch.Tensor])
assert_type(hvd.alltoall(tensor, name="x", splits=tensor), tuple[torch.Tensor, torch.Tensor])
assert_type(hvd.synchronize(hvd.alltoall_async(tensor)), tuple[torch.Tensor, torch.Tensor])
assert_type(hvd.synchronize(hvd.alltoall_async(tensor, tensor)), tuple[torch.Tensor, torch.Tensor])
assert_type(hvd.allreduce(tensor, op=hvd.Average), torch.Tensor)
assert_type(hvd.allreduce_async_(tensor), hvd.Handle[torch.Tensor])
assert_type(hvd.grouped_allreduce([tensor]), list[torch.Tensor])
assert_type(hvd.synchronize(hvd.allgather_async(tensor)), torch.Tensor)
assert_type(hvd.broadcast(tensor, root_rank=0), torch.Tensor)
assert_type(hvd.reducescatter(tensor), torch.Tensor)
assert_type(hvd.allgather_object(1), list[Any])
assert_type(hvd.join(), int)
assert_type(hvd.statistics(), dict[str, int])
