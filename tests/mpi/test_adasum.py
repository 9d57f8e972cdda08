"""Adasum between real ranks, against the formula in fp64; of tensors and of what optimizers do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hvdlite.torch as hvd
from hvdlite.errors import MismatchError

pytestmark = [pytest.mark.any_mpi, pytest.mark.usefixtures("running")]

SIZE = MPI.COMM_WORLD.size

defined = pytest.mark.skipif(SIZE & (SIZE - 1) != 0, reason="Adasum is defined for a power of two of ranks")


def formula(arrays: list[np.ndarray]) -> np.ndarray:
    """Of float64 arrays of any shape; neighbours first, then neighbouring pairs."""
    while len(arrays) > 1:
        arrays = [pair(a, b) for a, b in zip(arrays[::2], arrays[1::2], strict=True)]
    return arrays[0]


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b


def rank_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def expected(shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    return torch.from_numpy(
        np.asarray(formula([rank_input(rank, shape, dtype, salt).double().numpy() for rank in range(SIZE)]))
    )


ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(), (1,), (7,), (3, 4), (0,), (2, 0), (5, 1, 3), (3001,)]


def close(result: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    assert result.dtype is dtype
    assert result.shape == wanted.shape
    return torch.allclose(
        result.double(), wanted, rtol=ROUNDING[dtype], atol=1e-8 if dtype is torch.float16 else 1e-300
    )


def same_everywhere(tensor: torch.Tensor) -> bool:
    gathered = hvd.allgather(tensor.detach().unsqueeze(0))
    return torch.equal(gathered, gathered[:1].expand_as(gathered))


@defined
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_formula(dtype: torch.dtype) -> None:
    for salt, shape in enumerate(SHAPES):
        tensor = rank_input(hvd.rank(), shape, dtype, salt)
        wanted = expected(shape, dtype, salt)
        results = [
            hvd.allreduce(tensor, op=hvd.Adasum),
            hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Adasum, name="a")),
        ]
        assert torch.equal(tensor, rank_input(hvd.rank(), shape, dtype, salt))
        assert hvd.allreduce_(tensor, op=2) is tensor  # Horovod's number
        again = rank_input(hvd.rank(), shape, dtype, salt)
        assert hvd.synchronize(hvd.allreduce_async_(again, op=hvd.Adasum)) is again
        for result in (*results, tensor, again):
            assert close(result, wanted, dtype)
            assert same_everywhere(result)


@defined
def test_what_two_have_in_common_counts_once() -> None:
    same = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(hvd.allreduce(same, op=hvd.Adasum), same)
    orthogonal = torch.zeros(SIZE)
    orthogonal[hvd.rank()] = hvd.rank() + 1.0
    assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [rank + 1.0 for rank in range(SIZE)]
    only_one = torch.full((3,), 5.0 if hvd.rank() == 0 else 0.0)
    assert hvd.allreduce(only_one, op=hvd.Adasum).tolist() == [5.0] * 3
    assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0.0] * 3


@defined
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parallel_tensors_are_averaged_at_any_scale(dtype: torch.dtype) -> None:
    """Also where one is much smaller than another, or so small that its own dtype has no number for its square."""
    direction = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    info = torch.finfo(dtype)
    for scales in ([info.tiny, 2 * info.tiny], [info.tiny if dtype is torch.float16 else 1e-30, 1.0], [0.0, 1.0]):
        of_rank = [direction * scales[rank % 2] for rank in range(SIZE)]
        mean = torch.stack(of_rank).mean(0) if 0.0 not in scales else formula([x.numpy() for x in of_rank])
        result = hvd.allreduce(of_rank[hvd.rank()].to(dtype), op=hvd.Adasum)
        assert torch.allclose(result.double(), torch.as_tensor(mean), rtol=2 * info.eps, atol=0.0)


@defined
def test_dot_products_are_in_fp64() -> None:
    """In fp32 neither would the small element count nor would the squares be finite."""
    tensor = torch.tensor([1e30, 1.0 + hvd.rank()])
    wanted = formula([np.array([np.float64(np.float32(1e30)), 1.0 + rank]) for rank in range(SIZE)])
    assert torch.equal(hvd.allreduce(tensor, op=hvd.Adasum), torch.from_numpy(wanted).float())


@defined
def test_grouped() -> None:
    shapes = [(3, 4), (5,), ()]
    dtypes = [torch.float32, torch.float64, torch.float16]

    def mine() -> list[torch.Tensor]:
        return [rank_input(hvd.rank(), s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]

    handle = hvd.grouped_allreduce_async(mine(), op=hvd.Adasum, name="g")
    results = hvd.synchronize(handle)
    assert hvd.poll(handle)
    in_place = mine()
    assert hvd.grouped_allreduce_(in_place, op=hvd.Adasum)[0] is in_place[0]
    for group in (results, in_place, hvd.grouped_allreduce(mine(), op=hvd.Adasum)):
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            assert close(group[i], expected(shape, dtype, i), dtype)
    assert hvd.grouped_allreduce([], op=hvd.Adasum) == []


@defined
def test_layouts_and_scales() -> None:
    base = rank_input(hvd.rank(), (4, 6), torch.float64)
    wanted = expected((4, 6), torch.float64)
    assert close(hvd.allreduce(base.t(), op=hvd.Adasum), wanted.t(), torch.float64)
    transposed = base.t()
    hvd.allreduce_(transposed, op=hvd.Adasum)
    assert close(base, wanted, torch.float64)
    scaled = hvd.allreduce(
        rank_input(hvd.rank(), (9,), torch.float64), op=hvd.Adasum, prescale_factor=4.0, postscale_factor=0.5
    )
    assert close(scaled, expected((9,), torch.float64) * 2.0, torch.float64)  # it is homogeneous
    halves = [rank_input(rank, (9,), torch.float32).half() for rank in range(SIZE)]
    compressed = hvd.allreduce(
        rank_input(hvd.rank(), (9,), torch.float32), op=hvd.Adasum, compression=hvd.Compression.fp16
    )
    assert close(compressed, torch.from_numpy(formula([half.double().numpy() for half in halves])), torch.float32)


@defined
def test_its_gradient_is_adasum_of_the_gradients() -> None:
    tensor = rank_input(hvd.rank(), (5,), torch.float64).requires_grad_()
    weights = rank_input(hvd.rank(), (5,), torch.float64, salt=1)
    (hvd.allreduce(tensor, op=hvd.Adasum) * weights).sum().backward()
    assert tensor.grad is not None
    assert close(tensor.grad, expected((5,), torch.float64, salt=1), torch.float64)


@pytest.mark.skipif(SIZE & (SIZE - 1) == 0, reason="of a number of ranks that is no power of two")
def test_where_it_is_not_defined() -> None:
    with pytest.raises(NotImplementedError, match=f"power of two of ranks, and there are {SIZE}"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="power of two"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), op=hvd.Adasum)
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


@defined
def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="allreduce 'i'.*int64.*float"):
        hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum, name="i")


@defined
@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (0.5, "expected a torch.Tensor, got float; pass torch.as_tensor"),
        (torch.eye(2).to_sparse(), r"sparse_coo; pass tensor\.to_dense"),
        (torch.ones(2, device="meta"), "is on meta"),
    ],
    ids=["number", "sparse", "meta"],
)
def test_what_is_refused_as_by_any_allreduce(tensor: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"allreduce 't': .*{text}"):
        hvd.allreduce(tensor, op=hvd.Adasum, name="t")


@defined
@pytest.mark.skipif(SIZE == 1, reason="alone nobody contradicts")
def test_ranks_that_contradict_each_other() -> None:
    odd = hvd.rank() == 1
    with pytest.raises(MismatchError, match=r"'m'.*\(3,\) on .* but \(4,\) on rank 1"):
        hvd.allreduce(torch.ones(4 if odd else 3), op=hvd.Adasum, name="m")
    with pytest.raises(MismatchError, match=r"'m'.*dtype is float32 on .* but float64 on rank 1"):
        hvd.allreduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), op=hvd.Adasum, name="m")
    with pytest.raises(MismatchError, match=r"'m'.*operation is"):
        hvd.allreduce(torch.ones(3), op=hvd.Sum if odd else hvd.Adasum, name="m")
    with pytest.raises(MismatchError, match=r"'g\.1'"):
        hvd.grouped_allreduce([torch.ones(1), torch.ones(4 if odd else 3)], op=hvd.Adasum, name="g")
    assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Adasum, name="m"), torch.ones(3))


# DistributedOptimizer.


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 5).double()
        self.second = torch.nn.Linear(5, 2).double()

    def loss(self, rank: int, step: int) -> torch.Tensor:
        x = rank_input(rank, (3, 4), torch.float64, salt=step)
        return self.second(torch.tanh(self.first(x))).square().sum()


MAKERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.05),
]


def simulate(make: Callable[[Any], torch.optim.Optimizer], steps: int, passes: int = 1) -> list[torch.Tensor]:
    """What all ranks should hold: each with an optimizer of its own, whose steps the formula combines."""
    nets = [Net() for _ in range(SIZE)]
    optimizers = [make(net.parameters()) for net in nets]
    for step in range(steps):
        starts = [p.detach().clone() for p in nets[0].parameters()]
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(passes):
                net.loss(rank, passes * step + micro).backward()
            optimizer.step()
        together = list(zip(*(list(net.parameters()) for net in nets), strict=True))
        for start, parameters in zip(starts, together, strict=True):
            combined = formula([(p.detach() - start).numpy() for p in parameters])
            for p in parameters:
                with torch.no_grad():
                    p.copy_(start + torch.from_numpy(combined))
    return [p.detach() for p in nets[0].parameters()]


@defined
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("make", MAKERS, ids=["SGD", "Adam"])
def test_optimizer_combines_steps(make: Callable[[Any], torch.optim.Optimizer], passes: int) -> None:
    net = Net()
    optimizer = make(net.parameters())
    optimizer = hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
    )
    assert isinstance(optimizer, hvd.DistributedOptimizer)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(passes):
            net.loss(hvd.rank(), passes * step + micro).backward()
        if step == 1:  # the documented order does no harm
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    for p, wanted in zip(net.parameters(), simulate(make, 4, passes), strict=True):
        assert same_everywhere(p)
        assert torch.allclose(p, wanted, rtol=1e-10, atol=1e-300)


@defined
@pytest.mark.parametrize("compression", ["fp16", "custom"])
def test_optimizer_compresses(compression: str) -> None:
    class Doubling(hvd.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor * 2, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor / 2

    p = torch.nn.Parameter(torch.ones(3))
    compressor = Doubling if compression == "custom" else hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.5), op=hvd.Adasum, compression=compressor)
    p.sum().backward()
    optimizer.step()
    assert p.tolist() == [0.5] * 3
    assert p.dtype is torch.float32


@defined
def test_parameters_without_gradient_and_frozen_ones() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Adasum)
    parameters[2].requires_grad_(False)
    for step in range(2):
        optimizer.zero_grad()
        # Of the first every rank has its own element, the second has a gradient on the last rank only.
        parameters[0][hvd.rank()].backward()
        if hvd.rank() == SIZE - 1:
            parameters[1].sum().backward()
        optimizer.step()
        assert parameters[0].tolist() == [-1.0 - step] * SIZE
        assert parameters[1].tolist() == [-1.0 - step] * SIZE
        assert parameters[2].tolist() == [0.0] * SIZE
    added = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [added]})
    (added.sum() * 2).backward()
    optimizer.step()
    assert added.tolist() == [-2.0, -2.0]


@defined
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_skips_on_all_ranks(unscale: bool, fused: bool) -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, overflows in enumerate([None, SIZE - 1, 0, None]):
        optimizer.zero_grad()
        factor = float("inf") if hvd.rank() == overflows else 2.0
        scaler.scale(factor * p.sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [-2.0 if step < 3 else -4.0] * 3, step


@defined
def test_closure_hooks_and_schedulers() -> None:
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3 + hvd.rank())
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fired: list[str] = []
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), op=hvd.Adasum)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net.loss(hvd.rank(), 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(Net().loss(hvd.rank(), 0).item())
    before.step()
    assert fired == ["post"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert all(same_everywhere(p) for p in net.parameters())


@defined
def test_a_copy_combines_as_well() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Adasum)
    q, other = copy.deepcopy((p, optimizer))
    for parameter, its in ((q, other), (p, optimizer)):
        parameter[0].backward() if hvd.rank() == 0 else parameter.sum().mul(0).backward()
        its.step()
        assert parameter.tolist() == [-1.0, 0.0]


@defined
@pytest.mark.skipif(SIZE == 1, reason="alone nobody contradicts")
def test_a_step_that_fails_leaves_parameters_as_they_were() -> None:
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), op=hvd.Adasum)
    optimizer.step()
    second.data = torch.zeros(2 + hvd.rank() % 2)
    (first.sum() + second.sum()).backward()
    with pytest.raises(MismatchError, match=r"'optimizer\d+\.group0\.1'"):
        optimizer.step()
    assert first.tolist() == [-1.0] * 3
    assert second.tolist() == [0.0] * len(second)


@defined
@pytest.mark.skipif(SIZE == 1, reason="alone nobody contradicts")
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_with_other_models_are_told(count: int) -> None:
    odd = hvd.rank() == 1
    names = ["a", "head" if odd else "fc", "z"][: count if odd else 2]
    named = [(name, torch.nn.Parameter(torch.zeros(3))) for name in names]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, op=hvd.Adasum)
    with pytest.raises(MismatchError, match=r"number 2 of them is 'fc' on .* but 'head' on rank 1"):
        optimizer.step()
