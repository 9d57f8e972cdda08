"""Arrays where operations take tensors: NumPy's, and those of a library for GPUs, which a simulated driver has here."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from cuda_lab import SimulatedGpus, simulated

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]

DTYPES = ["float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"]


def mine(shape: tuple[int, ...] = (6, 3), dtype: str = "float32", rank: int | None = None) -> np.ndarray:
    """Small integers, others on every rank."""
    count = int(np.prod(shape))
    return np.asarray(np.arange(count).reshape(shape) % 5 + (hvd.rank() if rank is None else rank), dtype)


def of_all(*arguments: Any) -> list[np.ndarray]:
    return [mine(*arguments, rank=rank) for rank in range(hvd.size())]


def same(result: object, expected: np.ndarray) -> bool:
    """To the type."""
    assert type(result) is np.ndarray
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    return bool((result == expected).all())


def total(shape: tuple[int, ...] = (6, 3), dtype: str = "float32") -> np.ndarray:
    """The sum over ranks."""
    return np.asarray(np.sum(of_all(shape, dtype), axis=0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 2), (1,), (6, 3), (40_001,)], ids=str)
def test_allreduce(shape: tuple[int, ...], dtype: str) -> None:
    array = mine(shape, dtype)
    before = array.copy()
    assert same(hvd.allreduce(array, op=hvd.Sum), total(shape, dtype))
    assert same(hvd.synchronize(hvd.allreduce_async(tensor=array, op=hvd.Sum)), total(shape, dtype))
    assert same(array, before)
    assert hvd.allreduce_(array, op=hvd.Sum) is array
    assert same(array, total(shape, dtype))


def test_allreduce_in_place_as_a_handle() -> None:
    array = mine()
    handle = hvd.allreduce_async_(array, op=hvd.Sum)
    assert hvd.synchronize(handle) is array
    assert same(array, total())


@pytest.mark.parametrize("op", [hvd.Average, hvd.Max, hvd.Adasum], ids=str)
def test_other_ops(op: int) -> None:
    if op is hvd.Adasum and hvd.size() & (hvd.size() - 1):
        pytest.skip("Adasum needs a power of two of ranks")
    expected = hvd.allreduce(torch.from_numpy(mine()), op=op).numpy()
    array = mine()
    assert same(hvd.allreduce(array, op=op), expected)
    assert hvd.allreduce_(array, op=op) is array
    assert same(array, expected)


def test_compression() -> None:
    assert same(hvd.allreduce(mine(), op=hvd.Sum, compression=hvd.Compression.bf16), total())


@pytest.mark.parametrize("start", [hvd.grouped_allreduce, hvd.grouped_allreduce_async], ids=["now", "handle"])
def test_groups_of_both(start: Callable[..., Any]) -> None:
    """A tensor comes back as a tensor, an array as an array."""
    found = start([mine(), torch.from_numpy(mine((4,))), mine((2,), "int32")], op=hvd.Sum)
    first, second, third = hvd.synchronize(found) if isinstance(found, hvd.Handle) else found
    assert same(first, total())
    assert type(second) is torch.Tensor
    assert same(second.numpy(), total((4,)))
    assert same(third, total((2,), "int32"))


@pytest.mark.parametrize("start", [hvd.grouped_allreduce_, hvd.grouped_allreduce_async_], ids=["now", "handle"])
def test_groups_in_place(start: Callable[..., Any]) -> None:
    arrays = [mine(), torch.from_numpy(mine((4,))), mine((2,), "int32")]
    found = start(arrays, op=hvd.Sum)
    results = hvd.synchronize(found) if isinstance(found, hvd.Handle) else found
    assert all(result is array for result, array in zip(results, arrays, strict=True))
    assert same(arrays[0], total())
    assert same(arrays[1].numpy(), total((4,)))
    assert same(arrays[2], total((2,), "int32"))


def test_allgather() -> None:
    parts = [mine((rank + 1, 2), "int64", rank) for rank in range(hvd.size())]
    expected, own = np.concatenate(parts), parts[hvd.rank()]
    assert same(hvd.allgather(own), expected)
    assert same(hvd.synchronize(hvd.allgather_async(own, name="rows")), expected)
    for group in (hvd.grouped_allgather([own, own[:1]]), hvd.synchronize(hvd.grouped_allgather_async([own, own[:1]]))):
        assert same(group[0], expected)
        assert same(group[1], np.concatenate([part[:1] for part in parts]))


def test_allgather_of_bools() -> None:
    assert same(hvd.allgather(mine() > 2), np.concatenate(of_all()) > 2)


def test_broadcast() -> None:
    root = hvd.size() - 1
    expected, array = mine(rank=root), mine()
    assert same(hvd.broadcast(array, root), expected)
    assert same(hvd.synchronize(hvd.broadcast_async(array, root)), expected)
    assert same(array, mine())
    assert hvd.broadcast_(array, root) is array
    assert same(array, expected)
    array = mine()
    assert hvd.synchronize(hvd.broadcast_async_(array, root)) is array
    assert same(array, expected)


def test_alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    rows = np.arange(2 * size) + 100 * rank
    expected = np.array([100 * other + 2 * rank + i for other in range(size) for i in range(2)])
    assert same(hvd.alltoall(rows), expected)
    for received, counts in (hvd.synchronize(hvd.alltoall_async(rows)), hvd.alltoall(rows, splits=np.full(size, 2))):
        assert same(received, expected)
        assert same(counts, np.full(size, 2, np.int32))


def test_reducescatter() -> None:
    size, rank = hvd.size(), hvd.rank()
    expected = total((2 * size, 3))[2 * rank : 2 * rank + 2]
    array = mine((2 * size, 3))
    assert same(hvd.reducescatter(array, op=hvd.Sum), expected)
    assert same(hvd.synchronize(hvd.reducescatter_async(array, op=hvd.Sum)), expected)
    assert same(hvd.grouped_reducescatter([array], op=hvd.Sum)[0], expected)
    assert same(hvd.synchronize(hvd.grouped_reducescatter_async([array], op=hvd.Sum))[0], expected)


@pytest.mark.parametrize("layout", ["transposed", "strided", "fortran"])
def test_not_contiguous(layout: str) -> None:
    def laid_out(array: np.ndarray) -> np.ndarray:
        if layout == "strided":
            return np.repeat(array, 2, axis=0)[::2]
        return np.asfortranarray(array) if layout == "fortran" else np.ascontiguousarray(array.T).T

    array = laid_out(mine())
    assert not array.flags.c_contiguous
    assert same(hvd.allreduce(array, op=hvd.Sum), total())
    assert hvd.allreduce_(array, op=hvd.Sum) is array
    assert same(array, total())


def test_read_only_arrays_are_read() -> None:
    array = mine()
    array.flags.writeable = False
    assert same(hvd.allreduce(array, op=hvd.Sum), total())
    assert same(hvd.broadcast(array, 0), mine(rank=0))
    for operate in (hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises(
            ValueError, match=rf"{operate.__name__} 'fixed': the numpy.ndarray is read-only; pass a copy"
        ):
            operate(array, name="fixed")
    with pytest.raises(ValueError, match="broadcast_: the numpy.ndarray is read-only"):
        hvd.broadcast_(array, 0)
    with pytest.raises(ValueError, match="grouped_allreduce_: the numpy.ndarray is read-only"):
        hvd.grouped_allreduce_([mine(), array])
    assert same(array, mine())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, complex), "cannot communicate torch.complex128"),
        (np.zeros(3, np.uint32), "cannot communicate torch.uint32"),
        (np.array(["a"]), "allreduce 'odd': torch cannot see this numpy.ndarray"),
        (np.zeros(3, ">f4"), "allreduce 'odd': torch cannot see this numpy.ndarray"),
        (np.arange(6.0)[::-1], "allreduce 'odd': torch cannot see this numpy.ndarray"),
        ([1.0, 2.0], "expected a torch.Tensor, got list"),
        (3.0, "expected a torch.Tensor, got float; pass torch.as_tensor"),
    ],
    ids=["complex", "uint32", "text", "byte order", "negative stride", "list", "float"],
)
def test_what_is_refused(array: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hvd.allreduce(array, name="odd")
    assert same(hvd.allreduce(mine(), op=hvd.Sum), total())


def test_a_result_is_the_users_own() -> None:
    """It may be written, and shares no memory with what came in, also where one rank is alone."""
    array = mine()
    for result in (hvd.allreduce(array), hvd.allgather(array), hvd.broadcast(array, 0)):
        result[:] = -1
    assert same(array, mine())


# On a GPU.


class GpuArray:
    """As CuPy's: memory of the device, exported by DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> object:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


