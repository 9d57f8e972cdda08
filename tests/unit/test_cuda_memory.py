"""What the driver promises of memory, on a GPU as in the simulated driver: pinned, of words, and shared."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_size_t, c_uint, c_ulonglong
from pathlib import Path

import pytest

from driver_lab import PATIENCE_S, Driver, Words, driver_under_test, gates_open_at_the_end, new_page

PEERS = Path(__file__).with_name("driver_peers.py")


@pytest.fixture
def cuda() -> Iterator[Driver]:
    driver = driver_under_test()
    with gates_open_at_the_end(driver):
        yield driver


@pytest.fixture
def words(cuda: Driver) -> Iterator[Words]:
    registered = Words(cuda, new_page())
    yield registered
    cuda.call("cuMemHostUnregister", registered.host)


@contextmanager
def peer(name: str, *fds: int) -> Iterator[None]:
    """Another process, which has to end well."""
    command = [sys.executable, str(PEERS), name, *map(str, fds)]
    paths = os.pathsep.join(filter(None, [str(PEERS.parents[1]), os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(command, pass_fds=fds, env={**os.environ, "PYTHONPATH": paths}) as process:
        try:
            yield
            assert process.wait(60) == 0
        finally:
            process.kill()


def kind_of(cuda: Driver, address: int) -> int:
    kind = c_uint()
    cuda.call("cuPointerGetAttribute", ctypes.byref(kind), 2, c_ulonglong(address))
    return kind.value


def test_pinned_memory(cuda: Driver) -> None:
    stream, host, device = cuda.stream(), cuda.pinned(1000), cuda.allocate(1000)
    address = ctypes.addressof(host)
    host[:] = [i % 251 for i in range(1000)]
    assert cuda.copy(device, address, 1000, stream) == 0
    assert cuda.read(device, 1000, stream) == bytes(i % 251 for i in range(1000))
    assert (kind_of(cuda, address), kind_of(cuda, device)) == (1, 2)
    assert cuda.number("cuMemHostGetDevicePointer_v2", host, 0) == address


def test_memory_of_the_program_that_is_registered(cuda: Driver, words: Words) -> None:
    stream = cuda.stream()
    cuda.set(words.address + 4, 1, 4, stream)
    cuda.synchronize(stream)
    assert words.values[:3] == [0, 0x01010101, 0]
    assert cuda.status("cuMemHostRegister_v2", words.host, c_size_t(4096), 3) == 712
    cuda.call("cuMemHostUnregister", words.host)
    assert cuda.status("cuMemHostUnregister", words.host) == 713
    cuda.call("cuMemHostRegister_v2", words.host, c_size_t(4096), 3)


def test_a_value_comes_after_what_its_stream_did_before(cuda: Driver, words: Words) -> None:
    writer, waiter, memory = cuda.stream(), cuda.stream(), cuda.allocate(100)
    gate = cuda.gate(writer)
    cuda.set(memory, 5, 100, writer)
    cuda.call("cuStreamWriteValue32_v2", writer, words.at(0), 3, 0)
    cuda.call("cuStreamWaitValue32_v2", waiter, words.at(0), 3, 0)
    assert cuda.is_held(waiter)
    assert words.values[0] == 0
    gate.open()
    assert cuda.read(memory, 100, waiter) == bytes([5]) * 100
    assert words.values[0] == 3


def test_the_host_lets_a_stream_go_on(cuda: Driver, words: Words) -> None:
    stream = cuda.stream()
    cuda.call("cuStreamWaitValue32_v2", stream, words.at(9), 2, 0)
    words.values[9] = 1
    assert cuda.is_held(stream)
    words.values[9] = 5
    assert cuda.passes(stream)


@pytest.mark.parametrize(
    ("there", "awaited", "passes"),
    [
        (4, 5, False),
        (6, 5, True),
        (2, 0xFFFFFFF0, True),
        (0xFFFFFFF0, 5, False),
        (0, 0x80000001, True),
        (0, 0x80000000, False),
    ],
)
def test_values_are_compared_around_the_end_of_numbers(
    cuda: Driver, words: Words, there: int, awaited: int, passes: bool
) -> None:
    stream = cuda.stream()
    words.values[0] = there
    cuda.call("cuStreamWaitValue32_v2", stream, words.at(0), c_uint(awaited), 0)
    if passes:
        assert cuda.passes(stream)
    else:
        assert cuda.is_held(stream)
        words.values[0] = awaited
        assert cuda.passes(stream)


def test_values_of_another_process(cuda: Driver) -> None:
    page, stream = new_page(), cuda.stream()
    words = Words(cuda, page)
    with peer("writes_a_word", page):
        cuda.call("cuStreamWaitValue32_v2", stream, words.at(1), 7, 0)
        cuda.call("cuStreamWriteValue32_v2", stream, words.at(2), 1, 0)
        time.sleep(0.1)
        assert words.values[1:3] == [0, 0]
        words.values[0] = 1
        cuda.synchronize(stream)
        assert words.values[1:3] == [7, 1]
    cuda.call("cuMemHostUnregister", words.host)


def test_memory_of_another_process(cuda: Driver) -> None:
    """Both see the same bytes; it is there as long as it is mapped, whoever has released it or is gone."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S * 6)
    stream, nbytes = cuda.stream(), cuda.granularity()
    with ours, theirs, peer("shares_memory", theirs.fileno()):
        _, (fd,), _, _ = socket.recv_fds(ours, 100, 1)
        allocation = cuda.imported(fd)
        address = cuda.mapped(allocation, nbytes)
        cuda.call("cuMemRelease", allocation)
        assert cuda.read(address, nbytes, stream) == bytes([2]) * nbytes
        cuda.set(address, 3, nbytes, stream)
        cuda.synchronize(stream)
        ours.send(b"!")
        assert ours.recv(4) == b"seen"
    assert cuda.read(address, nbytes, stream) == bytes([3]) * nbytes
    assert cuda.unmap(address, nbytes) == 0


