"""What backends do with tensors that live anywhere, but for allreduce; and how ranks tell one another their sizes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from mpi4py import MPI

from backend_lab import RANK, SIZE, WAYS, WINDOW, Lab, allocate, assert_none, encode, nothing_failed, reduced, values_of
from hvdlite.collectives import shm_exchange
from hvdlite.collectives.base import Backend, ScatterReduction
from hvdlite.collectives.exchange import Exchange
from hvdlite.collectives.pairwise import PairwiseExchange
from hvdlite.collectives.shm import ShmBackend
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.memory.layout import Layout
from hvdlite.memory.views import Buffer
from hvdlite.recorder import Recorder

BYTE = DType.UINT8
EDGES = [0, 1, 63, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5]


@pytest.fixture(scope="module", params=WAYS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_exchange, "_WINDOW_BYTES", WINDOW)
        backend = Lab().build(request.param)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def staging(backend: Backend) -> Buffer:
    return allocate(backend, WINDOW, BYTE)


def bytes_of(rank: int, count: int, salt: int) -> np.ndarray:
    return encode(values_of(rank, count, salt), BYTE)


def broadcast(
    backend: Backend, staging: Buffer, numels: Sequence[int], root: int, salt: int, missing: int | None
) -> str | None:
    """What is wrong afterwards. Another rank than the root does not want tensor ``missing``."""
    arrays = [bytes_of(RANK, numel, salt + i) for i, numel in enumerate(numels)]
    layout = Layout.of(list(numels), BYTE, BYTE)
    lost = missing if root != RANK else None
    addresses = [0 if i == lost else array.ctypes.data for i, array in enumerate(arrays)]
    tensors = backend.memory.tensors(addresses, layout.numels, layout.offsets)
    backend.broadcast_tensors(tensors, layout.end, root, staging=staging)
    for i, (array, numel) in enumerate(zip(arrays, numels, strict=True)):
        expected = bytes_of(RANK if i == lost else root, numel, salt + i)
        if not np.array_equal(array, expected):
            return f"broadcast of {numels} from {root}: tensor {i} is wrong"
    return None


@pytest.mark.parametrize("root", range(SIZE))
def test_broadcast(backend: Backend, staging: Buffer, root: int) -> None:
    lists: list[list[int]] = [[], *([numel] for numel in EDGES), EDGES, [0, 0, 5], [1] * 20]
    problems = [
        broadcast(backend, staging, numels, root, salt, missing)
        for salt, numels in enumerate(lists)
        for missing in (None, 0)
    ]
    assert_none(*problems)


def gather(
    backend: Backend, staging: Buffer, nbytes: Sequence[int], salt: int, unwanted: Callable[[int], bool]
) -> str | None:
    source = bytes_of(RANK, nbytes[RANK], salt)
    results = [np.full(count, 7, np.uint8) for count in nbytes]
    targets = [0 if unwanted(rank) else result.ctypes.data for rank, result in enumerate(results)]
    backend.allgather_tensors(source.ctypes.data, targets, nbytes, staging=staging)
    source[:] = 0  # the owner goes on at once
    for rank, result in enumerate(results):
        expected = np.full(nbytes[rank], 7, np.uint8) if unwanted(rank) else bytes_of(rank, nbytes[rank], salt)
        if not np.array_equal(result, expected):
            return f"allgather of {nbytes}: what rank {rank} has given is wrong"
    return None


def test_allgather(backend: Backend, staging: Buffer) -> None:
    problems = []
    for salt, numel in enumerate(EDGES):
        for nbytes in (
            [numel] * SIZE,
            [numel * (rank == SIZE - 1) for rank in range(SIZE)],
            [*range(numel, numel + SIZE)],
        ):
            problems.append(gather(backend, staging, nbytes, salt, lambda _: False))
            problems.append(gather(backend, staging, nbytes, salt, lambda rank: (rank + RANK) % 2 == 0))
    assert_none(*problems)


def scatter(
    backend: Backend,
    staging: Buffer,
    numels: Sequence[int],
    dtype: DType,
    wire: DType,
    reduction: Reduction,
    salt: int,
    absent: int | None = None,
) -> str | None:
    """Rank ``absent`` gives zeros that nobody stored, and wants no result."""
    bounds = [0, *itertools.accumulate(numels)]
    whole = encode(values_of(RANK, bounds[-1], salt), dtype)
    output = np.full(numels[RANK] * dtype.itemsize, 7, np.uint8)
    places = [whole.ctypes.data + bound * dtype.itemsize for bound in bounds[:-1]]
    is_absent = absent == RANK
    job = ScatterReduction(
        [0] * SIZE if is_absent else places, 0 if is_absent else output.ctypes.data, numels, dtype, reduction
    )
    backend.reduce_scatter_tensors(job, staging=staging.as_dtype(wire))
    if is_absent:
        return None if (output == 7).all() else "reduce_scatter: it wrote what nobody wants"
    op, prescale, postscale = reduction
    expected = reduced(op, bounds[-1], dtype, prescale, postscale, salt)
    if absent is not None:
        expected = expected - values_of(absent, bounds[-1], salt)
    if np.array_equal(output, encode(expected[bounds[RANK] : bounds[RANK + 1]], dtype)):
        return None
    return f"reduce_scatter of {numels} {dtype.label} as {wire.label}, {op.label}: wrong"


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (DType.FLOAT32, DType.FLOAT32),
        (DType.INT64, DType.INT64),
        (DType.BFLOAT16, DType.BFLOAT16),
        (DType.UINT8, DType.UINT8),
        (DType.FLOAT32, DType.FLOAT16),
    ],
    ids=lambda dtype: dtype.label,
)
def test_reduce_scatter(backend: Backend, staging: Buffer, dtype: DType, wire: DType) -> None:
    problems = []
    for salt, numel in enumerate((0, 1, 7, 16, 64, 65, 300)):
        for numels in (
            [numel] * SIZE,
            [numel * (rank == 0) for rank in range(SIZE)],
            [numel + rank for rank in range(SIZE)],
        ):
            for reduction in (Reduction(), Reduction(ReduceOp.MAX), Reduction(ReduceOp.SUM, 2.0, 0.5)):
                problems.append(scatter(backend, staging, numels, dtype, wire, reduction, salt))
            if SIZE > 1:
                problems.append(scatter(backend, staging, numels, dtype, wire, Reduction(), salt, absent=SIZE - 1))
    assert_none(*problems)


def test_back_to_back(backend: Backend, staging: Buffer) -> None:
    """With operations on shared memory in between; each rank is now and then late."""
    common, own = random.Random(3), random.Random(100 + RANK)
    shared = allocate(backend, 64, DType.INT32)
    problems: list[str | None] = []
    for number in range(200):
        kind, count, root = common.randrange(4), common.choice(EDGES), common.randrange(SIZE)
        if own.random() < 0.1:
            time.sleep(own.random() * 2e-3)
        if kind == 0:
            problems.append(broadcast(backend, staging, [count, 3], root, number, None))
        elif kind == 1:
            problems.append(gather(backend, staging, [count + rank for rank in range(SIZE)], number, lambda _: False))
        elif kind == 2:
            numels = [count // 8 + rank for rank in range(SIZE)]
            problems.append(scatter(backend, staging, numels, DType.INT64, DType.INT64, Reduction(), number))
        else:
            backend.allreduce(shared).wait()
    assert_none(*problems)


@pytest.fixture(scope="module", params=["one node", "several"])
def exchange(request: pytest.FixtureRequest) -> Iterator[Exchange]:
    if request.param == "several":
        comm = MPI.COMM_WORLD.Dup()
        yield PairwiseExchange(comm, range(SIZE), timeout_s=60.0, check=nothing_failed, recorder=Recorder())
        comm.Free()
        return
    backend = Lab().build("windows")
    assert isinstance(backend, ShmBackend) and backend.exchange is not None
    yield backend.exchange


@pytest.mark.parametrize("width", [0, 1, 5, SIZE])
def test_everybody_is_told_the_numbers_of_all(exchange: Exchange, width: int) -> None:
    for turn in range(3):
        told = exchange.tell([2**40 * RANK + 10 * i + turn for i in range(width)], "")
        assert [list(row) for row in told] == [
            [2**40 * rank + 10 * i + turn for i in range(width)] for rank in range(SIZE)
        ]
