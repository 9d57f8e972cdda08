"""hvdlite.torch without other processes: what it accepts, what handles do, what travels (fake_world.py).

What operations and their gradients come to is tested between real ranks, in tests/mpi.
"""

from __future__ import annotations

import enum
import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import hvdlite
import hvdlite.torch as hvd
from fake_world import FakeWorld, Universe
from hvdlite.dtypes import DType
from hvdlite.errors import MismatchError, NotInitializedError, ShutDownError, UsageError
from hvdlite.torch.reduce_options import check_op
from hvdlite.torch.tensor_view import check_tensor, dtype_of, torch_dtype, view_of
from wrapper_lab import Sharded

OURS = (
    "cli",
    "compat",
    "integrations",
    "launch",
    "metrics_server",
    "ray",
    "remote_call",
    "tensor_parallel",
    "torch.elastic",
    "torch_store",
)
NOT_AT_ONCE = {f"hvdlite.{part}" for part in OURS} | {
    *("mpi4py", "mpi4py.MPI", "torch._dynamo", "torch.distributed", "torch.testing"),
    *("http.server", "statistics", "matplotlib", "plotly", "ray", "yaml"),
}


@pytest.fixture
def world(universe: Universe) -> FakeWorld:
    return universe.start(3)


def test_a_view_owns_the_memory_that_a_tensor_had() -> None:
    """``set_`` and ``.data =`` of a tensor in flight give it other memory; native code still writes to the old one."""
    for replace in (
        lambda tensor: tensor.set_(torch.zeros(5)),
        lambda tensor: setattr(tensor, "data", torch.zeros(5)),
    ):
        tensor = torch.arange(5.0)
        view = view_of(tensor)
        replace(tensor)
        assert view.owner.data_ptr() == view.address != tensor.data_ptr()
        assert torch.empty(0).set_(view.owner).tolist() == [0, 1, 2, 3, 4]


def test_everything_exported_exists() -> None:
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert len(set(hvd.__all__)) == len(hvd.__all__)


def test_tab_completion_shows_public_names() -> None:
    assert dir(hvd) == sorted(hvd.__all__)
    assert "sampler" in dir(hvd) and "optimizer" not in dir(hvd) and "torch" not in dir(hvd)


def test_importing_it_imports_nothing_that_most_programs_do_not_need() -> None:
    """torch's compiler takes a second per rank, MPI starts with its import, the others take milliseconds."""
    program = "import sys, torch; before = {*sys.modules}; import hvdlite.torch; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "hvdlite.torch" in done.stdout.split()
    assert not NOT_AT_ONCE & {*done.stdout.split()}


# Ops.


def test_ops_have_horovods_numbers() -> None:
    ops = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert [int(op) for op in ops] == [0, 1, 2, 3, 4, 5]
    assert [check_op(int(op)) for op in ops] == [check_op(op) for op in ops] == list(ops)


class Foreign(enum.IntEnum):
    SUM = 0


def test_ops_of_torch_distributed_go_by_their_names() -> None:
    """By their numbers SUM would be Average, and PRODUCT Adasum."""
    theirs = dist.ReduceOp
    pairs = [
        (theirs.SUM, hvd.Sum),
        (theirs.AVG, hvd.Average),
        (theirs.MIN, hvd.Min),
        (theirs.MAX, hvd.Max),
        (theirs.PRODUCT, hvd.Product),
    ]
    for op, ours in pairs:
        assert check_op(op) is ours
        assert check_op(theirs(op)) is ours


@pytest.mark.parametrize(
    "op", [6, -1, True, False, 1.0, np.int64(1), "Sum", None, Foreign.SUM, dist.ReduceOp.BAND, [hvd.Sum]], ids=repr
)
def test_what_is_no_op(op: Any) -> None:
    with pytest.raises(UsageError, match=r"op is .*; pass hvd\.Average, hvd\.Sum"):
        check_op(op)


@pytest.mark.parametrize("argument", ["prescale_factor", "postscale_factor"])
def test_a_factor_that_is_no_number(world: FakeWorld, argument: str) -> None:
    """It differs from itself, so that ranks would be told that they have passed different ones."""
    operations: list[Callable[..., object]] = [hvd.allreduce, hvd.allreduce_async_, hvd.reducescatter]
    for operation in operations:
        with pytest.raises(ValueError, match=f"{argument} is nan; pass a number"):
            operation(torch.ones(3), op=hvd.Sum, **{argument: math.nan})
    assert not world.submitted


