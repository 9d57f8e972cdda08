"""The barrier of streams by itself, on the simulated driver; with peers: tests/mpi/test_device_*."""

from __future__ import annotations

import gc
import os
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
