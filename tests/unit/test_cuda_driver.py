"""What streams and events promise, on a GPU as in the simulated driver; and what hvdlite makes of it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from cuda_lab import INVALID_CONTEXT, NOT_PERMITTED, Cuda, simulated
from hvdlite import _native

PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def cuda() -> Cuda:
    return simulated()


@pytest.fixture
def gate(cuda: Cuda) -> Iterator[Callable[[ctypes.c_void_p], threading.Event]]:
    """``gate(stream)`` holds a stream up until the event that it returns is set, at the latest when the test ends."""
    gates: list[threading.Event] = []

    def close(stream: ctypes.c_void_p) -> threading.Event:
        opened = threading.Event()
        gates.append(opened)
        cuda.launch(stream, lambda: opened.wait(PATIENCE_S))
        return opened

    yield close
    for opened in gates:
        opened.set()


Gate = Callable[[ctypes.c_void_p], threading.Event]


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-4)
    return condition()


def test_a_call_does_not_wait_for_what_it_enqueues(cuda: Cuda, gate: Gate) -> None:
    stream, event = cuda.stream(), cuda.event()
    opened = gate(stream)
    cuda.record(event, stream)
    assert not cuda.is_reached(event)
    opened.set()
    assert soon(lambda: cuda.is_reached(event))


def test_streams_know_nothing_of_one_another(cuda: Cuda, gate: Gate) -> None:
    held, free, event = cuda.stream(), cuda.stream(), cuda.event()
    gate(held)
    cuda.record(event, free)
    assert soon(lambda: cuda.is_reached(event))


def test_a_stream_waits_for_an_event(cuda: Cuda, gate: Gate) -> None:
    first, second = cuda.stream(), cuda.stream()
    reached, after = cuda.event(), cuda.event()
    opened = gate(first)
    cuda.record(reached, first)
    cuda.wait(second, reached)
    cuda.record(after, second)
    time.sleep(0.02)
    assert not cuda.is_reached(after)
    opened.set()
    assert soon(lambda: cuda.is_reached(after))


def test_an_event_that_was_never_recorded_is_no_wait(cuda: Cuda) -> None:
    stream, never, after = cuda.stream(), cuda.event(), cuda.event()
    assert cuda.is_reached(never)
    cuda.wait(stream, never)
    cuda.record(after, stream)
    assert soon(lambda: cuda.is_reached(after))


def test_a_wait_takes_the_record_of_its_moment(cuda: Cuda, gate: Gate) -> None:
    held, waiting, event, after = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    cuda.record(event, cuda.stream())
    cuda.wait(waiting, event)
    gate(held)
    cuda.record(event, held)
    cuda.record(after, waiting)
    assert soon(lambda: cuda.is_reached(after))
    assert not cuda.is_reached(event)


def test_an_event_may_go_while_a_stream_waits_for_it(cuda: Cuda, gate: Gate) -> None:
    first, second, reached, after = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    opened = gate(first)
    cuda.record(reached, first)
    cuda.wait(second, reached)
    assert cuda.library.cuEventDestroy_v2(reached) == 0
    cuda.record(after, second)
    time.sleep(0.02)
    assert not cuda.is_reached(after)
    opened.set()
    assert soon(lambda: cuda.is_reached(after))


def test_synchronize_waits(cuda: Cuda) -> None:
    stream, done = cuda.stream(), []
    cuda.launch(stream, lambda: done.append(True), delay_s=0.02)
    cuda.synchronize(stream)
    assert done


def test_a_callback_may_not_call_the_driver(cuda: Cuda) -> None:
    stream, event, answers = cuda.stream(), cuda.event(), []
    cuda.launch(stream, lambda: answers.append(cuda.library.cuEventQuery(event)))
    cuda.synchronize(stream)
    assert answers == [NOT_PERMITTED]


def test_a_thread_needs_a_context(cuda: Cuda) -> None:
    answers: list[int] = []
    event = cuda.event()
    thread = threading.Thread(target=lambda: answers.append(cuda.library.cuEventRecord(event, None)))
    thread.start()
    thread.join()
    assert answers == [INVALID_CONTEXT]


# What hvdlite makes of it.


def pinned(nbytes: int) -> tuple[_native.PinnedMemory, torch.Tensor]:
    memory = _native.PinnedMemory(0, nbytes)
    return memory, torch.frombuffer((ctypes.c_char * nbytes).from_address(memory.address), dtype=torch.uint8)


def test_copies_wait_for_every_moment_and_are_waited_for(cuda: Cuda) -> None:
    streams = [cuda.stream() for _ in range(3)]
    tensors = [cuda.tensor((1000,)) for _ in streams]
    for i, (stream, tensor) in enumerate(zip(streams, tensors, strict=True)):
        cuda.launch(stream, lambda tensor=tensor, i=i: tensor.fill_(i), delay_s=0.02 * (3 - i))
    assert all(stream.value for stream in streams)
    moments = [_native.Moment(0, stream.value or 0) for stream in streams]
    memory, host = pinned(12000)
    copies = [(memory.address + 4000 * i, tensor.data_ptr(), 4000) for i, tensor in enumerate(tensors)]
    _native.DeviceCopies(0).run(moments, copies)
    assert host.view(torch.float32).tolist() == [0.0] * 1000 + [1.0] * 1000 + [2.0] * 1000


def test_what_is_enqueued_after_a_moment_is_not_waited_for(cuda: Cuda, gate: Gate) -> None:
    stream, tensor = cuda.stream(), cuda.tensor((10,))
    cuda.launch(stream, lambda: tensor.fill_(3))
    moment = _native.Moment(0, stream.value or 0)
    gate(stream)
    memory, host = pinned(40)
    _native.DeviceCopies(0).run([moment], [(memory.address, tensor.data_ptr(), 40)])
    assert host.view(torch.float32).tolist() == [3.0] * 10


def test_copies_of_nothing(cuda: Cuda) -> None:
    _native.DeviceCopies(0).run([], [])
    _native.DeviceCopies(0).run([], [(0, 0, 0)])


def test_an_error_of_the_driver_is_named(cuda: Cuda) -> None:
    ordinary = torch.zeros(10)
    with pytest.raises(RuntimeError, match="cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"):
        _native.DeviceCopies(0).run([], [(ordinary.data_ptr(), cuda.allocate(40), 40)])
    with pytest.raises(RuntimeError, match="cuDeviceGet: CUDA_ERROR_INVALID_VALUE"):
        _native.DeviceCopies(7)


def test_devices(cuda: Cuda) -> None:
    assert _native.cuda_devices() == 1
