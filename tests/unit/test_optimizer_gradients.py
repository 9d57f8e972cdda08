"""The way of gradients through DistributedOptimizer, among ranks that send multiples of them (fake_world.py).

What every op, dtype, compression and memory format comes to is tested between real ranks (tests/mpi/test_optimizer.py).
"""

from __future__ import annotations

import pytest
import torch

import hvdlite.torch as hvd
from fake_world import FakeWorld, Universe
from hvdlite.dtypes import DType
from hvdlite.engine import Engine
from hvdlite.errors import UsageError
from optimizer_lab import FACTOR, Scales, expected, reduced, wrap
from wrapper_lab import Sharded


@pytest.fixture(params=[(1, 4096), (2, 4096), (1, 1 << 30)], ids=["1 node", "2 nodes", "1 bucket"])
def world(universe: Universe, request: pytest.FixtureRequest) -> FakeWorld:
    nodes, bucket_bytes = request.param
    return universe.start(3, nodes=nodes, bucket_bytes=bucket_bytes)


@pytest.fixture(params=[1, 2], ids=["1 node", "2 nodes"])
def several_buckets(universe: Universe, request: pytest.FixtureRequest) -> FakeWorld:
    return universe.start(3, nodes=request.param, bucket_bytes=4096)


class _Halves(hvd.Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return (tensor * 2).to(ctx)


SHAPES = ((3, 5), (5,), (40, 400), (7,), (), (0, 2), (33, 3))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for step in range(4):
        model.loss(step + 1).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * (step + 1))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert model.p[1][0].item() == -2 * FACTOR * (1 + 2 + 3 + 4)


def test_across_nodes_the_first_step_shows_the_order_and_later_ones_live_in_the_buffer(universe: Universe) -> None:
    world = universe.start(3, nodes=2, bucket_bytes=4096)
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    homes = []
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        homes.append([p.grad.data_ptr() for p in model.p if p.numel()])
        optimizer.zero_grad()
    assert not any(each.has_home for each in world.buckets if ".assignment1." in each.name)
    assert all(each.has_home for each in world.buckets if ".assignment2." in each.name)
    assert homes[0] == homes[1] == homes[2]
    assert len(set(homes[0])) == len(homes[0])
    assert len(world.allocated) == 1
    assert all(pointer % 64 == 0 for pointer in homes[0])
    assert [each.name for each in world.of_kind("broadcast")] == ["optimizer0.assignment1.order"]


def test_on_one_node_gradients_are_reduced_where_autograd_left_them(universe: Universe) -> None:
    world = universe.start(3, nodes=1)
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    small = []
    for _ in range(4):
        world.submitted.clear()
        model.loss().backward()
        before = [p.grad.data_ptr() for p in model.p]
        optimizer.step()
        assert model.p[2].grad.data_ptr() == before[2]
        small.append(model.p[6].grad.data_ptr())
        optimizer.zero_grad()
    assert [(each.has_home, each.loose) for each in world.submitted] == [(False, 0)]
    assert world.allocated == []
    assert small[2] == small[3]  # in the block of the last assignment


def test_on_one_node_gradients_that_stay_move_into_homes(universe: Universe) -> None:
    world = universe.start(3, nodes=1)
    model = Scales((40, 400), (300, 300), (5,))
    optimizer = wrap(model)
    homes = []
    for _ in range(4):
        model.loss().backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        homes.append(world.buckets[-1].has_home)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert homes == [False, False, True, True]
    assert len(world.allocated) == 1
    assert world.buckets[-1].loose == 0