class InterfaceArray:
    """As Numba's: memory of the device, exported by the CUDA array interface, made by stream 7."""

    def __init__(self, tensor: torch.Tensor, read_only: bool = False) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), read_only),
            "stream": 7,
        }


class Gpus(SimulatedGpus):
    """Sees arrays as torch's CUDA build would, and notes which streams were to wait for which."""

    waits: list[tuple[str, int | None]]

    def tensor_of(self, array: Any, stream: int | None) -> torch.Tensor:
        self.waits.append(("torch", stream))
        interface = array.__cuda_array_interface__
        numel = int(np.prod(interface["shape"]))
        memory = (ctypes.c_char * (4 * numel)).from_address(interface["data"][0])
        return torch.frombuffer(memory, dtype=torch.float32).reshape(interface["shape"])

    def let_follow(self, stream: int | None, tensor: torch.Tensor) -> None:
        self.waits.append(("array", stream))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    found = Gpus(simulated())
    found.waits = []
    monkeypatch.setattr("hvdlite.torch.device.gpus", found)
    yield found
    found.cuda.synchronize(found.stream)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The module of `GpuArray`, with ``from_dlpack``; what that was given."""
    imported: list[torch.Tensor] = []

    def from_dlpack(tensor: torch.Tensor) -> GpuArray:
        imported.append(tensor)
        return GpuArray(torch.from_dlpack(tensor))

    module = types.ModuleType("gpu_arrays")
    monkeypatch.setattr(module, "from_dlpack", from_dlpack, raising=False)
    monkeypatch.setitem(sys.modules, "gpu_arrays", module)
    monkeypatch.setattr(GpuArray, "__module__", "gpu_arrays.core")
    return imported


def late(gpus: Gpus, values: np.ndarray) -> torch.Tensor:
    tensor = gpus.cuda.tensor(values.shape)
    gpus.later(lambda: tensor.copy_(torch.from_numpy(values)), 0.02)
    return tensor


def test_arrays_by_dlpack(gpus: Gpus, library: list[torch.Tensor]) -> None:
    array = GpuArray(late(gpus, mine()))
    result = hvd.allreduce(array, op=hvd.Sum)  # type: ignore[type-var]
    assert type(result) is GpuArray
    assert gpus.ordinal_of(result.tensor) == 0
    gpus.cuda.synchronize(gpus.stream)
    assert same(result.tensor.numpy(), total())
    library.clear()
    assert hvd.allreduce_(array, op=hvd.Sum) is array  # type: ignore[comparison-overlap, arg-type]
    assert [tensor.data_ptr() for tensor in library] == [
        array.tensor.data_ptr()
    ]  # which the library's stream waits for
    gpus.cuda.synchronize(gpus.stream)
    assert same(array.tensor.numpy(), total())


def test_arrays_by_the_cuda_array_interface(gpus: Gpus) -> None:
    array = InterfaceArray(late(gpus, mine()))
    assert hvd.allreduce_(array, op=hvd.Sum) is array  # type: ignore[comparison-overlap, arg-type]
    assert gpus.waits == [("torch", 7), ("array", 7)]
    gpus.cuda.synchronize(gpus.stream)
    assert same(array.tensor.numpy(), total())


def test_no_way_to_make_a_result(gpus: Gpus) -> None:
    array = InterfaceArray(gpus.cuda.tensor((3,)))
    with pytest.raises(
        ValueError, match="allreduce 'x': test_arrays has no from_dlpack to make a result; operate in place"
    ):
        hvd.allreduce(array, name="x")  # type: ignore[type-var]


def test_read_only_on_a_gpu(gpus: Gpus) -> None:
    array = InterfaceArray(gpus.cuda.tensor((3,)), read_only=True)
    with pytest.raises(ValueError, match="allreduce_: the test_arrays.InterfaceArray is read-only"):
        hvd.allreduce_(array)  # type: ignore[arg-type]