def test_every_operation_takes_ops_of_torch_distributed(world: FakeWorld) -> None:
    theirs = dist.ReduceOp
    assert hvd.allreduce(torch.ones(1), op=theirs.SUM).item() == 6.0
    assert hvd.grouped_allreduce([torch.ones(1)], op=theirs.AVG)[0].item() == 2.0
    assert hvd.allreduce_(torch.ones(1), op=theirs.MAX).item() == 3.0
    assert hvd.reducescatter(torch.ones(3), op=theirs.SUM).tolist() == [6.0]
    rows = torch.eye(2).to_sparse()
    assert hvd.sparse_allreduce_async(rows, None, theirs.SUM)().to_dense().tolist() == [[3.0, 0.0], [0.0, 3.0]]


@pytest.mark.parametrize("op", [hvd.Min, hvd.Adasum, dist.ReduceOp.MAX, 77])
def test_a_wrong_op_is_the_programs_mistake(world: FakeWorld, op: Any) -> None:
    """hvd.elastic.run must not begin anew for ever, though Horovod's programs catch HorovodInternalError for it."""
    for call in (
        lambda: hvd.reducescatter(torch.ones(3), op=op),
        lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), None, op),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert isinstance(caught.value, hvd.HorovodInternalError)
        assert isinstance(caught.value, ValueError)
    assert not world.submitted


# Handles.


def test_the_result_is_copied_back_once(world: FakeWorld) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    assert handle.synchronize() is tensor
    assert torch.equal(tensor, 6 * torch.arange(6.0).reshape(2, 3).t())
    tensor.zero_()
    assert handle.synchronize().sum() == 0


def test_groups_are_one_operation(world: FakeWorld) -> None:
    a, b = torch.ones(2), torch.ones(3, dtype=torch.float64)
    results = hvd.grouped_allreduce([a, b], name="g", op=hvd.Sum)
    assert [result.tolist() for result in results] == [[6.0] * 2, [6.0] * 3]
    hvd.grouped_allgather([a], name="h")
    assert [each.names for each in world.submitted] == [["g.0", "g.1"], ["h.0"]]


def test_poll_and_synchronize(world: FakeWorld) -> None:
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    assert not hvd.poll(handle)
    result = hvd.synchronize(handle)
    assert result.item() == 6.0
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is result


@pytest.mark.parametrize("bad", [0, None, "allreduce.noname.0", torch.ones(1)])
def test_poll_and_synchronize_of_anything_else(bad: Any) -> None:
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(bad)
    with pytest.raises(ValueError, match="handle"):
        hvd.synchronize(bad)


def test_a_handle_keeps_its_tensors(world: FakeWorld) -> None:
    tensor = torch.ones(1000)
    kept = weakref.ref(tensor)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    del tensor
    gc.collect()
    assert kept() is not None
    assert hvd.synchronize(handle).sum() == 6000


def test_errors_come_at_synchronize(world: FakeWorld) -> None:
    world.error = MismatchError("shapes differ")
    handle = hvd.allreduce_async(torch.ones(1))
    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
        hvd.synchronize(handle)