@pytest.mark.parametrize(
    ("nodes", "spare_cores", "bytes_per_s", "calls"),
    [(1, 0, 0.0, 1), (1, 1, 0.0, 5), (2, 0, 0.0, 5), (2, 0, 100e6, 20), (2, 0, 100e9, 5)],
)
def test_bucket_sizes(
    universe: Universe,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    spare_cores: int,
    bytes_per_s: float,
    calls: int,
) -> None:
    """20 MiB, in one bucket, in buckets of 8 MiB with small ones before and after, or in one of 1 MiB for each."""
    measured = property(lambda _: bytes_per_s, lambda *_: None)
    monkeypatch.setattr(Engine, "fastest_allreduce", measured, raising=False)
    world = universe.start(3, nodes=nodes)
    world.node.cores = 3 * torch.get_num_threads() + spare_cores
    model = Scales(*20 * [(1 << 18,)])
    optimizer = wrap(model)
    for _ in range(3):
        world.submitted.clear()
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(world.submitted) == calls


def test_buckets_go_while_backward_runs(several_buckets: FakeWorld) -> None:
    world = several_buckets
    model = Scales((300,), (300,), (300,), (300,))
    optimizer = wrap(model)
    submitted: list[int] = []
    for p in model.p:
        p.register_post_accumulate_grad_hook(lambda _: submitted.append(len(world.submitted)))
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    submitted.clear()
    world.submitted.clear()
    model.loss().backward()
    assert submitted[0] < submitted[-1] == len(world.submitted)
    assert [names for each in world.submitted for names in each.names] == ["p.3", "p.2 to p.1 (2 parameters)", "p.0"]


def test_buckets_go_without_what_is_switched_off(several_buckets: FakeWorld) -> None:
    model = Scales((300,), (300,), (300,), (300,))
    optimizer = wrap(model)
    for _ in range(4):
        several_buckets.submitted.clear()
        model.loss().backward()
        in_backward = len(several_buckets.submitted)
        optimizer.step()
        optimizer.zero_grad()
        model.p[1].requires_grad_(False)
    assert in_backward == len(several_buckets.submitted) == 3


def test_a_gradient_that_comes_twice_is_not_taken_for_another(universe: Universe) -> None:
    """Hooks of those between the first and the last only make a note."""
    universe.start(3, nodes=1, bucket_bytes=1 << 30)
    model = Scales((3,), (4,), (5,), (6,))
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.loss(leave_out=(0, 1)).backward()
    with pytest.raises(UsageError, match=r"'p\.2' was computed 2 times"):
        model.loss(leave_out=(1, 3)).backward()


def test_the_only_bucket_goes_in_step(universe: Universe) -> None:
    world = universe.start(3, nodes=1)
    world.node.cores = 3 * torch.get_num_threads()
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(4):
        world.submitted.clear()
        model.loss().backward()
        assert not world.submitted
        optimizer.step()
        optimizer.zero_grad()
    assert [each.background for each in world.submitted] == [False]  # by the thread that waits for it


def test_gradients_of_the_only_bucket_count_in_any_order(universe: Universe) -> None:
    """Hooks of those between the first and the last only make a note."""
    universe.start(3, nodes=1, bucket_bytes=1 << 30)
    model = Scales((3,), (4,), (5,), (6,), (20000,))
    optimizer = wrap(model)
    for order in [(0, 1, 2, 3, 4)] * 3 + [(4, 0, 2, 1, 3), (2, 4, 3, 0, 1), (1, 2, 3)]:
        with optimizer.no_sync():
            model.loss(10).backward()
        for i in order:
            model.loss(leave_out=tuple({0, 1, 2, 3, 4} - {i})).backward()
            with pytest.raises(UsageError, match=r"zero_grad\(\).*synchronize"):
                optimizer.zero_grad()
        optimizer.synchronize()
        assert reduced(model) == [(i + 1) * FACTOR * (11.0 if i in order else 10.0) for i in range(5)]
        optimizer.zero_grad()
    model.loss(leave_out=(0, 3, 4)).backward()
    model.loss(leave_out=(0, 3, 4)).backward()
    with pytest.raises(UsageError, match=r"'p\.\d' was computed 2 times"):
        optimizer.step()


