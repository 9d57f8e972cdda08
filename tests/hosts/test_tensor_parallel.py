"""Tensor parallelism within each of two hosts, data parallelism across; and a team over both hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lab import Lab
from launching import on_one_mpi

Hosts = Callable[..., Lab]

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "mpi")!r})
import torch
import hvdlite.tensor_parallel as tp, hvdlite.torch as hvd
from hvdlite.errors import UsageError
from hvdlite.tensor_parallel.shared_meeting import SharedMeeting
from tensor_parallel_lab import Transformer, batch, close

hvd.init()
torch.set_num_threads(1)
grid = tp.init(2)
assert isinstance(grid.tp.meeting, SharedMeeting) and hvd.local_size() == 2
torch.manual_seed(0)
alone = Transformer().double()
torch.manual_seed(0)
model = Transformer().double().split(grid.tp, sequence_parallel=True)
sgd = torch.optim.SGD
optimizer = hvd.DistributedOptimizer(
    sgd(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), process_set=grid.dp
)
own = sgd(alone.parameters(), lr=0.1)
for step in range(5):
    own.zero_grad()
    torch.stack([alone(*batch(step, place)) for place in range(2)]).mean().backward()
    own.step()
    optimizer.zero_grad()
    model(*batch(step, grid.dp.rank())).backward()
    optimizer.step()
for name, value in tp.unsplit_state_dict(model).items():
    close(value, alone.state_dict()[name])

for method in ("window", "ring_exchange"):
    try:
        tp.init(4, method=method)
        raise AssertionError("no error")
    except UsageError as error:
        assert f"2 nodes (ranks 0 and 1 on one, ranks 2 and 3 on one), and method='{{method}}' needs" in str(error)
team = tp.init(4).tp
x, weight = torch.arange(32.0).view(8, 4), torch.eye(4)
assert torch.equal(tp.all_gather_matmul(x[2 * team.rank : 2 * team.rank + 2], weight, team), x)
assert torch.equal(tp.matmul_reduce_scatter(x, weight, team), 4 * x[2 * team.rank : 2 * team.rank + 2])
print("all right", flush=True)
hvd.shutdown()
"""


@on_one_mpi("openmpi")
def test_a_grid_over_two_hosts(hosts: Hosts, mpi: str) -> None:
    """Which have one name, as containers do, and a second interface that leads nowhere."""
    lab = hosts(2, same_hostname="worker", dead_interface=True)
    env = {"GLOO_SOCKET_IFNAME": "=eth0"}
    result = lab.launch(SCRIPT, ranks_per_host=[2, 2], mpi=mpi, env=env, timeout=120).check()
    assert result.stdout.count("all right") == 4
    assert result.stderr.count("unfused") == 1, result
