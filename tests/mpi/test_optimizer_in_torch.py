"""DistributedOptimizer between real ranks, with everything that torch has around an optimizer.

Gradients are small integers, so that their averages are exact and n ranks must hold the same bits as one process.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hvdlite.torch as hvd
from hvdlite.errors import UsageError

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.not_with_three_ranks,
    pytest.mark.usefixtures("running"),
]


SHAPES = [(4, 3), (50, 40), (6, 1)]


class Shifted(torch.optim.Optimizer):
    """A user's optimizer with arguments of its own."""

    def __init__(self, shift: float, *, weights: Any, note: str = "") -> None:
        super().__init__(weights, {"shift": shift})
        self.note = note

    @torch.no_grad()
    def step(self) -> str:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["shift"])
        return self.note


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items())
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
}
OPTIMIZERS |= {
    "SGD with momentum, fused": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.9, nesterov=True, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "a user's": lambda p: Shifted(0.25, weights=p, note="done"),
}


def weights(sparse: bool) -> list[torch.nn.Parameter]:
    """Sparse gradients are what SparseAdam takes; Muon takes matrices."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in (SHAPES[:1] if sparse else SHAPES)]


def contribution(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient on a rank: integers that the number of ranks divides."""
    numel = int(torch.Size(shape).numel())
    return ((torch.arange(numel) * 7 + step * 3 + rank) % 5 + 1.0).reshape(shape) * hvd.size()


def rows_of(rank: int, step: int) -> list[int]:
    return [step % 4] if rank == 0 else [(step + 1) % 4, 2, 2]


def backward(parameters: list[torch.nn.Parameter], step: int, sparse: bool) -> None:
    for p in parameters:
        mine = contribution(hvd.rank(), step, tuple(p.shape))
        if sparse:
            rows = torch.tensor(rows_of(hvd.rank(), step))
            (torch.nn.functional.embedding(rows, p, sparse=True) * mine[rows]).sum().backward()
        else:
            (p * mine).sum().backward()


def average(step: int, shape: tuple[int, ...], sparse: bool) -> torch.Tensor:
    total = torch.zeros(shape)
    touched: set[int] = set()
    for rank in range(hvd.size()):
        mine = contribution(rank, step, shape)
        if sparse:
            for row in rows_of(rank, step):
                total[row] += mine[row]
                touched.add(row)
        else:
            total += mine
    total /= hvd.size()
    if not sparse:
        return total
    rows = sorted(touched)
    return torch.sparse_coo_tensor([rows], total[rows], shape, check_invariants=True).coalesce()


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allgather(tensor.detach().unsqueeze(0))


def assert_same_everywhere(tensors: Any) -> None:
    for tensor in tensors:
        assert torch.equal(everywhere(tensor), tensor.detach().expand(hvd.size(), *tensor.shape))