def test_memory_of_another_process_by_a_handle(cuda: Driver) -> None:
    """Whoever opens it twice gets one address, and closes it twice."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S * 6)
    stream, nbytes = cuda.stream(), 2 << 20
    with ours, theirs, peer("shares_a_handle", theirs.fileno()):
        handle = ours.recv(64)
        first, second = cuda.open(handle), cuda.open(handle)
        assert first == second
        status, address = first
        assert status == 0
        cuda.call("cuIpcCloseMemHandle", c_ulonglong(address))
        assert cuda.read(address, nbytes, stream) == bytes([2]) * nbytes
        cuda.set(address, 3, nbytes, stream)
        cuda.synchronize(stream)
        cuda.call("cuIpcCloseMemHandle", c_ulonglong(address))
        ours.send(b"!")


def test_a_handle_is_for_other_processes(cuda: Driver) -> None:
    status, _ = cuda.open(cuda.shared(cuda.allocate(2 << 20)))
    assert status != 0


def test_memory_is_mapped_at_several_places(cuda: Driver) -> None:
    stream, nbytes = cuda.stream(), cuda.granularity()
    allocation = cuda.create(nbytes)
    first, second = cuda.mapped(allocation, nbytes), cuda.mapped(allocation, nbytes)
    cuda.set(first, 1, nbytes, stream)
    cuda.set(second + 7, 2, 1, stream)
    assert cuda.read(first, 9, stream) == bytes([1] * 7 + [2, 1])
    assert cuda.unmap(first, nbytes) == 0
    assert cuda.read(second, 9, stream) == bytes([1] * 7 + [2, 1])


def test_mappings_side_by_side_are_one_memory(cuda: Driver) -> None:
    stream, nbytes = cuda.stream(), cuda.granularity()
    address = cuda.reserve(2 * nbytes)
    for place in (address, address + nbytes):
        cuda.map(place, nbytes, cuda.create(nbytes))
    assert cuda.allow(address, 2 * nbytes) == 0
    cuda.set(address, 1, 2 * nbytes, stream)
    cuda.set(address + nbytes - 2, 2, 4, stream)
    assert cuda.read(address + nbytes - 3, 6, stream) == bytes([1, 2, 2, 2, 2, 1])


def test_addresses_are_used_again(cuda: Driver) -> None:
    stream, nbytes = cuda.stream(), cuda.granularity()
    first, second = cuda.create(nbytes), cuda.create(nbytes)
    address = cuda.mapped(first, nbytes)
    cuda.set(address, 1, nbytes, stream)
    cuda.synchronize(stream)
    for allocation, value in ((second, 2), (first, 1)):
        assert cuda.unmap(address, nbytes) == 0
        cuda.map(address, nbytes, allocation)
        assert cuda.allow(address, nbytes) == 0
        if allocation is second:
            cuda.set(address, 2, nbytes, stream)
        assert cuda.read(address, nbytes, stream) == bytes([value]) * nbytes
    assert cuda.unmap(address, nbytes) == 0
    cuda.call("cuMemAddressFree", c_ulonglong(address), c_size_t(nbytes))


def test_sizes_are_whole_granules(cuda: Driver) -> None:
    nbytes = cuda.granularity()
    assert nbytes % 4096 == 0
    with pytest.raises(AssertionError):
        cuda.create(nbytes // 2)
    with pytest.raises(AssertionError):
        cuda.reserve(nbytes + 1)


def test_a_device_has_one_uuid(cuda: Driver) -> None:
    uuids = [ctypes.create_string_buffer(16) for _ in range(2)]
    for uuid in uuids:
        cuda.call("cuDeviceGetUuid_v2", uuid, 0)
    assert uuids[0].raw == uuids[1].raw != bytes(16)