@pytest.mark.parametrize("again", [(0,), (2,), (4,), (0, 1, 2, 3, 4)])
def test_gradients_of_the_only_bucket_that_come_twice(universe: Universe, again: tuple[int, ...]) -> None:
    universe.start(3, nodes=1, bucket_bytes=1 << 30)
    model = Scales((3,), (4,), (5,), (6,), (20000,))
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.loss().backward()
    with pytest.raises(UsageError, match=r"'p\.\d' was computed 2 times"):
        model.loss(leave_out=tuple({0, 1, 2, 3, 4} - set(again))).backward()
        optimizer.step()  # where only notes were made in backward


def test_small_gradients_live_in_the_buffer(universe: Universe) -> None:
    """They are copied into a block in any case."""
    world = universe.start(3, nodes=1)
    model = Scales((3, 5), (5,), (33, 3))
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert world.buckets[-1].has_home
    assert len(world.allocated) == 1


def test_the_order_of_arrival_is_that_of_autograd(several_buckets: FakeWorld) -> None:
    world = several_buckets
    model = Scales((300,), (300,), (300,), (300,))

    def loss() -> torch.Tensor:  # p2, p0, p3, p1 from the loss on backward
        x = model.p[1] * 1.0
        for i in (3, 0, 2):
            x = x * model.p[i]
        return x.sum()

    optimizer = wrap(model)
    for _ in range(2):
        world.submitted.clear()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = [name for each in world.buckets for name in each.names]
    assert sent[0] == "p.2"
    assert sent[-1] == "p.1"


def test_nothing_is_copied_where_gradients_accumulate_in_their_slots(several_buckets: FakeWorld) -> None:
    world = several_buckets
    model = Scales((40, 400), (300, 300))
    optimizer = wrap(model)
    for _ in range(3):
        world.submitted.clear()
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert [each.loose for each in world.submitted] == [0, 0]


def test_parameters_without_gradient_count_as_zeros(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for leave_out in [(0, 2), (), (2,), (0, 1, 3)]:
        model.loss(leave_out=leave_out).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR, leave_out)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


def test_a_step_without_backward_sends_zeros(world: FakeWorld) -> None:
    model = Scales((3,), (4,))
    optimizer = wrap(model)
    for _ in range(3):
        optimizer.step()
        assert reduced(model) == [0.0, 0.0]
        optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_backward_passes_per_step(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, backward_passes_per_step=3)
    for _ in range(3):
        calls = len(world.submitted)
        model.loss(1).backward()
        model.loss(10).backward()
        assert len(world.submitted) == calls
        model.loss(100).backward()
        assert (len(world.submitted) > calls) == (world.config.bucket_bytes == 4096)
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * 111)
        optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.set_backward_passes_per_step(1)
    model.loss(1).backward()
    optimizer.synchronize()
    assert reduced(model) == expected(model, FACTOR)


def test_fewer_passes_than_announced(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, backward_passes_per_step=3)
    for _ in range(2):
        model.loss().backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


def test_more_passes_than_announced(world: FakeWorld) -> None:
    model = Scales((2,), (3,))
    optimizer = wrap(model)
    model.loss().backward()
    with pytest.raises(UsageError, match=r"'p\.\d' was computed 2 times.*backward_passes_per_step is 1.*no_sync"):
        model.loss().backward()
    with pytest.raises(UsageError, match="between backward"):
        optimizer.set_backward_passes_per_step(2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync(world: FakeWorld, set_to_none: bool) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model)
    for _ in range(3):
        calls = len(world.submitted)
        with optimizer.no_sync():
            model.loss(1).backward()
            model.loss(10).backward()
            optimizer.synchronize_pending()
        assert len(world.submitted) == calls
        model.loss(100).backward()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR * 111)
        optimizer.zero_grad(set_to_none=set_to_none)


