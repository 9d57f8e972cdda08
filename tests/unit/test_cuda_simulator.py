"""The simulated driver refuses what a GPU's driver takes by luck, and has the devices and defects it is told to."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from ctypes import c_int, c_size_t, c_ubyte, c_ulonglong, c_void_p

import pytest

from driver_lab import (
    Access,
    Driver,
    Location,
    driver_under_test,
    gates_open_at_the_end,
    on_device,
    output,
    run,
    simulator_only,
)

pytestmark = simulator_only

OK, INVALID_VALUE, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT = 0, 1, 3, 100, 101, 201
INVALID_HANDLE, NOT_FOUND, NOT_PERMITTED, NOT_SUPPORTED, CAPTURED = 400, 500, 800, 801, 900
NOTHING = c_ulonglong(0)


@pytest.fixture
def cuda() -> Iterator[Driver]:
    driver = driver_under_test()
    with gates_open_at_the_end(driver):
        yield driver


def copies(cuda: Driver, address: int, nbytes: int) -> list[int]:
    """The answers to copies of pinned memory there and back."""
    stream, host = cuda.stream(), ctypes.addressof(cuda.pinned(max(nbytes, 1)))
    return [cuda.copy(address, host, nbytes, stream), cuda.copy(host, address, nbytes, stream)]


def test_nothing_before_init() -> None:
    program = """
