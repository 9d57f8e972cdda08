"""The barrier of streams by itself, on the simulated driver; with peers: tests/mpi/test_device_*."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from cuda_lab import simulated
from hvdlite import _native
from hvdlite.memory.memory_file import create_memory_file
from hvdlite.memory.segment import Segment


def new_page(nbytes: int) -> Segment:
    fd = create_memory_file(nbytes)
    try:
        return Segment(fd, nbytes)
    finally:
        os.close(fd)


def test_its_page_stays_as_long_as_it_does() -> None:
    """The driver would know memory that is another's by now."""
    simulated()
    page = new_page(_native.StreamBarrier.bytes_needed(1))
    memory = weakref.ref(page.memory)
    stream = _native.DeviceStream(0)
    barrier = _native.StreamBarrier(stream, page.memory, 0, 1)
    del page
    gc.collect()
    assert memory() is not None
    barrier.meet()
    _native.Moment(0, stream.handle).wait()
    del barrier
    assert memory() is None


def test_a_page_that_is_too_small() -> None:
    simulated()
    page = new_page(_native.StreamBarrier.bytes_needed(1))
    with pytest.raises(ValueError, match="too small"):
        _native.StreamBarrier(_native.DeviceStream(0), page.memory, 0, 2)


def test_its_page_stays_where_the_driver_does_not_let_go() -> None:
    """As in a function that a stream calls, where Python may collect garbage: other memory must not take its place."""
    cuda = simulated()
    page = new_page(_native.StreamBarrier.bytes_needed(1))
    memory = weakref.ref(page.memory)
    held = [_native.StreamBarrier(_native.DeviceStream(0), page.memory, 0, 1)]
    del page
    with cuda.current():
        stream = cuda.stream()
        cuda.launch(stream, held.clear)
        cuda.synchronize(stream)
    assert not held
    assert memory() is not None


def test_a_rank_whose_driver_refuses_everything_lets_others_go() -> None:
    """As one does whose GPU has failed. The rest of what ends a world must not be kept from it by that."""
    cuda, nbytes = simulated(), _native.StreamBarrier.bytes_needed(2)
    fd = create_memory_file(nbytes)
    pages = [Segment(fd, nbytes) for _ in range(2)]  # of one memory, as two ranks have
    os.close(fd)
    streams = [_native.DeviceStream(0) for _ in range(2)]
    failed, waiting = (_native.StreamBarrier(streams[rank], pages[rank].memory, rank, 2) for rank in range(2))
    waiting.meet()
    refusing = ctypes.c_void_p(streams[0].handle)
    with cuda.current():
        cuda.library.cuStreamBeginCapture_v2(refusing, 2)
        try:
            failed.release()
            _native.Moment(0, streams[1].handle).wait()
        finally:
            cuda.library.cuStreamEndCapture(refusing, ctypes.byref(ctypes.c_void_p()))


def test_its_page_stays_while_its_stream_may_come_to_it() -> None:
    """As after a failure, where the stream is behind a long kernel of the user's."""
    cuda, go_on = simulated(), threading.Event()
    page = new_page(_native.StreamBarrier.bytes_needed(2))
    memory = weakref.ref(page.memory)
    stream = _native.DeviceStream(0)
    barrier = _native.StreamBarrier(stream, page.memory, 0, 2)
    with cuda.current():
        cuda.launch(ctypes.c_void_p(stream.handle), lambda: go_on.wait(20))
    barrier.meet()
    barrier.release()
    del page, barrier
    try:
        assert memory() is not None
    finally:
        go_on.set()
    _native.Moment(0, stream.handle).wait()


MEETS_WITHOUT_PEER = """
import mmap, threading, time
from cuda_lab import simulated
from hvdlite import _native

simulated()
stream = _native.DeviceStream(0)
barrier = _native.StreamBarrier(stream, mmap.mmap(-1, mmap.PAGESIZE), 0, 2)
met = []

def meet():
    for attempt in range(20):
        barrier.meet()
        met.append(attempt)

thread = threading.Thread(target=meet)
thread.start()
while len(met) < 4:
    time.sleep(1e-3)
time.sleep(0.02)  # until the driver keeps it
late = barrier.late()
barrier.release()
thread.join()
_native.Moment(0, stream.handle).wait()
print(late, len(met))
"""


def test_a_stream_that_has_no_room_for_more_is_released() -> None:
    """The driver keeps whoever enqueues more until the stream goes on, which it does when it is released."""
    environment = {**os.environ, "GPUSIM_ROOM": "8", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", MEETS_WITHOUT_PEER], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("[1] 20\n", "")
