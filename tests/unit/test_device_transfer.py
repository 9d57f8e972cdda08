"""Tensors of a GPU on their way through the host: a GPU that does not come is an error, in time."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest

from cuda_lab import Cuda, simulated_for
from hvdlite import _native
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.submission import Submission
from hvdlite.device_transfer import Bucket, DeviceTransfer
from hvdlite.dtypes import DType
from hvdlite.errors import CollectiveError, RankFailedError
from hvdlite.memory.views import OnDevice, TensorView
from hvdlite.operations.allreduce import Allreduce
from hvdlite.recorder import Recorder

NUMEL = 1000


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    cuda = simulated_for(0)
    with cuda.current():
        yield cuda


class Tensor:
    """Of int32 on the GPU, that an operation changes in place; its stream may be held up."""

    def __init__(self, cuda: Cuda) -> None:
        self.stream = stream = cuda.stream()
        self.address = cuda.allocate(4 * NUMEL)
        self.go_on = threading.Event()
        self._cuda = cuda
        assert stream.value is not None
        self._handle = stream.value
        self.set(7)

    def set(self, value: int) -> None:
        data = (ctypes.c_int * NUMEL)(*[value] * NUMEL)
        self._cuda.launch(self.stream, lambda: ctypes.memmove(self.address, data, 4 * NUMEL))

    def hold(self) -> None:
        self._cuda.launch(self.stream, lambda: self.go_on.wait(60))

    def bucket(self) -> Bucket:
        where = OnDevice(0, _native.Moment(0, self._handle), lambda: self._handle)
        views = [TensorView(self.address, (NUMEL,), DType.INT32, self, where)]
        request = Allreduce.of("gradient", views)
        return [(Response(request, 0), Submission(request, 0, views, views))]

    def values(self) -> set[int]:
        return set((ctypes.c_int * NUMEL).from_address(self.address))


def double(bucket: Bucket) -> str:
    for _, submission in bucket:
        (view,) = submission.inputs
        numbers = (ctypes.c_int * NUMEL).from_address(view.address)
        for i in range(NUMEL):
            numbers[i] *= 2
    return "doubled"


def test_there_and_back(cuda: Cuda) -> None:
    tensor = Tensor(cuda)
    transfer = DeviceTransfer(Recorder(), 60.0, lambda: None)
    for expected in (14, 28):
        assert transfer.run(tensor.bucket(), double, "gradient") == "doubled"
        assert tensor.values() == {expected}


def test_a_gpu_that_does_not_come(cuda: Cuda) -> None:
    """What it has yet to write is not given to anybody else."""
    tensor = Tensor(cuda)
    tensor.hold()
    transfer = DeviceTransfer(Recorder(), 0.1, lambda: None)
    start = time.monotonic()
    with pytest.raises(CollectiveError, match="'gradient': this rank's GPU did not come so far within 0.1 s; if it is"):
        transfer.run(tensor.bucket(), double, "gradient")
    assert time.monotonic() - start < 30
    (device,) = transfer._devices.values()
    places = [block.address for block in device._blocks]
    del transfer, device
    assert all(cuda.is_pinned(place) for place in places)
    tensor.go_on.set()
    cuda.synchronize(tensor.stream)


def test_a_job_that_fails_meanwhile(cuda: Cuda) -> None:
    tensor = Tensor(cuda)
    tensor.hold()

    def check() -> None:
        raise RankFailedError(3, "rank 3 is gone")

    with pytest.raises(RankFailedError, match="rank 3 is gone"):
        DeviceTransfer(Recorder(), 60.0, check).run(tensor.bucket(), double, "gradient")
    tensor.go_on.set()
    cuda.synchronize(tensor.stream)