def assert_same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    mine, other = a.state_dict(), b.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for key, values in mine["state"].items():
        assert values.keys() == other["state"][key].keys()
        for name, value in values.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda x, y: x == y
            assert same(value, other["state"][key][name]), (key, name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch(name: str) -> None:
    sparse = name == "SparseAdam"
    together, alone = weights(sparse), weights(sparse)
    wrapped = hvd.DistributedOptimizer(OPTIMIZERS[name](together))
    plain = OPTIMIZERS[name](alone)
    for step in range(4):
        wrapped.zero_grad()
        backward(together, step, sparse)
        for p in alone:
            p.grad = average(step, tuple(p.shape), sparse)
        assert wrapped.step() == plain.step()
        for p, q in zip(together, alone, strict=True):
            assert torch.equal(p, q)
    assert_same_everywhere(together)
    assert_same_state(wrapped, plain)


@pytest.mark.parametrize("returned", [torch.Tensor.clone, torch.Tensor.item], ids=["tensor", "number"])
def test_lbfgs(returned: Callable[[torch.Tensor], Any]) -> None:
    """Ranks decide alike when to stop, though each has data of its own."""
    torch.manual_seed(0)
    target = torch.randn(6, dtype=torch.float64)
    parts = [
        torch.randn(8, 6, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(hvd.size())
    ]
    p, q = (torch.nn.Parameter(torch.zeros(6, dtype=torch.float64)) for _ in range(2))

    def make(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([parameter], max_iter=7, line_search_fn="strong_wolfe")

    wrapped, plain = hvd.DistributedOptimizer(make(p)), make(q)
    evaluations = 0

    def together() -> Any:
        nonlocal evaluations
        evaluations += 1
        wrapped.zero_grad()
        loss = (parts[hvd.rank()] @ (p - target)).square().mean()
        loss.backward()
        return returned(loss)

    def alone() -> torch.Tensor:
        plain.zero_grad()
        loss = torch.stack([(part @ (q - target)).square().mean() for part in parts]).mean()
        loss.backward()
        return loss

    for _ in range(3):
        loss, wanted = wrapped.step(together), plain.step(alone)
        assert torch.as_tensor(loss, dtype=torch.float64).item() == pytest.approx(wanted.item(), rel=1e-9)
        assert_same_everywhere([p])
    assert len(set(everywhere(torch.tensor(evaluations)).tolist())) == 1
    assert torch.allclose(p, target, atol=1e-4)


def needs_two() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank has nobody to agree with")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["documented", "step alone"])
def test_grad_scaler_skips_on_all_ranks(order: str, fused: bool) -> None:
    """One rank alone has an overflow: all skip the step, and all lower their scale."""
    p = torch.nn.Parameter(torch.zeros(3))
    q = torch.nn.Parameter(torch.zeros(2))
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=0.25, fused=fused), op=hvd.Sum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    steps = skipped = 0
    for step in range(7):
        wrapped.zero_grad()
        overflows = hvd.rank() == step % hvd.size() and step % 3 == 1
        scaler.scale(p.sum() * (float("inf") if overflows else hvd.rank() + 1.0)).backward()
        if order == "documented":
            wrapped.synchronize()
            scaler.unscale_(wrapped)
            torch.nn.utils.clip_grad_norm_([p, q], 1e6)
            with wrapped.skip_synchronize():
                scaler.step(wrapped)
        else:
            scaler.step(wrapped)
        scaler.update()
        skipped += step % 3 == 1
        steps += step % 3 != 1
        assert p.tolist() == [-0.25 * steps * hvd.size() * (hvd.size() + 1) / 2] * 3
        assert scaler.get_scale() == 1024.0 / 2**skipped
    assert len({tuple(row) for row in everywhere(p).tolist()}) == 1


def test_a_grad_scaler_and_accumulation_with_model_zero_grad() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        p.grad = None  # as model.zero_grad() does, of which the optimizer learns nothing
        for micro in range(2):
            overflows = hvd.rank() == 0 and step == 1 and micro == 1
            scaler.scale(p.sum() * (float("inf") if overflows else 1.0)).backward()
        scaler.step(wrapped)
        scaler.update()
    assert p.tolist() == [-6.0] * 3
    assert scaler.get_scale() == 2.0


def test_unscaling_gradients_on_their_way_is_an_error_everywhere() -> None:
    needs_two()
    p = torch.nn.Parameter(torch.zeros(3))
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(wrapped)
    with pytest.raises(UsageError, match=r"unscale_\(optimizer\) was called while"):
        scaler.step(wrapped)
    wrapped.zero_grad()
    p.sum().backward()
    wrapped.step()
    assert p.tolist() == [-1.0] * 3


def test_clipping_in_the_documented_order() -> None:
    p = torch.nn.Parameter(torch.zeros(16))
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    total = hvd.size() * (hvd.size() + 1) / 2
    for step in range(3):
        wrapped.zero_grad()
        (p.sum() * (hvd.rank() + 1.0)).backward()
        wrapped.synchronize()
        norm = torch.nn.utils.clip_grad_norm_([p], 2.0)
        assert norm.item() == 4.0 * total
        with wrapped.skip_synchronize():
            wrapped.step()
        assert torch.allclose(p, torch.full((16,), -0.5 * (step + 1)) if total >= 1 else p, rtol=1e-5)
    assert_same_everywhere([p])


@pytest.mark.parametrize("before", [True, False])
def test_schedulers(before: bool) -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if before else None
    optimizer = hvd.DistributedOptimizer(optimizer)
    scheduler = scheduler or lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
        scheduler.step()
    assert p.tolist() == [-1.75, -1.75]


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_train_on(how: str) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), model.named_parameters(), op=hvd.Sum
    )

    def train(m: torch.nn.Module, o: torch.optim.Optimizer) -> None:
        o.zero_grad()
        (m(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()
        o.step()

    train(model, wrapped)
    both = (model, wrapped)
    other, other_wrapped = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    for m, o in ((other, other_wrapped), both):
        train(m, o)
    total = hvd.size() * (hvd.size() + 1) / 2
    assert model.weight.tolist() == other.weight.tolist() == [[-2.5 * total] * 3]


@pytest.mark.parametrize("hooked_first", [True, False])
def test_steps_in_backward(hooked_first: bool) -> None:
    """Each parameter has an optimizer, which a hook of the program steps as soon as the gradient is there."""
    together, alone = weights(False), weights(False)
    optimizers: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def step_by(p: torch.nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    def hook() -> None:
        for p in together:
            p.register_post_accumulate_grad_hook(step_by)

    if hooked_first:
        hook()
    optimizers |= {p: hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.125, momentum=0.5)) for p in together}
    if not hooked_first:
        hook()
    plain = torch.optim.SGD(alone, lr=0.125, momentum=0.5)
    for step in range(5):
        backward(together, step, False)
        for p in alone:
            p.grad = average(step, tuple(p.shape), False)
        plain.step()
        assert all(map(torch.equal, together, alone))


def test_state_dict_round_trip() -> None:
    """One rank saves, all load: through the object of the plain class, and through a new distributed one."""
    together, alone = weights(False), weights(False)
    wrapped, plain = hvd.DistributedOptimizer(torch.optim.Adam(together)), torch.optim.Adam(alone)
    for step in range(2):
        wrapped.zero_grad()
        backward(together, step, False)
        wrapped.step()
    saved = hvd.broadcast_object(wrapped.state_dict() if hvd.rank() == 0 else None)
    plain.load_state_dict(copy.deepcopy(saved))  # it keeps the tensors that it is given
    assert_same_state(wrapped, plain)
    with torch.no_grad():
        for p, q in zip(together, alone, strict=True):
            q.copy_(p)
    again = hvd.DistributedOptimizer(torch.optim.Adam(alone, lr=7.0))
    again.load_state_dict(copy.deepcopy(saved))
    for optimizer, parameters in ((wrapped, together), (again, alone)):
        optimizer.zero_grad()
        backward(parameters, 2, False)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))
    assert_same_state(wrapped, again)


