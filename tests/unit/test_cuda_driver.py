"""What streams and events promise, on a GPU as in the simulated driver; and what hvdlite makes of it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_void_p

import pytest
import torch

from cuda_calls import INVALID_CONTEXT, NOT_PERMITTED
from driver_lab import Driver, driver_under_test, gates_open_at_the_end, library, simulator_only, soon
from hvdlite import _native

SPOILT = 2  # as cuStreamIsCapturing says it


@pytest.fixture
def cuda() -> Iterator[Driver]:
    _native.use_cuda_library(library())
    driver = driver_under_test()
    with gates_open_at_the_end(driver):
        yield driver


def test_a_call_does_not_wait_for_what_it_enqueues(cuda: Driver) -> None:
    stream = cuda.stream()
    gate = cuda.gate(stream)
    event = cuda.recorded(stream)
    assert not cuda.is_reached(event)
    gate.open()
    assert soon(lambda: cuda.is_reached(event))


def test_streams_know_nothing_of_one_another(cuda: Driver) -> None:
    held, free = cuda.stream(), cuda.stream()
    cuda.gate(held)
    assert cuda.passes(free)


def test_a_stream_waits_for_an_event(cuda: Driver) -> None:
    first, second = cuda.stream(), cuda.stream()
    gate = cuda.gate(first)
    cuda.wait(second, cuda.recorded(first))
    assert cuda.is_held(second)
    gate.open()
    assert cuda.passes(second)


def test_an_event_that_was_never_recorded_is_no_wait(cuda: Driver) -> None:
    stream, never = cuda.stream(), cuda.event()
    assert cuda.is_reached(never)
    cuda.call("cuEventSynchronize", never)
    cuda.wait(stream, never)
    assert cuda.passes(stream)


def test_a_wait_takes_the_record_of_its_moment(cuda: Driver) -> None:
    held, waiting, event = cuda.stream(), cuda.stream(), cuda.event()
    cuda.record(event, cuda.stream())
    cuda.wait(waiting, event)
    cuda.gate(held)
    cuda.record(event, held)
    assert cuda.passes(waiting)
    assert not cuda.is_reached(event)


def test_a_query_is_for_the_latest_record(cuda: Driver) -> None:
    held, event = cuda.stream(), cuda.event()
    cuda.record(event, cuda.stream())
    assert soon(lambda: cuda.is_reached(event))
    gate = cuda.gate(held)
    cuda.record(event, held)
    time.sleep(0.02)
    assert not cuda.is_reached(event)
    gate.open()
    cuda.call("cuEventSynchronize", event)
    assert cuda.is_reached(event)


def test_an_event_may_go_while_a_stream_waits_for_it(cuda: Driver) -> None:
    first, second = cuda.stream(), cuda.stream()
    gate = cuda.gate(first)
    reached = cuda.recorded(first)
    cuda.wait(second, reached)
    cuda.call("cuEventDestroy_v2", reached)
    assert cuda.is_held(second)
    gate.open()
    assert cuda.passes(second)


def test_a_stream_that_is_destroyed_ends_its_work(cuda: Driver) -> None:
    stream = cuda.stream()
    gate = cuda.gate(stream)
    event = cuda.recorded(stream)
    cuda.call("cuStreamDestroy_v2", stream)
    gate.open()
    assert soon(lambda: cuda.is_reached(event))


def test_synchronize_waits(cuda: Driver) -> None:
    stream, done = cuda.stream(), []
    cuda.launch(stream, lambda: done.append(True), delay_s=0.02)
    cuda.synchronize(stream)
    assert done


@simulator_only
def test_a_callback_may_not_call_the_driver(cuda: Driver) -> None:
    stream, event = cuda.stream(), cuda.event()
    answers: list[int] = []
    cuda.launch(stream, lambda: answers.append(cuda.status("cuEventQuery", event)))
    cuda.synchronize(stream)
    assert answers == [NOT_PERMITTED]


def test_copies_and_sets_of_a_stream_are_in_order(cuda: Driver) -> None:
    stream, first, second = cuda.stream(), cuda.allocate(1000), cuda.allocate(1000)
    cuda.set(first, 1, 1000, stream)
    assert cuda.copy(second, first, 1000, stream) == 0
    cuda.set(first, 2, 1000, stream)
    cuda.set(first + 10, 3, 5, stream)
    assert cuda.read(second, 1000, stream) == bytes([1]) * 1000
    assert cuda.read(first, 1000, stream) == bytes([2] * 10 + [3] * 5 + [2] * 985)


def test_copies_of_two_streams_are_in_no_order(cuda: Driver) -> None:
    held, free, memory = cuda.stream(), cuda.stream(), cuda.allocate(100)
    cuda.set(memory, 1, 100, free)
    gate = cuda.gate(held)
    cuda.set(memory, 2, 100, held)
    assert cuda.read(memory, 100, free) == bytes([1]) * 100
    gate.open()
    assert cuda.read(memory, 100, held) == bytes([2]) * 100


def test_the_legacy_stream_waits_for_blocking_streams_only(cuda: Driver) -> None:
    held, blocking = cuda.stream(), cuda.blocking_stream()
    cuda.gate(held)
    assert cuda.passes(None)
    gate = cuda.gate(blocking)
    assert cuda.is_held(None)
    assert cuda.passes(cuda.stream())
    gate.open()
    assert cuda.passes(None)


def test_blocking_streams_wait_for_the_legacy_stream(cuda: Driver) -> None:
    blocking, other, free = cuda.blocking_stream(), cuda.blocking_stream(), cuda.stream()
    gate = cuda.gate(None)
    assert cuda.is_held(blocking)
    assert cuda.passes(free)
    gate.open()
    assert cuda.passes(blocking)
    cuda.gate(blocking)
    assert cuda.passes(other)  # blocking streams know nothing of one another


def test_priorities_are_accepted(cuda: Driver) -> None:
    for priority in (0, -1, -100, 100):
        stream = c_void_p()
        cuda.call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, priority)
        assert cuda.passes(stream)


def test_a_thread_needs_a_context(cuda: Driver) -> None:
    answers: list[int] = []
    event = cuda.event()
    thread = threading.Thread(target=lambda: answers.append(cuda.status("cuEventRecord", event, None)))
    thread.start()
    thread.join()
    assert answers == [INVALID_CONTEXT]


def test_contexts_are_a_stack_of_each_thread(cuda: Driver) -> None:
    seen: list[int | None] = []

    def current() -> int | None:
        context = c_void_p()
        cuda.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    def use() -> None:
        seen.append(current())
        with cuda.current():
            with cuda.current():
                seen.append(current())
            seen.append(current())
        seen.append(current())
        seen.append(cuda.status("cuCtxPopCurrent_v2", ctypes.byref(c_void_p())))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [None, cuda.context.value, cuda.context.value, None, INVALID_CONTEXT]


# What hvdlite makes of it.


def pinned(nbytes: int) -> tuple[_native.PinnedMemory, torch.Tensor]:
    memory = _native.PinnedMemory(0, nbytes)
    return memory, torch.frombuffer((ctypes.c_char * nbytes).from_address(memory.address), dtype=torch.uint8)


def test_copies_wait_for_every_moment_and_are_waited_for(cuda: Driver) -> None:
    streams = [cuda.stream() for _ in range(3)]
    places = [cuda.allocate(4000) for _ in streams]
    for i, (stream, place) in enumerate(zip(streams, places, strict=True)):
        cuda.launch(stream, lambda: None, delay_s=0.02 * (3 - i))
        cuda.set(place, i, 4000, stream)
    moments = [_native.Moment(0, stream.value or 0) for stream in streams]
    memory, host = pinned(12000)
    copies = [(memory.address + 4000 * i, place, 4000) for i, place in enumerate(places)]
    _native.DeviceCopies(0).begin(moments, copies).wait()
    assert host.tolist() == [0] * 4000 + [1] * 4000 + [2] * 4000


def test_what_is_enqueued_after_a_moment_is_not_waited_for(cuda: Driver) -> None:
    stream, place = cuda.stream(), cuda.allocate(40)
    memory, host = pinned(40)
    cuda.set(place, 3, 40, stream)
    moment = _native.Moment(0, stream.value or 0)
    gate = cuda.gate(stream)
    _native.DeviceCopies(0).begin([moment], [(memory.address, place, 40)]).wait()
    assert host.tolist() == [3] * 40
    gate.open()  # before the memory goes, which may wait for all streams


def test_a_stream_that_is_captured_is_refused(cuda: Driver) -> None:
    stream, graph, status = cuda.stream(), c_void_p(), c_int()
    cuda.call("cuStreamBeginCapture_v2", stream, 2)  # in the mode that leaves other calls alone
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
        _native.Moment(0, stream.value or 0)
    cuda.call("cuStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 1
    cuda.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    _native.Moment(0, stream.value or 0)


@contextmanager
def captured(cuda: Driver) -> Iterator[c_void_p]:
    """A stream that is captured as by `torch.cuda.graph`; a call that disturbs the capture is an error at its end."""
    stream, graph = cuda.stream(), c_void_p()
    cuda.call("cuStreamBeginCapture_v2", stream, 0)
    try:
        yield stream
    finally:
        cuda.call("cuStreamEndCapture", stream, ctypes.byref(graph))


@pytest.mark.parametrize("where", ["on this thread", "on another"])
def test_a_capture_is_not_disturbed(cuda: Driver, where: str) -> None:
    ours = _native.DeviceStream(0)
    moment = _native.Moment(0, ours.handle)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            assert soon(lambda: moment.is_reached)
            moment.wait()
            memory = _native.PinnedMemory(0, 64)
            _native.DeviceCopies(0).begin([moment], [(memory.address, memory.address + 32, 32)]).wait()
            with _native.DeviceContext(0):
                cuda.allocate(64)  # as MPI may, which is called so
        except (AssertionError, RuntimeError) as error:
            failures.append(error)

    with captured(cuda):
        if where == "on another":
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
    assert not failures


def test_a_stream_that_is_captured_waits_for_nothing(cuda: Driver) -> None:
    ours = _native.DeviceStream(0)
    moment = _native.Moment(0, ours.handle)
    with captured(cuda) as stream, pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
        moment.precede(stream.value or 0)


@simulator_only  # a real capture is not begun to be spoilt
def test_memory_that_is_dropped_during_a_capture(cuda: Driver) -> None:
    """It goes when the device has done what it was given, for which the driver does not wait meanwhile."""
    segment, busy, captured = _native.FileSegment(0, 64), cuda.stream(), cuda.stream()
    graph, status = c_void_p(), c_int()
    segment.map([b""], [-1], 0)
    (address,) = segment.copies
    gate = cuda.gate(busy)
    cuda.set(address, 3, 64, busy)
    cuda.call("cuStreamBeginCapture_v2", captured, 0)
    del segment

    def has_been_refused() -> bool:
        cuda.call("cuStreamIsCapturing", captured, ctypes.byref(status))
        return status.value == SPOILT

    assert soon(has_been_refused)
    cuda.status("cuStreamEndCapture", captured, ctypes.byref(graph))
    assert cuda.is_held(busy)
    assert cuda.has(address)
    gate.open()
    assert soon(lambda: not cuda.has(address))


def test_copies_of_nothing(cuda: Driver) -> None:
    _native.DeviceCopies(0).begin([], []).wait()
    _native.DeviceCopies(0).begin([], [(0, 0, 0)]).wait()


def test_an_error_of_the_driver_is_named(cuda: Driver) -> None:
    with pytest.raises(RuntimeError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        _native.DeviceCopies(77)


def test_devices(cuda: Driver) -> None:
    count = c_int()
    cuda.call("cuDeviceGetCount", ctypes.byref(count))
    assert _native.cuda_devices() == count.value