def test_average_is_deprecated(world: FakeWorld) -> None:
    with pytest.warns(DeprecationWarning, match="op=hvd.Average"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == 6.0
    averages: list[Callable[[], torch.Tensor]] = [
        lambda: hvd.allreduce(torch.ones(1), average=True),
        lambda: hvd.allreduce_(torch.ones(1), average=True),
        lambda: hvd.grouped_allreduce([torch.ones(1)], average=True)[0],
    ]
    for average in averages:
        with pytest.warns(DeprecationWarning, match="op=hvd.Average") as raised:
            assert average().item() == 2.0
        assert raised[0].filename == __file__  # by default Python shows those of programs only
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(UsageError, match="hvd.Sum was passed as the second argument.*: pass op=hvd.Sum"):
        hvd.allreduce(torch.ones(1), hvd.Sum)  # type: ignore[arg-type]


def test_before_init() -> None:
    """One error for one mistake; Horovod's are a ValueError of rank(), and an internal one of operations."""
    assert not hvdlite.is_initialized()
    for call in (hvd.rank, hvd.barrier, hvd.join, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\) first") as caught:
            call()
        assert isinstance(caught.value, ShutDownError)
        assert isinstance(caught.value, ValueError)


# Compression.


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_compression_methods(name: str) -> None:
    compression = getattr(hvd.Compression, name)
    tensor = torch.tensor([0.1, -3.0], dtype=torch.float64)
    compressed, ctx = compression.compress(tensor)
    assert compressed.dtype == {"none": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    restored = compression.decompress(compressed, ctx)
    assert restored.dtype == tensor.dtype
    assert torch.allclose(restored, tensor, rtol=1e-2)
    whole = torch.arange(3)
    assert compression.compress(whole)[0] is whole


class _Halving(hvd.Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor / 2).double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return (tensor * 2).to(ctx)


class _OffsetFp16(hvd.Compression.fp16):
    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return super().compress(tensor + 1)


def test_compressors_of_users(world: FakeWorld) -> None:
    tensor = torch.ones(2, requires_grad=True)
    result = hvd.allreduce(tensor, op=hvd.Sum, compression=_Halving)
    assert result.dtype == torch.float32
    assert result.tolist() == [6.0, 6.0]
    result.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [6.0, 6.0]
    assert world.submitted[0].request.wire_dtype is None


def test_a_subclass_of_ours_is_a_users(world: FakeWorld) -> None:
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, compression=_OffsetFp16).item() == 12.0
    assert world.submitted[0].request.wire_dtype is None


# Tensors.


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_has_a_view(dtype: DType) -> None:
    tensor = torch.zeros(3, 2, dtype=torch_dtype(dtype))
    view = view_of(check_tensor(tensor, "t"))
    assert (view.dtype, view.shape, view.address) == (dtype, (3, 2), tensor.data_ptr())
    assert view.nbytes == tensor.numel() * tensor.element_size()
    assert view.owner.data_ptr() == tensor.data_ptr()


def test_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(ValueError, match="float8_e5m2.*uint8.*bfloat16.*bool"):
        dtype_of(torch.float8_e5m2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(world: FakeWorld, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=layout)
    with pytest.raises(ValueError, match=r"allreduce 't': the tensor is nested; pass torch\.nested\.to_padded_tensor"):
        hvd.allreduce(nested, name="t")
    assert not world.submitted


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Sharded(torch.ones(3)), r"a Sharded without memory of its own; pass tensor\.to_local\(\)"),
        (fake, "a FakeTensor without memory of its own; pass a plain tensor"),
        (freed, "a Tensor without memory of its own; pass a plain tensor"),
    ],
    ids=["wrapper", "fake", "freed"],
)
def test_tensors_without_memory_of_their_own(world: FakeWorld, make: Callable[[], torch.Tensor], text: str) -> None:
    """Their address is 0, which stands for zeros that nobody stored."""
    tensor = make()
    operations: list[Callable[..., object]] = [
        hvd.allreduce_async,
        hvd.allreduce_async_,
        hvd.allgather_async,
        hvd.reducescatter_async,
        hvd.alltoall_async,
        lambda t, name: hvd.broadcast_async_(t, 0, name),
    ]
    for operation in operations:
        with pytest.raises(ValueError, match=f"'t': {text}"):
            operation(tensor, name="t")
    assert not world.submitted


def test_tensors_with_memory(world: FakeWorld) -> None:
    class Tagged(torch.Tensor):
        pass

    for tensor in (torch.ones(2).as_subclass(Tagged), torch.nn.Parameter(torch.ones(2)), torch.ones(0)):
        assert hvd.allreduce(tensor.detach(), op=hvd.Sum).tolist() == [6.0] * tensor.numel()


def test_inside_vmap(world: FakeWorld) -> None:
    with pytest.raises(UsageError, match="maps over an operation between ranks"):
        torch.vmap(lambda row: hvd.allreduce(row))(torch.ones(2, 3))
    with pytest.raises(ValueError, match="without memory of its own"):
        torch.vmap(lambda row: hvd.allreduce_(row))(torch.ones(2, 3))