# Ways to use several parts, passes and optimizers.


def test_a_partial_last_window() -> None:
    """Eight batches in windows of three; in the last one ranks have even different numbers of them."""
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), op=hvd.Sum, backward_passes_per_step=3)
    for _ in range(2):  # epochs
        for window in (3, 3, 1 + hvd.rank() % 2):
            wrapped.zero_grad()
            for _ in range(window):
                (p.sum() + 2 * q.sum()).backward()
            wrapped.step()
    passes = sum(6 + 1 + rank % 2 for rank in range(hvd.size())) * 2
    assert p.tolist() == [-float(passes)] * 3
    assert q.tolist() == [-2.0 * passes] * 3


def test_two_losses_before_a_step() -> None:
    """Both pass through the trunk, each through a head of its own."""
    trunk, left, right = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD([trunk, left, right], lr=0.0), op=hvd.Sum, backward_passes_per_step=2
    )
    for _ in range(3):
        wrapped.zero_grad()
        (trunk * left).sum().backward()
        (trunk * right * (hvd.rank() + 1)).sum().backward()
        wrapped.step()
        total = hvd.size() * (hvd.size() + 1) / 2
        gradients = [p.grad.item() for p in (trunk, left, right) if p.grad is not None]
        assert gradients == [hvd.size() + total, hvd.size(), total]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_model_in_two_parts(optimizers: int) -> None:
    """Each part with an optimizer of its own, or with a parameter group; some batches leave the second part out."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(3, 4, bias=False).double(), torch.nn.Linear(4, 2, bias=False).double()]
    alone = copy.deepcopy(parts)
    named = [item for i, part in enumerate(parts) for item in part.named_parameters(prefix=f"part{i}")]
    groups = [{"params": list(part.parameters())} for part in parts]
    wrapped = [
        hvd.DistributedOptimizer(torch.optim.SGD(some, lr=0.125, momentum=0.5), named)
        for some in ([groups] if optimizers == 1 else [[group] for group in groups])
    ]
    plain = torch.optim.SGD([{"params": list(part.parameters())} for part in alone], lr=0.125, momentum=0.5)

    def loss(model: list[torch.nn.Linear], rank: int, step: int) -> torch.Tensor:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        hidden = model[0](x)
        return (hidden if step == 2 else model[1](torch.tanh(hidden))).square().sum()

    for step in range(4):
        for optimizer in wrapped:
            optimizer.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
        loss(parts, hvd.rank(), step).backward()
        torch.stack([loss(alone, rank, step) for rank in range(hvd.size())]).mean().backward()
        for optimizer in wrapped:
            optimizer.step()
        plain.step()
    for part, other in zip(parts, alone, strict=True):
        assert torch.allclose(part.weight, other.weight, rtol=1e-12)
        assert_same_everywhere([part.weight])


# Sparse gradients.


class Words(torch.nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.words = torch.nn.Embedding(12, 3, sparse=True).double()
        self.bags = torch.nn.EmbeddingBag(8, 3, sparse=True, mode="sum").double()
        self.head = torch.nn.Linear(3, 2).double()

    def loss(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        chosen = torch.randint(12, (rank + 2,), generator=generator)
        hidden = self.words(chosen).sum(0)
        if (self.mode == "some" and rank == step % 2) or (self.mode == "late" and step >= 2):
            hidden = hidden + self.bags(torch.randint(8, (1, 4), generator=generator))[0]
        result: torch.Tensor = self.head(hidden).square().sum()
        return result


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("mode", ["some", "none"])
def test_sparse_gradients(mode: str, sparse_as_dense: bool, op: int) -> None:
    """A second table is used by one rank in turns, from the first step on, or by none."""
    model, alone = Words(mode), Words(mode)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), op=op, sparse_as_dense=sparse_as_dense
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(4):
        wrapped.zero_grad()
        plain.zero_grad()
        model.loss(hvd.rank(), step).backward()
        losses = torch.stack([alone.loss(rank, step) for rank in range(hvd.size())])
        (losses.mean() if op == hvd.Average else losses.sum()).backward()
        wrapped.step()
        plain.step()
        assert model.words.weight.grad is not None
        assert model.words.weight.grad.is_sparse == (hvd.size() == 1 or not sparse_as_dense)
        if mode == "some" and hvd.size() > 1:
            assert model.bags.weight.grad is not None
            assert model.bags.weight.grad.is_sparse == (not sparse_as_dense)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-12)
    assert_same_everywhere(model.parameters())


@pytest.mark.filterwarnings("ignore:the gradient of 'bags.weight' is sparse:UserWarning")
def test_a_table_that_nobody_used_in_the_first_step_is_made_dense() -> None:
    model, alone = Words("late"), Words("late")
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), op=hvd.Sum
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(4):
        wrapped.zero_grad()
        plain.zero_grad()
        model.loss(hvd.rank(), step).backward()
        torch.stack([alone.loss(rank, step) for rank in range(hvd.size())]).sum().backward()
        wrapped.step()
        plain.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-12)
    assert_same_everywhere(model.parameters())


@pytest.mark.filterwarnings("ignore:the gradient of 'group0.0' is sparse:UserWarning")
def test_sparse_on_one_rank_and_dense_on_another() -> None:
    """In the first step one rank reads rows, another the whole table."""
    table = torch.nn.Parameter(torch.zeros(5, 2))
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), op=hvd.Sum)
    for step in range(3):
        wrapped.zero_grad()
        if (hvd.rank() + step) % 2:
            table.sum().backward()
        else:
            torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
        wrapped.step()
    whole = sum((rank + step) % 2 for rank in range(hvd.size()) for step in range(3))
    rest = 3 * hvd.size() - whole
    assert table.tolist() == [[-float(whole + (rest if row == 1 else 0))] * 2 for row in range(5)]
