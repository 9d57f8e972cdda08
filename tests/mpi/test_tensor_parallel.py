"""Split layers compute what unsplit ones do, forward and backward; on one node through shared memory, and without."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

import hvdlite
import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from hvdlite.recorder import Lane
from hvdlite.tensor_parallel.carrier import Rows
from hvdlite.timeline.report import SPLIT_LAYERS
from tensor_parallel_lab import WORDS, Transformer, batch, close, integers

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def rows_of(whole: torch.Tensor, team: tp.Team) -> torch.Tensor:
    return whole.chunk(team.size)[team.rank]


def columns_of(whole: torch.Tensor, team: tp.Team) -> torch.Tensor:
    return whole.chunk(team.size, -1)[team.rank]


# The functions, on integers: every sum is exact, in any order.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("between", [(), (3,)], ids=["matrix", "batch"])
def test_all_gather_matmul(team: tp.Team, dtype: torch.dtype, between: tuple[int, ...]) -> None:
    n = team.size
    x = integers(2 * n, *between, 5, dtype=dtype, salt=1).requires_grad_()
    weight = integers(5, 3 * n, dtype=dtype, salt=2).requires_grad_()
    bias = integers(3 * n, dtype=dtype, salt=3).requires_grad_()
    whole = x @ weight + bias
    upstream = integers(*whole.shape, dtype=dtype, salt=4)
    expected = torch.autograd.grad(whole, (x, weight, bias), upstream)

    own = [part.detach().clone().requires_grad_() for part in (rows_of(x, team), columns_of(weight, team))]
    own.append(columns_of(bias, team).detach().clone().requires_grad_())
    y = tp.all_gather_matmul(own[0], own[1], team, own[2])
    assert torch.equal(y, columns_of(whole, team))
    found = torch.autograd.grad(y, own, columns_of(upstream, team))
    assert torch.equal(found[0], rows_of(expected[0], team))
    assert torch.equal(found[1], columns_of(expected[1], team))
    assert torch.equal(found[2], columns_of(expected[2], team))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("between", [(), (3,)], ids=["matrix", "batch"])
def test_matmul_reduce_scatter(team: tp.Team, dtype: torch.dtype, between: tuple[int, ...]) -> None:
    n = team.size
    x = integers(2 * n, *between, 3 * n, dtype=dtype, salt=1).requires_grad_()
    weight = integers(3 * n, 5, dtype=dtype, salt=2).requires_grad_()
    bias = integers(5, dtype=dtype, salt=3).requires_grad_()
    whole = x @ weight + bias
    upstream = integers(*whole.shape, dtype=dtype, salt=4)
    expected = torch.autograd.grad(whole, (x, weight, bias), upstream)

    own = [columns_of(x, team).detach().clone().requires_grad_(), rows_of(weight, team).detach().requires_grad_(), bias]
    z = tp.matmul_reduce_scatter(own[0], own[1], team, bias)
    assert torch.equal(z, rows_of(whole, team))
    found = torch.autograd.grad(z, own, rows_of(upstream, team))
    assert torch.equal(found[0], columns_of(expected[0], team))
    assert torch.equal(found[1], rows_of(expected[1], team))
    assert torch.equal(found[2], expected[2])


def test_sums_of_16_bits_are_rounded_once(team: tp.Team) -> None:
    """256 + 1 is 256 in bfloat16, and 256 + 1 + 1 is 258."""
    if team.size < 3:
        pytest.skip("two numbers are rounded once anyway")
    own = torch.full((team.size, 1), 256.0 if team.rank == 0 else 1.0 if team.rank < 3 else 0.0, dtype=torch.bfloat16)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    assert tp.matmul_reduce_scatter(own, one, team).item() == 258
    assert tp.matmul_all_reduce(own, one, team).tolist() == [[258]] * team.size


def test_windows_grow_and_are_used_in_turns(team: tp.Team) -> None:
    """Each result stays what it was while later exchanges, larger and smaller, overwrite the windows."""
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, rows in enumerate([1, 2, 4096, 3, 20_000, 0, 5]):
        x = integers(rows * team.size, 16, salt=step)
        results.append((tp.gather_rows(rows_of(x, team), team), x))
        if rows:
            one = torch.eye(16)
            shares = x / team.size if team.size in (1, 2, 4) else x * (team.rank == 0)
            results.append((tp.matmul_reduce_scatter(shares, one, team), rows_of(x, team)))
            results.append((tp.matmul_all_reduce(shares, one, team), x))
    for found, expected in results:
        assert torch.equal(found, expected)


def test_what_is_read_is_not_overwritten(team: tp.Team, comm: MPI.Intracomm) -> None:
    """The first rank reads what it has gathered once all others have filled the window for the exchange after that."""
    if team.method == "unfused" or team.size == 1:
        pytest.skip("of shared memory")
    carrier = team.carrier_for(torch.empty(0))
    rows = Rows("test", "", (2, 3), torch.float32, torch.device("cpu"))
    gathered = carrier.gather(rows, torch.full((2, 3), 1.0 + team.rank))

    def fill(own: torch.Tensor, begin: int) -> None:
        own.fill_(-1)
        if team.rank:
            comm.Barrier()

    if team.rank == 0:
        comm.Barrier()
    kept = gathered.clone()
    assert torch.equal(carrier.all_reduce(rows, fill), torch.full((2, 3), -1.0 * team.size))
    assert kept[:, 0].tolist() == [1.0 + place // 2 for place in range(2 * team.size)]


def test_lanes_of_the_timeline(team: tp.Team) -> None:
    if team.size == 1:
        pytest.skip("nothing moves")
    recorder = hvdlite.runtime().recorder
    recorder.start()
    tp.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 3), team)
    recorder.stop()
    events, _ = recorder.drain()
    names = {lane: name for _, lane, name, *_ in events}
    assert names[Lane.MEETING].startswith("all_gather_matmul with a weight (4, 3) of (2, 4) float32")
    if team.method == "unfused":
        assert SPLIT_LAYERS in names[Lane.WAIT]
    else:
        assert [(name, nbytes) for _, lane, name, _, _, nbytes, _ in events if lane is Lane.WINDOW] == [
            ("all_gather_matmul", 32)
        ]


def test_more_shapes_than_are_kept(team: tp.Team) -> None:
    for _ in range(2):
        for columns in range(1, 70):
            whole = tp.gather_rows(torch.full((1, columns), float(team.rank)), team)
            assert torch.equal(whole, torch.arange(float(team.size)).unsqueeze(1).expand(-1, columns))


def test_windows_made_in_inference_mode() -> None:
    team = tp.Team(method="window")
    x, weight = integers(1, 3), integers(3, 2)
    with torch.inference_mode():
        expected = [tp.all_gather_matmul(x, weight, team) for _ in range(2)]  # in each of the windows
    assert torch.equal(tp.all_gather_matmul(x.requires_grad_(), weight, team), expected[1])


def test_no_rows(team: tp.Team) -> None:
    weight = torch.ones(3, 2).requires_grad_()
    for multiply in (tp.all_gather_matmul, tp.matmul_reduce_scatter, tp.matmul_all_reduce, tp.replicated_matmul):
        x = torch.ones(0, 3).requires_grad_()
        y = multiply(x, weight, team)
        y.sum().backward()
        assert (y.shape, x.grad.shape) == ((0, 2), (0, 3))  # type: ignore[union-attr]
    assert torch.equal(weight.grad, torch.zeros(3, 2))  # type: ignore[arg-type]


def test_memory_made_ahead(team: tp.Team) -> None:
    for _ in range(2):
        team.reserve((team.size, 1 << 18), torch.float64)
    assert torch.equal(tp.gather_rows(torch.full((1, 2), float(team.rank)), team)[:, 0], torch.arange(1.0 * team.size))


def test_a_frozen_input_or_weight(team: tp.Team) -> None:
    x, weight = integers(team.size, 4).requires_grad_(), integers(4, 2)
    y = tp.matmul_reduce_scatter(x, weight, team)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(team.size, 2) @ weight.t())  # type: ignore[arg-type]
    shard, weight = integers(1, 4), integers(4, 2).requires_grad_()
    tp.all_gather_matmul(shard, weight, team).sum().backward()
    assert torch.equal(weight.grad, team.size * shard.t().expand(4, 2))  # type: ignore[arg-type]


def test_regions(team: tp.Team) -> None:
    whole = integers(2 * team.size, 3, 4 * team.size).requires_grad_()
    for split, gather, part_of in (
        (tp.split_rows, tp.gather_rows, rows_of),
        (tp.split_columns, tp.gather_columns, columns_of),
    ):
        part = split(whole, team)
        assert torch.equal(part, part_of(whole, team))
        back = gather(part, team)
        assert torch.equal(back, whole)
        upstream = integers(*whole.shape, salt=5)
        assert torch.equal(torch.autograd.grad(back, whole, upstream)[0], upstream)


# Layers.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "rows"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_column_and_a_row(team: tp.Team, dtype: torch.dtype, sequence_parallel: bool, bias: bool) -> None:
    torch.manual_seed(3)
    up, down = nn.Linear(7, 12, bias, dtype=dtype), nn.Linear(12, 6, bias, dtype=dtype)
    torch.manual_seed(3)
    split_up = tp.ColumnParallelLinear(7, 12, team, bias, sequence_parallel=sequence_parallel, dtype=dtype)
    split_down = tp.RowParallelLinear(12, 6, team, bias, sequence_parallel=sequence_parallel, dtype=dtype)
    unsplit = tp.unsplit_state_dict(nn.ModuleList([split_up, split_down]))
    for name, value in nn.ModuleList([up, down]).state_dict().items():
        assert torch.equal(unsplit[name], value), name

    n = team.size
    x = torch.randn(2 * n, 3, 7, dtype=dtype).requires_grad_()
    expected = down(functional.gelu(up(x)))
    own_x = (rows_of(x, team) if sequence_parallel else x).detach().clone().requires_grad_()
    found = split_down(functional.gelu(split_up(own_x)))
    close(found, rows_of(expected, team) if sequence_parallel else expected)

    upstream = torch.randn(expected.shape, dtype=dtype)
    expected.backward(upstream)
    found.backward(rows_of(upstream, team) if sequence_parallel else upstream)
    assert x.grad is not None
    close(own_x.grad, rows_of(x.grad, team) if sequence_parallel else x.grad)
    for layer, split in ((up, split_up), (down, split_down)):
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            part = split.parts.get(name)
            close(
                split.get_parameter(name).grad,
                parameter.grad if part is None else part.of(parameter.grad, team.rank, n),
            )
    assert (split_up.bias is None) is not bias


def test_outputs_gathered_and_inputs_split(team: tp.Team) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(5, 24), nn.Linear(24, 3)
    split_first = tp.ColumnParallelLinear.split(first, team, gather_output=True, blocks=2)
    split_second = tp.RowParallelLinear.split(second, team, input_is_parallel=False)
    x = torch.randn(4, 5).requires_grad_()
    own_x = x.detach().clone().requires_grad_()
    expected, found = second(first(x)), split_second(split_first(own_x))
    close(split_first(x), first(x))
    close(found, expected)
    upstream = torch.randn(4, 3)
    expected.backward(upstream)
    found.backward(upstream)
    assert first.weight.grad is not None
    close(own_x.grad, x.grad)
    close(split_first.weight.grad, split_first.parts["weight"].of(first.weight.grad, team.rank, team.size))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "rows"])
def test_an_embedding(team: tp.Team, sequence_parallel: bool) -> None:
    torch.manual_seed(1)
    whole = nn.Embedding(WORDS, 5)
    torch.manual_seed(1)
    split = tp.VocabularyParallelEmbedding(WORDS, 5, team, sequence_parallel=sequence_parallel)
    words = torch.arange(2 * WORDS).remainder(WORDS).view(WORDS, 2)
    expected, found = whole(words), split(words.int())
    own = rows_of if sequence_parallel else lambda x, _: x
    assert torch.equal(found, own(expected, team))
    upstream = integers(*expected.shape)
    expected.backward(upstream)
    found.backward(own(upstream, team))
    assert whole.weight.grad is not None
    assert torch.equal(split.weight.grad, rows_of(whole.weight.grad, team))  # type: ignore[arg-type]
    assert split(words[:0]).shape == (0, 2, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(team: tp.Team, dtype: torch.dtype, reduction: str) -> None:
    torch.manual_seed(2)
    logits = (10 * torch.randn(3, 4, WORDS)).to(dtype)
    logits[0, 0, :12] = -torch.inf  # as of masked words: all of some ranks' share
    logits.requires_grad_()
    targets = torch.randint(WORDS // 2, WORDS, (3, 4))
    targets[1] = -100
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    expected = functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction=reduction)
    own = columns_of(logits, team).detach().clone().requires_grad_()
    found = tp.vocabulary_parallel_cross_entropy(own, targets, team, reduction=reduction)
    close(found, expected.view(found.shape))
    expected.sum().backward()
    found.sum().backward()
    assert logits.grad is not None
    close(own.grad, columns_of(logits.grad, team))


def test_a_copy_of_a_layer_is_of_the_same_team(team: tp.Team) -> None:
    layer = tp.ColumnParallelLinear(3, 12, team)
    other = copy.deepcopy(layer)
    assert other.team is team
    x = torch.ones(2, 3)
    assert torch.equal(layer(x), other(x))
    assert "blocks=1" in repr(layer)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "rows"])
def test_under_autocast(team: tp.Team, sequence_parallel: bool) -> None:
    """As `torch.nn.Linear`: products in bfloat16, gradients of parameters in their own dtype."""
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 6))
    plan = {
        "0": partial(tp.ColumnParallelLinear.split, sequence_parallel=sequence_parallel),
        "1": partial(tp.RowParallelLinear.split, sequence_parallel=sequence_parallel),
    }
    split = tp.parallelize(copy.deepcopy(whole), plan, team)
    x = torch.randn(2 * team.size, 7)
    own = rows_of if sequence_parallel else lambda x, _: x
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert whole(x).dtype is torch.bfloat16
        expected, found = whole(x), split(own(x, team))
    torch.testing.assert_close(found, own(expected, team), rtol=0.05, atol=0.05)
    expected.sum().backward()
    found.sum().backward()
    for name, parameter in split[0].named_parameters():
        gradient = whole[0].get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, rows_of(gradient, team), rtol=0.05, atol=0.05)


@pytest.mark.not_with_three_ranks
@pytest.mark.time_limit(180)  # most of it imports the compiler, which a busy machine does slowly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's own making, between two graphs
def test_compiled() -> None:
    team = tp.Team()
    whole = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4))
    for parameter in whole.parameters():
        parameter.data.copy_(integers(*parameter.shape))
    plan = {
        "0": partial(tp.ColumnParallelLinear.split, sequence_parallel=True),
        "2": partial(tp.RowParallelLinear.split, sequence_parallel=True),
    }
    split = tp.parallelize(copy.deepcopy(whole), plan, team)
    compiled = torch.compile(split, backend="aot_eager")
    try:
        torch.compile(nn.Identity(), backend="aot_eager")(torch.ones(1))
    except RuntimeError as error:  # not on every version of Python
        pytest.skip(f"torch {torch.__version__} cannot compile here: {error}")
    x = integers(2 * team.size, 4, salt=1)
    for _ in range(2):
        expected, found = whole(x), compiled(rows_of(x, team))
        assert torch.equal(found, rows_of(expected, team))
        expected.sum().backward()
        found.sum().backward()
    for name, parameter in split[0].named_parameters():
        gradient = whole[0].get_parameter(name).grad
        assert gradient is not None
        assert torch.equal(parameter.grad, rows_of(gradient, team))  # type: ignore[arg-type]


# Models.


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel"),
    [(1, True), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)],
)
def test_training_equals_one_process(tp_size: int, sequence_parallel: bool) -> None:
    """On a grid of tp_size by whatever is left: some steps, then the checkpoint, then back."""
    if hvd.size() % tp_size:
        pytest.skip(f"{tp_size} does not divide {hvd.size()} ranks")
    grid = tp.init(tp_size)
    torch.manual_seed(0)
    reference = Transformer().double()
    model = copy.deepcopy(reference).split(grid.tp, sequence_parallel)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=grid.dp)
    own = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(20 if sequence_parallel else 5):
        losses = [reference(*batch(step, place)) for place in range(grid.dp.size())]
        own.zero_grad()
        torch.stack(losses).mean().backward()
        own.step()
        optimizer.zero_grad()
        loss = model(*batch(step, grid.dp.rank()))
        close(loss, losses[grid.dp.rank()])
        loss.backward()
        optimizer.step()
    whole = tp.unsplit_state_dict(model)
    expected = reference.state_dict()
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-8, atol=1e-8)

    torch.manual_seed(1)
    fresh = Transformer().double().split(grid.tp, sequence_parallel)
    tp.load_unsplit_state_dict(fresh, whole)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_shared_parameters_stay_shared(team: tp.Team) -> None:
    torch.manual_seed(0)
    whole = Transformer()
    whole.head.weight = whole.embedding.weight
    with pytest.raises(ValueError, match="embedding.weight and head.weight are one parameter; split all"):
        tp.parallelize(whole, {"head": tp.ColumnParallelLinear.split}, team)
    assert isinstance(whole.head, nn.Linear)
    model = copy.deepcopy(whole).split(team, sequence_parallel=True)
    assert model.head.weight is model.embedding.weight
    whole(*batch(0, 0)).backward()
    model(*batch(0, 0)).backward()
    assert whole.head.weight.grad is not None
    close(model.head.weight.grad, rows_of(whole.head.weight.grad, team))


def test_a_block_that_is_used_again_and_again(team: tp.Team) -> None:
    """It stands in the model under several names."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 4))
    whole = nn.Sequential(block, nn.Tanh(), block)
    model = copy.deepcopy(whole)
    plan = {"*0.0": tp.ColumnParallelLinear.split, "*2.0": tp.ColumnParallelLinear.split}
    tp.parallelize(model, plan | {"?.1": tp.RowParallelLinear.split}, team)
    assert model[0] is model[2]
    assert model[0][0].weight.shape == (12 // team.size, 4)
    x = torch.ones(3, 4)
    close(model(x), whole(x))
    state, expected = tp.unsplit_state_dict(model), whole.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


class OfVersionTwo(nn.Module):
    """Notes which version the state was of that it has loaded."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *others: Any) -> None:
        self.loaded = metadata.get("version")


def test_versions_of_modules_go_into_the_checkpoint_and_out(team: tp.Team, tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), OfVersionTwo())
    model = tp.parallelize(copy.deepcopy(whole), {"0": tp.ColumnParallelLinear.split}, team)
    torch.save(tp.unsplit_state_dict(model), tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt")
    assert state._metadata == whole.state_dict()._metadata
    whole.load_state_dict(state)
    tp.load_unsplit_state_dict(model, state)
    assert whole[2].loaded == model[2].loaded == 2


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping(team: tp.Team, max_norm: float) -> None:
    torch.manual_seed(0)
    whole = Transformer().double()
    whole.head.weight = whole.embedding.weight  # counts once
    model = copy.deepcopy(whole).split(team, sequence_parallel=True)
    for some in (whole, model):
        some(*batch(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
    close(tp.clip_grad_norm_(model, max_norm, team), expected)
    close(model.norm.weight.grad, whole.norm.weight.grad)
    assert whole.head.weight.grad is not None
    close(model.head.weight.grad, rows_of(whole.head.weight.grad, team))


def test_clipping_where_a_part_of_one_rank_is_nan(team: tp.Team) -> None:
    torch.manual_seed(0)
    model = Transformer().double().split(team, sequence_parallel=True)
    model(*batch(0, 0)).backward()
    if team.rank == 0:
        model.head.weight.grad[0, 0] = torch.nan
    assert tp.clip_grad_norm_(model, 1.0, team).isnan()
    assert all(p.grad.isnan().all() for p in model.parameters() if p.grad is not None)


def test_a_grid_is_made_once() -> None:
    for tp_size in (1, hvd.size()):
        first, second = tp.init(tp_size), tp.init(tp_size)
        assert first.tp.process_set.process_set_id == second.tp.process_set.process_set_id
        assert (first.tp.size, first.dp.size()) == (tp_size, hvd.size() // tp_size)
        assert first.tp.rank * first.dp.size() + first.dp.rank() < hvd.size()
