"""The driver under test: the simulated one, or the library that HVDLITE_TEST_DRIVER names, as a GPU's own.

What is here calls the real API only. Device memory is read by copies to pinned memory, and a stream is held up by a
word of host memory, since a GPU may call host functions of all streams one after the other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from functools import cache
from pathlib import Path

import pytest

from cuda_calls import Calls
from gpusim.build import built

CHOSEN = os.environ.get("HVDLITE_TEST_DRIVER")
PATIENCE_S = 10.0
FILE_DESCRIPTOR = 1

simulator_only = pytest.mark.skipif(CHOSEN is not None, reason="a GPU's driver need not do this")


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * 64),)


class Placement(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("metadata", c_void_p),
        ("flags", Flags),
    )


class Team(ctypes.Structure):
    _fields_ = (("devices", c_uint), ("nbytes", c_size_t), ("handle_types", c_ulonglong), ("flags", c_ulonglong))


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


def on_device(ordinal: int = 0, handle_types: int = FILE_DESCRIPTOR) -> Placement:
    return Placement(type=1, handle_types=handle_types, location=Location(1, ordinal))


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-4)
    return condition()


def new_page() -> int:
    """A file of zeros for `Words`."""
    fd = os.memfd_create("words")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


class Words:
    """A page of 32-bit words of a file, registered with the driver, that streams write and wait for."""

    def __init__(self, driver: Driver, fd: int) -> None:
        self.page = mmap.mmap(fd, mmap.PAGESIZE)
        self.values = (c_uint * (mmap.PAGESIZE // 4)).from_buffer(self.page)
        self.host = c_void_p(ctypes.addressof(self.values))
        driver.call("cuMemHostRegister_v2", self.host, c_size_t(mmap.PAGESIZE), 1 | 2)
        self.address = driver.number("cuMemHostGetDevicePointer_v2", self.host, 0)

    def at(self, index: int) -> c_ulonglong:
        return c_ulonglong(self.address + 4 * index)


class Driver(Calls):
    def __init__(self, library: str) -> None:
        super().__init__(library)
        self._gates: list[Gate] = []
        self._host = self.pinned(4 << 20)  # made here: to make and free some may wait for all streams

    def status(self, function: str, *arguments: object) -> int:
        return int(getattr(self.library, function)(*arguments))

    def call(self, function: str, *arguments: object) -> None:
        status = self.status(function, *arguments)
        assert status == 0, (function, status)

    def number(self, function: str, *arguments: object) -> int:
        """What ``function`` stores at its first parameter."""
        stored = c_ulonglong()
        self.call(function, ctypes.byref(stored), *arguments)
        return stored.value

    # Streams

    def blocking_stream(self) -> c_void_p:
        return self._handle("cuStreamCreateWithPriority", 0, 0)

    def recorded(self, stream: c_void_p | None) -> c_void_p:
        event = self.event()
        self.call("cuEventRecord", event, stream)
        return event

    def passes(self, stream: c_void_p | None) -> bool:
        """Whether ``stream`` comes to what is enqueued now."""
        event = self.recorded(stream)
        return soon(lambda: self.is_reached(event))

    def is_held(self, stream: c_void_p | None) -> bool:
        event = self.recorded(stream)
        time.sleep(0.02)
        return not self.is_reached(event)

    def gate(self, stream: c_void_p | None) -> Gate:
        """Holds ``stream`` up until it is opened."""
        gate = Gate(self.words(), len(self._gates))
        self._gates.append(gate)
        self.call("cuStreamWaitValue32_v2", stream, gate.words.at(gate.index), 1, 0)
        return gate

    def open_all(self) -> None:
        for gate in self._gates:
            gate.open()

    @cache  # noqa: B019 (there is one driver)
    def words(self) -> Words:
        return Words(self, new_page())

    # Memory

    def set(self, address: int, value: int, nbytes: int, stream: c_void_p | None) -> None:
        self.call("cuMemsetD8Async", c_ulonglong(address), value, c_size_t(nbytes), stream)

    def pinned(self, nbytes: int) -> ctypes.Array[c_ubyte]:
        memory = c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(memory), c_size_t(nbytes), 1)
        assert memory.value is not None
        return (c_ubyte * nbytes).from_address(memory.value)

    def read(self, address: int, nbytes: int, stream: c_void_p) -> bytes:
        """After what ``stream`` has to do."""
        assert nbytes <= len(self._host)
        assert self.copy(ctypes.addressof(self._host), address, nbytes, stream) == 0
        self.synchronize(stream)
        return bytes(self._host[:nbytes])

    # Memory of other processes

    def shared(self, address: int) -> bytes:
        """A handle by which another process opens an allocation."""
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), c_ulonglong(address))
        return bytes(handle)

    def open(self, handle: bytes) -> tuple[int, int]:
        """The driver's answer, and the address."""
        address = c_ulonglong()
        opened = IpcHandle.from_buffer_copy(handle)
        return self.status("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, 1), address.value

    # Virtual memory

    def granularity(self) -> int:
        return self.number("cuMemGetAllocationGranularity", ctypes.byref(on_device()), 0)

    def create(self, nbytes: int) -> c_ulonglong:
        return c_ulonglong(self.number("cuMemCreate", c_size_t(nbytes), ctypes.byref(on_device()), c_ulonglong(0)))

    def export(self, allocation: c_ulonglong) -> int:
        return self.number("cuMemExportToShareableHandle", allocation, FILE_DESCRIPTOR, c_ulonglong(0)) & 0xFFFFFFFF

    def imported(self, fd: int) -> c_ulonglong:
        return c_ulonglong(self.number("cuMemImportFromShareableHandle", c_void_p(fd), FILE_DESCRIPTOR))

    def reserve(self, nbytes: int) -> int:
        nothing = c_ulonglong(0)
        return self.number("cuMemAddressReserve", c_size_t(nbytes), c_size_t(0), nothing, nothing)

    def map(self, address: int, nbytes: int, allocation: c_ulonglong) -> None:
        nothing = c_ulonglong(0)
        self.call("cuMemMap", c_ulonglong(address), c_size_t(nbytes), c_size_t(0), allocation, nothing)

    def allow(self, address: int, nbytes: int) -> int:
        access = Access(Location(1, 0), 3)
        return self.status("cuMemSetAccess", c_ulonglong(address), c_size_t(nbytes), ctypes.byref(access), c_size_t(1))

    def unmap(self, address: int, nbytes: int) -> int:
        return self.status("cuMemUnmap", c_ulonglong(address), c_size_t(nbytes))

    def mapped(self, allocation: c_ulonglong, nbytes: int) -> int:
        """Where ``allocation`` is mapped, for this device to use."""
        address = self.reserve(nbytes)
        self.map(address, nbytes, allocation)
        assert self.allow(address, nbytes) == 0
        return address


class Gate:
    def __init__(self, words: Words, index: int) -> None:
        self.words, self.index = words, index

    def open(self) -> None:
        self.words.values[self.index] = 1


@cache
def library() -> str:
    return CHOSEN or str(built())


@cache
def driver_under_test() -> Driver:
    return Driver(library())


@contextmanager
def gates_open_at_the_end(driver: Driver) -> Iterator[None]:
    yield
    driver.open_all()


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``program`` in a process of its own, where ``cuda`` is the driver."""
    start = "from driver_lab import *\nfrom ctypes import *\n"
    if "CUDA_VISIBLE_DEVICES" not in environment or environment["CUDA_VISIBLE_DEVICES"]:
        start += "cuda = driver_under_test()\n"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", start + program],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )


def output(program: str, **environment: str) -> str:
    result = run(program, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
