"""SyncBatchNorm without other processes: how statistics are combined, what becomes of a model's layers."""

from __future__ import annotations

import pytest
import torch

import hvdlite.torch as hvd
from fake_world import Universe
from hvdlite.torch.sync_batch_norm import combine, local_statistics


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(rows, 4, 3, dtype=torch.float64) * 3 + rows for rows in (5, 0, 1, 30)]
    count, mean, variance = combine(torch.stack([local_statistics(part) for part in parts]))
    whole = torch.cat(parts)
    assert count == 36 * 3
    torch.testing.assert_close(mean, whole.mean((0, 2)), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(variance, whole.var((0, 2), correction=0), rtol=1e-13, atol=0)


def test_a_mean_far_larger_than_the_spread() -> None:
    """The variance of 0, 0, 2, 2 is 1, wherever they stand. Squares of 1e9 leave no digit of it in fp64."""
    parts = [torch.tensor([[0.0], [0.0]]), torch.tensor([[2.0], [2.0]])]
    rows = torch.stack([local_statistics(part.double() + 1e9) for part in parts])
    assert [value if isinstance(value, int) else value.tolist() for value in combine(rows)] == [4, [1e9 + 1], [1.0]]


def test_a_count_that_fp32_does_not_hold() -> None:
    most = float(2**24 + 1)
    rows = torch.tensor([[most, 1.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    assert combine(rows)[0] == 2**24 + 2


def test_no_values() -> None:
    count, mean, variance = combine(local_statistics(torch.empty(0, 2, 5)).unsqueeze(0))
    assert (count, mean.tolist(), variance.tolist()) == (0, [0, 0], [0, 0])


def test_one_communication_in_forward(universe: Universe) -> None:
    """Here every rank has the same batch, so that all together normalize like one."""
    world = universe.start(3)
    torch.manual_seed(0)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    layer = hvd.SyncBatchNorm(2, dtype=torch.float64, momentum=1.0)
    alone = torch.nn.BatchNorm1d(2, dtype=torch.float64, momentum=1.0)
    torch.testing.assert_close(layer(x), alone(x), rtol=1e-13, atol=1e-13)
    alone(torch.cat([x] * 3))
    torch.testing.assert_close(layer.running_var, alone.running_var, rtol=1e-13, atol=0)
    assert [(each.request.label, each.shapes) for each in world.submitted] == [("allgather", [(1, 5)])]


def test_alone_and_in_eval_nothing_is_communicated(universe: Universe) -> None:
    x = torch.randn(4, 2)
    layer = hvd.SyncBatchNorm(2)
    assert torch.equal(layer.eval()(x), torch.nn.BatchNorm1d(2).eval()(x))  # before init() as well
    world = universe.start(1, nodes=1)
    assert torch.equal(layer.train()(x), torch.nn.BatchNorm1d(2)(x))
    assert world.submitted == []
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("shape", [(3,), (4, 3), (4, 3, 2, 2)])
def test_inputs_that_do_not_fit(universe: Universe, shape: tuple[int, ...]) -> None:
    universe.start(2)
    with pytest.raises(
        ValueError, match=r"SyncBatchNorm\(2\) expects an input of shape \(N, 2, ...\), got \(" + str(shape[0])
    ):
        hvd.SyncBatchNorm(2)(torch.ones(shape))
    with pytest.raises(ValueError, match="process_set is 7"):
        hvd.SyncBatchNorm(2, process_set=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{}, {"affine": False}, {"track_running_stats": False}])
def test_state_dicts_fit_both_ways(arguments: dict[str, bool]) -> None:
    theirs, ours = torch.nn.BatchNorm2d(3, **arguments), hvd.SyncBatchNorm(3, **arguments)
    for value in theirs.state_dict().values():
        value.add_(1)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    torch.nn.BatchNorm2d(3, **arguments).load_state_dict(ours.state_dict())


def test_convert() -> None:
    shared = torch.nn.BatchNorm2d(3)
    model = torch.nn.Sequential(
        shared,
        torch.nn.ModuleDict({"a": torch.nn.BatchNorm1d(2, eps=0.5, momentum=None, affine=False), "b": shared}),
        torch.nn.BatchNorm3d(4, track_running_stats=False).eval(),
        torch.nn.SyncBatchNorm(5),
        torch.nn.InstanceNorm2d(3),
        hvd.SyncBatchNorm(6),
    )
    before = list(model)
    objects = [*model.parameters(), *model.buffers()]
    assert hvd.convert_sync_batchnorm(model) is model
    after = list(model)
    assert [type(layer) for layer in after] == [
        hvd.SyncBatchNorm, torch.nn.ModuleDict, hvd.SyncBatchNorm, hvd.SyncBatchNorm, torch.nn.InstanceNorm2d,
        hvd.SyncBatchNorm,
    ]  # fmt: skip
    assert after[5] is before[5]
    assert after[1]["b"] is after[0]
    inner = after[1]["a"]
    assert (inner.num_features, inner.eps, inner.momentum, inner.weight) == (2, 0.5, None, None)
    assert [layer.training for layer in after] == [True, True, False, True, True, True]
    assert after[2].running_mean is None
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], objects, strict=True))
    hvd.convert_sync_batchnorm(model)
    assert all(a is b for a, b in zip(model, after, strict=True))


def test_convert_a_layer_itself() -> None:
    layer = torch.nn.BatchNorm2d(3).double()
    converted = hvd.convert_sync_batchnorm(layer)
    assert isinstance(converted, hvd.SyncBatchNorm)
    assert converted.weight is layer.weight


def test_convert_a_lazy_layer() -> None:
    model = torch.nn.Sequential(torch.nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="run a batch through the model first"):
        hvd.convert_sync_batchnorm(model)
    model(torch.ones(2, 3))
    hvd.convert_sync_batchnorm(model)
    assert isinstance(model[0], hvd.SyncBatchNorm)
