"""What people combine with data-parallel training in torch: n ranks train what one process trains with all data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvdlite.torch as hvd
from torch_lab import LINEAR, rank_input

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.not_with_three_ranks,
    pytest.mark.up_to_three_ranks,
    pytest.mark.usefixtures("running"),
]

alone_is_torch = pytest.mark.not_with_one_rank  # an optimizer of one rank leaves gradients to torch

STEPS = 4
BATCH = 3  # per rank

Forward = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.block = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.Tanh())
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.block(self.conv(x).sin()).mean((2, 3)))
        return result


class Checkpointed(Net):
    """Computes its block a second time, in backward."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(
            checkpoint(self.block, self.conv(x).sin(), use_reentrant=self.use_reentrant).mean((2, 3))
        )
        return result


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    """(ranks, BATCH, 2, 4, 4); any rank can build it."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(hvd.size(), BATCH, 2, 4, 4, generator=generator, dtype=torch.float64).to(dtype)


def plain_loss(model: Forward, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).cos().mean()
    return result


def train(
    model: torch.nn.Module, loss: Loss, batches: list[torch.Tensor], together: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(weights, losses of all data)."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if together:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        value = value.detach().double()
        losses.append((hvd.allreduce(value) if together else value).item())
    return {name: value.detach().clone() for name, value in model.named_parameters()}, losses


def compare(
    model: torch.nn.Module,
    loss: Loss = plain_loss,
    adapt: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    tolerance: float = 1e-10,
) -> None:
    """``model`` on all ranks, against a copy of it in one process."""
    dtype = next(model.parameters()).dtype
    batches = [batch(step, dtype) for step in range(STEPS)]
    alone = copy.deepcopy(model)
    weights, losses = train(model, loss, [adapt(x[hvd.rank()]) for x in batches], True)
    expected, expected_losses = train(alone, loss, [adapt(x.flatten(0, 1)) for x in batches], False)
    assert losses == pytest.approx(expected_losses, rel=tolerance, abs=tolerance)
    assert losses[-1] < losses[0]
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)
    everywhere = hvd.allgather_object(weights)
    assert all(torch.equal(other[name], value) for other in everywhere for name, value in weights.items())


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(5)
    return kind().double()


def test_without_any() -> None:
    compare(net())


@alone_is_torch
@pytest.mark.time_limit(180)  # most of it imports the compiler, which a busy machine does slowly
def test_compile() -> None:
    """The optimizer has the parameters of the plain model; one process trains it as it is."""
    model = net()
    compiled = _compiled(model)
    compare(model, lambda trained, x: plain_loss(compiled if trained is model else trained, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's own making, between two graphs
def test_compile_with_synchronized_batch_normalization() -> None:
    """Which communicates in the middle of what is compiled."""
    model = net()
    model.block.append(torch.nn.BatchNorm2d(4).double())
    hvd.convert_sync_batchnorm(model)
    alone = copy.deepcopy(model)
    alone.block[2] = torch.nn.BatchNorm2d(4).double()
    x = batch(0, torch.float64)
    own, whole = x[hvd.rank()].clone().requires_grad_(), x.flatten(0, 1).requires_grad_()
    _compiled(model)(own).square().sum().backward()
    alone(whole).square().sum().backward()
    assert own.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(own.grad, whole.grad.unflatten(0, x.shape[:2])[hvd.rank()], rtol=1e-10, atol=1e-10)


@alone_is_torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch's optimizers import
def test_compile_the_step() -> None:
    """Gradients are reduced between two graphs, and nothing of that is traced."""
    weights = []
    for compiles in (True, False):
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
        step = _compiled(optimizer.step) if compiles else optimizer.step
        for number in range(STEPS):
            optimizer.zero_grad()
            plain_loss(model, batch(number, torch.float64)[hvd.rank()]).backward()
            step()
        weights.append(dict(model.named_parameters()))
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch's optimizers import
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's own making, between two graphs
def test_compile_a_whole_step() -> None:
    """With backward, whose hooks and gradients communicate."""
    weights = []
    for compiles in (True, False):
        model = net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), groups=2)

        def train(own: torch.Tensor, model: Net = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            hvd.allreduce(plain_loss(model, own), name="loss").backward()
            optimizer.step()

        step = _compiled(train) if compiles else train
        for number in range(STEPS):
            step(batch(number, torch.float64)[hvd.rank()])
        weights.append(dict(model.named_parameters()))
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


def _gather(x: torch.Tensor) -> torch.Tensor:
    return hvd.allgather(x).sum() + x


def _exchange(x: torch.Tensor) -> torch.Tensor:
    return hvd.alltoall(x.repeat(hvd.size())).sum() + x


def _know_all(x: torch.Tensor) -> torch.Tensor:
    return "".join(hvd.allgather_object("word" * len(x))).count("word") + x


def _add_sparse(x: torch.Tensor) -> torch.Tensor:
    return hvd.sparse_allreduce_async(x.to_sparse(), None, hvd.Sum)().to_dense() + x


def _wait(x: torch.Tensor) -> torch.Tensor:
    return hvd.synchronize(hvd.reducescatter_async(x.repeat(hvd.size()), op=hvd.Sum)) + x


@pytest.mark.parametrize("function", [_gather, _exchange, _know_all, _add_sparse, _wait])
def test_compile_operations(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of other sizes each time."""
    compiled = _compiled(function)
    for rows in (3, 4, 6, 5):
        x = torch.full((rows,), hvd.rank() + 1.0)
        assert torch.equal(compiled(x), function(x))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By a backend that needs no compiler of another language."""
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, backend="aot_eager")
    try:
        torch.compile(torch.nn.Identity(), backend="aot_eager")(torch.ones(1))
    except RuntimeError as error:  # not on every version of Python
        pytest.skip(f"torch {torch.__version__} cannot compile here: {error}")
    return compiled


def test_another_default_device() -> None:
    """It is for tensors of the program: results are where the tensors are that were given."""
    size, rank = hvd.size(), hvd.rank()
    rows, splits = torch.arange(size), torch.ones(size, dtype=torch.int32)
    own = torch.sparse_coo_tensor([[0, rank]], torch.ones(2), (size,), check_invariants=True)
    with torch.device("meta"):
        total = hvd.sparse_allreduce_async(own, None, hvd.Sum)()
        exchanged, received = hvd.alltoall(rows, splits)
    assert total.to_dense().tolist() == [size + 1.0] + [1.0] * (size - 1)
    assert exchanged.tolist() == [rank] * size
    assert torch.equal(received, splits)


@alone_is_torch
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    model = net(Checkpointed)
    model.use_reentrant = use_reentrant  # type: ignore[assignment]
    compare(model)


@alone_is_torch
def test_channels_last() -> None:
    model = net().to(memory_format=torch.channels_last)
    compare(model, adapt=lambda x: x.contiguous(memory_format=torch.channels_last))
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


@alone_is_torch
def test_autocast() -> None:
    """Activations are bf16, weights and their gradients fp32: sums over other batches differ in bf16's last digits."""

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            assert output.dtype is torch.bfloat16
            return output.float().cos().mean()

    compare(net().float(), loss, tolerance=2e-2)