import ctypes
from gpusim.build import built
print(ctypes.CDLL(library()).cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
"""
    assert output(program, CUDA_VISIBLE_DEVICES="") == str(NOT_INITIALIZED)


def test_pageable_memory_is_not_copied(cuda: Driver) -> None:
    pageable = (c_ubyte * 100)()
    assert copies(cuda, ctypes.addressof(pageable), 100) == [INVALID_VALUE] * 2
    assert copies(cuda, cuda.allocate(100), 100) == [OK] * 2


def test_copies_end_where_memory_ends(cuda: Driver) -> None:
    memory = cuda.allocate(1000)
    assert copies(cuda, memory + 1, 999) == [OK] * 2
    assert copies(cuda, memory + 1, 1000) == [INVALID_VALUE] * 2
    assert copies(cuda, memory - 1, 10) == [INVALID_VALUE] * 2


def test_memory_that_was_freed(cuda: Driver) -> None:
    memory = cuda.allocate(1000)
    cuda.call("cuMemFree_v2", c_ulonglong(memory))
    assert copies(cuda, memory, 10) == [INVALID_VALUE] * 2
    assert cuda.status("cuMemsetD8Async", c_ulonglong(memory), 0, c_size_t(10), None) == INVALID_VALUE
    assert cuda.status("cuMemFree_v2", c_ulonglong(memory)) == INVALID_VALUE
    host = cuda.pinned(100)
    cuda.call("cuMemFreeHost", host)
    assert cuda.status("cuMemFreeHost", host) == INVALID_VALUE
    assert cuda.status("cuMemFree_v2", c_ulonglong(cuda.allocate(10) + 1)) == INVALID_VALUE


@pytest.mark.parametrize(
    "enqueued",
    [
        "assert cuda.copy(memory, host, 1000, stream) == 0",
        "cuda.set(memory, 0, 1000, stream)",
        "cuda.call('cuStreamWriteValue32_v2', stream, c_ulonglong(memory), 0, 0)",
        "cuda.call('cuStreamWaitValue32_v2', stream, c_ulonglong(memory), 0, 0)",
    ],
)
def test_memory_that_is_freed_before_the_stream_comes_to_it(enqueued: str) -> None:
    program = f"""
stream, memory, host = cuda.stream(), cuda.allocate(1000), ctypes.addressof(cuda.pinned(1000))
gate = cuda.gate(stream)
{enqueued}
cuda.call("cuMemFree_v2", c_ulonglong(memory))
gate.open()
cuda.synchronize(stream)
"""
    result = run(program)
    assert result.returncode < 0
    assert "are no longer memory of device 0" in result.stderr


def test_a_kernel_that_uses_freed_memory_crashes() -> None:
    program = """
memory = cuda.allocate(1000)
{}
cuda.launch(cuda.stream(), lambda: ctypes.memset(memory, 0, 1000))
cuda.synchronize(None)
time.sleep(1)
"""
    free = 'cuda.call("cuMemFree_v2", c_ulonglong(memory))'
    assert run(program.format("")).returncode == 0
    assert run(program.format(free)).returncode < 0


def test_what_nobody_has_written_is_nan(cuda: Driver) -> None:
    stream, nbytes = cuda.stream(), cuda.granularity()
    assert cuda.read(cuda.allocate(999), 999, stream) == bytes([0xFF]) * 999
    assert cuda.read(cuda.mapped(cuda.create(nbytes), nbytes), nbytes, stream) == bytes([0xFF]) * nbytes
    assert bytes(cuda.pinned(99)) == bytes([0xFF]) * 99


def test_handles_of_what_was_destroyed(cuda: Driver) -> None:
    stream, event = cuda.stream(), cuda.event()
    cuda.call("cuStreamDestroy_v2", stream)
    cuda.call("cuEventDestroy_v2", event)
    living_stream, living_event = cuda.stream(), cuda.event()
    refused = [
        cuda.status("cuStreamSynchronize", stream),
        cuda.status("cuEventRecord", living_event, stream),
        cuda.status("cuStreamWaitEvent", stream, living_event, 0),
        cuda.status("cuStreamDestroy_v2", stream),
        cuda.status("cuEventRecord", event, living_stream),
        cuda.status("cuStreamWaitEvent", living_stream, event, 0),
        cuda.status("cuEventQuery", event),
        cuda.status("cuEventSynchronize", event),
        cuda.status("cuEventDestroy_v2", event),
    ]
    assert refused == [INVALID_HANDLE] * 9


def test_every_call_needs_a_context_that_a_driver_may_need_one_for(cuda: Driver) -> None:
    stream, event, memory, host = cuda.stream(), cuda.event(), cuda.allocate(8), cuda.pinned(8)
    address, handle = c_ulonglong(memory), c_void_p()
    contexts = []  # other tests of this process may have left theirs
    while cuda.status("cuCtxPopCurrent_v2", ctypes.byref(handle)) == 0:
        contexts.append(c_void_p(handle.value))
    try:
        refused = [
            cuda.status("cuStreamCreateWithPriority", ctypes.byref(handle), 1, 0),
            cuda.status("cuStreamDestroy_v2", stream),
            cuda.status("cuStreamWaitEvent", stream, event, 0),
            cuda.status("cuStreamWriteValue32_v2", stream, address, 0, 0),
            cuda.status("cuStreamWaitValue32_v2", stream, address, 0, 0),
            cuda.status("cuStreamIsCapturing", stream, ctypes.byref(c_int())),
            cuda.status("cuEventCreate", ctypes.byref(handle), 2),
            cuda.status("cuEventDestroy_v2", event),
            cuda.status("cuEventRecord", event, stream),
            cuda.status("cuEventSynchronize", event),
            cuda.copy(memory, ctypes.addressof(host), 8, stream),
            cuda.status("cuMemsetD8Async", address, 0, c_size_t(8), stream),
            cuda.status("cuMemHostAlloc", ctypes.byref(handle), c_size_t(8), 1),
            cuda.status("cuMemFreeHost", host),
            cuda.status("cuMemHostRegister_v2", host, c_size_t(8), 3),
            cuda.status("cuMemHostUnregister", host),
            cuda.status("cuModuleLoadData", ctypes.byref(handle), b"image"),
        ]
    finally:
        for context in reversed(contexts):
            cuda.call("cuCtxPushCurrent_v2", context)
    assert contexts
    assert refused == [INVALID_CONTEXT] * 17


def test_a_host_function_may_call_nothing(cuda: Driver) -> None:
    stream, answers = cuda.stream(), []
    calls = [
        lambda: cuda.status("cuMemRelease", NOTHING),
        lambda: cuda.status("cuCtxPushCurrent_v2", cuda.context),
        lambda: cuda.status("cuStreamSynchronize", None),
        lambda: cuda.status("cuDeviceGetCount", ctypes.byref(c_int())),
    ]
    cuda.launch(stream, lambda: answers.extend(call() for call in calls))
    cuda.synchronize(stream)
    assert answers == [NOT_PERMITTED] * 4


def test_words_are_registered_for_devices_and_aligned(cuda: Driver) -> None:
    pages, stream = mmap.mmap(-1, 2 * mmap.PAGESIZE), cuda.stream()  # the second one is not registered
    host = c_void_p(ctypes.addressof(c_ubyte.from_buffer(pages)))
    size = c_size_t(mmap.PAGESIZE)

    def answers(offset: int) -> list[int]:
        functions = ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2")
        return [cuda.status(name, stream, c_ulonglong((host.value or 0) + offset), 0, 0) for name in functions]

    assert answers(0) == [INVALID_VALUE] * 2
    cuda.call("cuMemHostRegister_v2", host, size, 1)  # not for devices
    assert answers(0) == [INVALID_VALUE] * 2
    assert cuda.status("cuMemHostGetDevicePointer_v2", ctypes.byref(c_ulonglong()), host, 0) == INVALID_VALUE
    cuda.call("cuMemHostUnregister", host)
    cuda.call("cuMemHostRegister_v2", host, size, 3)
    assert answers(0) == answers(mmap.PAGESIZE - 4) == [OK] * 2
    assert answers(2) == answers(mmap.PAGESIZE) == [INVALID_VALUE] * 2
    cuda.synchronize(stream)
    cuda.call("cuMemHostUnregister", host)


def test_memory_is_mapped_and_allowed_before_it_is_used(cuda: Driver) -> None:
    nbytes = cuda.granularity()
    address, allocation = cuda.reserve(2 * nbytes), cuda.create(nbytes)
    assert copies(cuda, address, 10) == [INVALID_VALUE] * 2
    assert cuda.allow(address, nbytes) == INVALID_VALUE
    cuda.map(address, nbytes, allocation)
    assert copies(cuda, address, 10) == [INVALID_VALUE] * 2
    assert cuda.allow(address, nbytes) == OK
    assert copies(cuda, address, 10) == [OK] * 2
    assert copies(cuda, address + nbytes - 5, 10) == [INVALID_VALUE] * 2


def test_addresses_are_unmapped_before_they_are_freed(cuda: Driver) -> None:
    nbytes = cuda.granularity()
    allocation = cuda.create(nbytes)
    address = cuda.mapped(allocation, nbytes)
    whole = c_ulonglong(address), c_size_t(nbytes)
    assert cuda.status("cuMemAddressFree", *whole) == INVALID_VALUE
    assert cuda.status("cuMemMap", *whole, c_size_t(0), allocation, NOTHING) == INVALID_VALUE
    assert cuda.unmap(address, nbytes // 2) == INVALID_VALUE
    assert cuda.unmap(address, nbytes) == OK
    assert cuda.unmap(address, nbytes) == INVALID_VALUE
    assert copies(cuda, address, 10) == [INVALID_VALUE] * 2
    cuda.call("cuMemAddressFree", *whole)
    assert cuda.status("cuMemMap", *whole, c_size_t(0), allocation, NOTHING) == INVALID_VALUE
    cuda.call("cuMemRelease", allocation)
    assert cuda.status("cuMemRelease", allocation) == INVALID_VALUE


def test_memory_is_exported_only_as_it_was_made(cuda: Driver) -> None:
    allocation, fd = c_ulonglong(), c_int()
    size = c_size_t(cuda.granularity())
    cuda.call("cuMemCreate", ctypes.byref(allocation), size, ctypes.byref(on_device(handle_types=0)), NOTHING)
    assert cuda.status("cuMemExportToShareableHandle", ctypes.byref(fd), allocation, 1, NOTHING) == INVALID_VALUE
    file = os.memfd_create("other")
    assert cuda.status("cuMemImportFromShareableHandle", ctypes.byref(allocation), c_void_p(file), 1) == INVALID_VALUE
    os.close(file)


def test_sizes_and_devices_of_memory(cuda: Driver) -> None:
    allocation, size = c_ulonglong(), cuda.granularity()

    def answer(nbytes: int, ordinal: int = 0) -> int:
        placement = ctypes.byref(on_device(ordinal))
        return cuda.status("cuMemCreate", ctypes.byref(allocation), c_size_t(nbytes), placement, NOTHING)

    assert [answer(0), answer(size + 4096), answer(size, 5), answer(size)] == [
        INVALID_VALUE,
        INVALID_VALUE,
        INVALID_DEVICE,
        OK,
    ]


def test_ordinals(cuda: Driver) -> None:
    handle, value = c_void_p(), c_int()
    for ordinal in (-1, cuda.number("cuDeviceGetCount")):
        assert cuda.status("cuDeviceGet", ctypes.byref(value), ordinal) == INVALID_DEVICE
        assert cuda.status("cuDevicePrimaryCtxRetain", ctypes.byref(handle), ordinal) == INVALID_DEVICE
        assert cuda.status("cuDeviceGetAttribute", ctypes.byref(value), 16, ordinal) == INVALID_DEVICE


def test_a_stream_that_is_captured_takes_nothing(cuda: Driver) -> None:
    stream, graph = cuda.stream(), c_void_p()
    cuda.call("cuStreamBeginCapture_v2", stream, 2)
    assert cuda.status("cuEventRecord", cuda.event(), stream) == CAPTURED
    cuda.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    assert cuda.status("cuEventRecord", cuda.event(), stream) == OK


def test_kernels_are_those_of_the_project(cuda: Driver) -> None:
    module, function = c_void_p(), c_void_p()
    assert cuda.status("cuModuleLoadData", ctypes.byref(module), None) == INVALID_VALUE
    cuda.call("cuModuleLoadData", ctypes.byref(module), b"image")
    assert cuda.status("cuModuleGetFunction", ctypes.byref(function), module, b"no such kernel") == NOT_FOUND
    cuda.call("cuModuleGetFunction", ctypes.byref(function), module, b"fill")
    stream, memory = cuda.stream(), cuda.allocate(1000)
    fill = (c_ulonglong * 3)(memory, 800, 0x0101010101010101)  # address, bytes, pattern
    parameters = (c_void_p * 1)(ctypes.addressof(fill))

    def launch(kernel: c_void_p, threads: int) -> int:
        return cuda.status("cuLaunchKernel", kernel, 2, 1, 1, threads, 1, 1, 0, stream, parameters, None)

    cuda.gate(stream)
    assert launch(function, 64) == OK
    fill[1] = 1000  # parameters are those of the call
    cuda.open_all()
    assert cuda.read(memory, 1000, stream) == bytes([1]) * 800 + bytes([0xFF]) * 200
    assert launch(function, 2048) == INVALID_VALUE
    assert launch(module, 64) == INVALID_HANDLE


UUIDS = """
for ordinal in range(cuda.number("cuDeviceGetCount")):
    uuid = create_string_buffer(16)
    cuda.call("cuDeviceGetUuid_v2", uuid, ordinal)
    print(uuid.raw.hex())
"""


def test_devices_are_those_that_are_visible() -> None:
    everything = output(UUIDS, GPUSIM_DEVICES="3").split()
    assert len(set(everything)) == 3
    assert output(UUIDS, GPUSIM_DEVICES="3", CUDA_VISIBLE_DEVICES="2,0").split() == [everything[2], everything[0]]
    assert output(UUIDS, GPUSIM_DEVICES="3", CUDA_VISIBLE_DEVICES="1,7,0").split() == [everything[1]]


def test_no_device_is_visible() -> None:
    program = "print(CDLL(library()).cuInit(0))"
    assert output(program, CUDA_VISIBLE_DEVICES="") == str(NO_DEVICE)


ACCESS_OF_SECOND = """
address, nbytes = cuda.reserve(cuda.granularity()), cuda.granularity()
cuda.map(address, nbytes, cuda.create(nbytes))
access = Access(Location(1, 1), 3)
print(cuda.status("cuMemSetAccess", c_ulonglong(address), c_size_t(nbytes), byref(access), c_size_t(1)))
print(cuda.copy(ctypes.addressof(cuda.pinned(8)), address, 8, cuda.stream()))
"""


def test_devices_without_peer_access() -> None:
    """The first device may not use what was allowed to the second one only."""
    assert output(ACCESS_OF_SECOND, GPUSIM_DEVICES="2").split() == [str(OK), str(INVALID_VALUE)]
    answers = output(ACCESS_OF_SECOND, GPUSIM_DEVICES="2", GPUSIM_NO_PEER="1").split()
    assert answers == [str(INVALID_DEVICE), str(INVALID_VALUE)]


def test_imported_memory_of_a_device_without_peer_access() -> None:
    program = """
import subprocess, sys
nbytes = cuda.granularity()
if len(sys.argv) == 1:
    fd = cuda.export(cuda.create(nbytes))
    other = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM, str(fd)], pass_fds=[fd], env=other, check=True)