def test_what_no_sync_left_can_be_dropped(world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    with optimizer.no_sync():
        model.loss().backward()
    optimizer.zero_grad()
    assert reduced(model) == [None]


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, _Halves])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_changes_of_gradients_on_their_way_are_noticed(
    world: FakeWorld, compression: type[hvd.Compressor], set_to_none: bool
) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model, compression=compression)
    for step in range(6):
        model.loss().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_([model.p[step % 4 // 2]], 0.1)
            with pytest.warns(UserWarning, match=rf"'p\.{step % 4 // 2}' was changed.*skip_synchronize"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def test_zero_grad_between_backward_and_step(world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    with pytest.raises(UsageError, match=r"zero_grad\(\).*synchronize") as caught:
        optimizer.zero_grad()
    assert isinstance(caught.value, AssertionError)  # which Horovod raises
    optimizer.synchronize()
    optimizer.zero_grad()


def test_model_zero_grad_drops_views_without_harm(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for _ in range(3):
        model.zero_grad()
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)


def test_synchronizing_once(world: FakeWorld) -> None:
    """step() and closures then reduce what synchronize() has not."""
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    optimizer.synchronizes_once = True

    def step(how: str) -> float:
        optimizer.zero_grad()
        model.loss().backward()
        if how == "pending":
            optimizer.synchronize_pending()
            optimizer.synchronize_pending()
        elif how == "twice":
            optimizer.synchronize()
            optimizer.synchronize()
        return 0.0

    for how in ("pending", "twice", "not", "not"):
        step(how)
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.step(lambda how=how: step(how))
        assert reduced(model) == expected(model, FACTOR)
    optimizer.zero_grad()
    submitted = len(world.submitted)
    optimizer.step()  # where there was no backward pass, other ranks may have had one
    assert len(world.submitted) > submitted


def test_step_after_synchronize_warns(world: FakeWorld, recwarn: pytest.WarningsRecorder) -> None:
    model = Scales((3,))
    optimizer = wrap(model)
    model.loss().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    recwarn.clear()
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    # A step that was left out (an overflow under mixed precision) is no reason to warn in the next one.
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()
    assert not recwarn.list


def test_predivide(world: FakeWorld) -> None:
    model = Scales((3,))
    optimizer = wrap(model, gradient_predivide_factor=4.0)
    model.loss().backward()
    optimizer.step()
    assert world.buckets[0].request.reduction == (hvd.Average, 0.25, 4.0)
    assert reduced(model) == [FACTOR]


def test_fp16_compression_is_the_runtimes(world: FakeWorld) -> None:
    model = Scales(*SHAPES)
    optimizer = wrap(model, compression=hvd.Compression.fp16)
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()
    assert all(each.request.wire_dtype is DType.FLOAT16 for each in world.buckets)
    assert not world.allocated


def test_gradients_in_an_odd_layout(world: FakeWorld) -> None:
    model = Scales((200, 100), (4, 5))
    optimizer = wrap(model)
    for _ in range(3):
        for i, p in enumerate(model.p):
            p.grad = torch.full(p.shape[::-1], i + 1.0).t()
        optimizer.synchronize()
        assert reduced(model) == expected(model, FACTOR)
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    for _ in range(3):
        loss = torch.stack([(p - 2).square().sum() for p in model.p]).sum()
        loss.backward(create_graph=True)
        optimizer.synchronize()
        assert all(p.grad is not None and not p.grad.requires_grad for p in model.p)
        assert reduced(model) == [-4 * FACTOR, -4 * FACTOR]
        optimizer.zero_grad()


@pytest.mark.parametrize("numel", [3, 20000])
def test_a_gradient_without_memory_of_its_own(world: FakeWorld, numel: int) -> None:
    model = Scales((numel,), (5,))
    optimizer = wrap(model)
    for _ in range(3):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    gradient = Sharded(torch.ones(numel))
    model.p[0].grad = gradient
    with pytest.raises(ValueError, match=r"gradient of 'p\.0': a Sharded without memory of its own; pass .*to_local"):
        optimizer.step()
    assert gradient.to_local().tolist() == [1.0] * numel


def test_parameters_converted_after_the_first_step(world: FakeWorld) -> None:
    model = Scales((3,), (20000,))
    optimizer = wrap(model)
    model.double()  # before it is fine
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.half()
    with pytest.raises(ValueError, match=r"'p\.\d' is torch\.float16.*torch\.float64"):
        model.loss().backward()