def test_functional_call() -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        parameters = {name: 2 * parameter for name, parameter in model.named_parameters()}
        output: torch.Tensor = torch.func.functional_call(model, parameters, (x,))
        return output.cos().mean()

    compare(net(), loss)


def test_weight_norm() -> None:
    model = net()
    for layer in (model.conv, model.head):
        torch.nn.utils.parametrizations.weight_norm(layer)
    assert "conv.parametrizations.weight.original0" in dict(model.named_parameters())
    compare(model)


class Numbered(Dataset[torch.Tensor]):
    """Rows of `batch`; a worker that fetches one must find hvdlite, as far as it is concerned, not running."""

    def __init__(self) -> None:
        self.rows = torch.cat([batch(step, torch.float64).flatten(0, 1) for step in range(STEPS)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        assert torch.utils.data.get_worker_info() is not None
        assert not hvd.is_initialized()
        return self.rows[index]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_forked(persistent: bool) -> None:
    """They are started, and end, while the model trains; those that are spawned have a script of their own."""
    data = Numbered()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    loader = DataLoader(
        data, BATCH, sampler=sampler, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent
    )
    model = net()
    alone = copy.deepcopy(model)
    weights, _ = train(model, plain_loss, [x for _ in range(2) for x in loader], True)
    whole = list(torch.split(data.rows, BATCH * hvd.size())) * 2
    expected, _ = train(alone, plain_loss, whole, False)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LINEAR)
def test_torch_func(name: str) -> None:
    """Gradients, tangents, and tangents of gradients."""
    operation = LINEAR[name]
    x, tangent = (rank_input(hvd.rank() + i, (hvd.size() * 2,), torch.float32) for i in range(2))
    outputs, tangents = torch.func.jvp(lambda x: operation(x.square()), (x,), (tangent,))
    assert torch.equal(outputs, operation(x.square()))
    assert torch.equal(tangents, operation(2 * x * tangent))
    gradient = torch.func.grad(lambda x: operation(x).pow(3).sum())
    weights = 3 * operation(x).square()
    assert torch.allclose(gradient(x), torch.func.grad(lambda x: (operation(x) * weights).sum())(x))
    weights = 6 * operation(x) * operation(tangent)  # the tangent of the ones above
    of_gradient = torch.func.jvp(gradient, (x,), (tangent,))[1]
    assert torch.allclose(of_gradient, torch.func.grad(lambda x: (operation(x) * weights).sum())(x))


@pytest.mark.parametrize("name", [*LINEAR, "in place"])
def test_torch_func_that_maps(name: str) -> None:
    """Refused before anything is submitted, so that one rank alone may err."""
    operation = LINEAR.get(name, hvd.allreduce_)
    x = torch.eye(hvd.size() * 2)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"call hvd outside of torch\.func\.vmap"):
            torch.func.vmap(operation)(x)
    if name in LINEAR:
        jacobian = torch.func.jacrev(operation, chunk_size=1)(x[0])
        assert jacobian.shape == (*operation(x[0]).shape, *x[0].shape)