else:
    address = cuda.reserve(nbytes)
    cuda.map(address, nbytes, cuda.imported(int(sys.argv[1])))
    print(cuda.allow(address, nbytes))
"""
    start = "from driver_lab import *\ncuda = driver_under_test()\n"
    program = f"PROGRAM = {start + program!r}\n{program}"
    both = {"GPUSIM_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}
    assert output(program, **both) == str(OK)
    assert output(program, **both, GPUSIM_NO_PEER="1") == str(INVALID_DEVICE)


def test_events_belong_to_a_device() -> None:
    program = """
event, second = cuda.event(), c_void_p()
cuda.call("cuDevicePrimaryCtxRetain", byref(second), 1)
cuda.call("cuCtxPushCurrent_v2", second)
stream = cuda.stream()
print(cuda.status("cuEventRecord", event, stream), cuda.status("cuStreamWaitEvent", stream, event, 0))
"""
    assert output(program, GPUSIM_DEVICES="2").split() == [str(INVALID_HANDLE), str(OK)]


def test_no_virtual_memory() -> None:
    program = """
print(cuda.status("cuMemCreate", byref(c_ulonglong()), c_size_t(1 << 21), byref(on_device()), c_ulonglong(0)))
"""
    assert output(program) == str(OK)
    assert output(program, GPUSIM_NO_VMM="1") == str(NOT_SUPPORTED)


def test_no_file_descriptors() -> None:
    program = """
allocation = cuda.create(cuda.granularity())
print(cuda.status("cuMemExportToShareableHandle", byref(c_ulonglong()), allocation, 1, c_ulonglong(0)))
"""
    assert output(program) == str(OK)
    assert output(program, GPUSIM_NO_FILES="1") == str(NOT_PERMITTED)


def test_handles_of_memory() -> None:
    """Of whole allocations."""
    program = """
address = cuda.allocate(5000)
handle = (ctypes.c_char * 64)()
print([cuda.status("cuIpcGetMemHandle", handle, c_ulonglong(address + offset)) for offset in (0, 0, 256)])
print(cuda.status("cuIpcCloseMemHandle", c_ulonglong(address)))
"""
    assert output(program) == f"[{OK}, {OK}, {INVALID_VALUE}]\n{INVALID_VALUE}"
    assert output(program, GPUSIM_NO_IPC="1") == f"[{NOT_SUPPORTED}, {NOT_SUPPORTED}, {NOT_SUPPORTED}]\n{INVALID_VALUE}"


def test_accesses_have_to_be_full(cuda: Driver) -> None:
    nbytes = cuda.granularity()
    address = cuda.reserve(nbytes)
    cuda.map(address, nbytes, cuda.create(nbytes))
    for location, flags, answer in (
        ((1, 0), 1, INVALID_VALUE),
        ((2, 0), 3, INVALID_VALUE),
        ((1, 9), 3, INVALID_DEVICE),
    ):
        access = Access(Location(*location), flags)
        arguments = c_ulonglong(address), c_size_t(nbytes), ctypes.byref(access), c_size_t(1)
        assert cuda.status("cuMemSetAccess", *arguments) == answer
