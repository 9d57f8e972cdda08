"""The simulated driver's multicast: teams of devices, in the order in which a driver takes them."""

from __future__ import annotations

import pytest

from driver_lab import output, run, simulator_only

pytestmark = simulator_only

OK, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 801

MULTICAST = """
nbytes = cuda.granularity()
def team(devices):
    return c_ulonglong(cuda.number("cuMulticastCreate", byref(Team(devices, nbytes, 1, 0))))
def add(team, device):
    return cuda.status("cuMulticastAddDevice", team, device)
def bind(team, memory, n=nbytes):
    return cuda.status("cuMulticastBindMem", team, c_size_t(0), memory, c_size_t(0), c_size_t(n), c_ulonglong(0))
"""


def test_a_team_is_complete_before_memory_is_bound() -> None:
    """And before it is mapped: the driver would block. A device joins and binds once, what is shared and whole."""
    program = """
two, memory = team(2), cuda.create(nbytes)
larger, private = cuda.create(2 * nbytes), c_ulonglong()
cuda.call("cuMemCreate", byref(private), c_size_t(nbytes), byref(on_device(handle_types=0)), c_ulonglong(0))
address, nothing = cuda.reserve(nbytes), c_ulonglong(0)
def mapped():
    return cuda.status("cuMemMap", c_ulonglong(address), c_size_t(nbytes), c_size_t(0), two, nothing)
print(add(two, 0), add(two, 0), bind(two, memory), mapped(), add(two, 1), add(two, 2))
print(bind(two, larger), bind(two, private), bind(two, memory), bind(two, memory), mapped())
print(cuda.allow(address, nbytes), cuda.copy(ctypes.addressof(cuda.pinned(8)), address, 8, cuda.stream()))
unbind = lambda device: cuda.status("cuMulticastUnbind", two, device, c_size_t(0), c_size_t(nbytes))
print(unbind(1), unbind(0), unbind(0), cuda.unmap(address, nbytes))
"""
    answers = [line.split() for line in output(MULTICAST + program, GPUSIM_DEVICES="3").splitlines()]
    refused = INVALID_VALUE
    assert [[int(answer) for answer in line] for line in answers] == [
        [OK, refused, refused, refused, OK, refused],
        [refused, refused, OK, refused, OK],
        [OK, refused],
        [refused, OK, refused, OK],
    ]


def test_no_multicast() -> None:
    program = """
value = c_int()
cuda.call("cuDeviceGetAttribute", byref(value), 132, 0)
print(value.value, cuda.status("cuMulticastCreate", byref(c_ulonglong()), byref(Team(2, cuda.granularity(), 1, 0))))
"""
    assert output(program) == f"1 {OK}"
    assert output(program, GPUSIM_NO_MULTICAST="1") == f"0 {NOT_SUPPORTED}"


@pytest.mark.parametrize("mistake", ["nothing", "is not bound", "is no address of a team"])
def test_what_is_not_bound_ends_the_process(mistake: str) -> None:
    program = f"""
from hvdlite import _native
_native.use_cuda_library(library())
segment = _native.FileSegment(0, 1)
segment.map([b""], [-1], 0)
multicast = _native.Multicast(segment, 1)
os.close(multicast.create())
multicast.join()
if {mistake!r} != "is not bound":
    multicast.bind()
multicast.map()
stream = _native.DeviceStream(0)
(address,) = segment.copies
stream.fill(address, 4, 7, 3.0)
target = address if {mistake!r} == "is no address of a team" else multicast.address
stream.multicast_store(target + 16, address, 16)
stream.multicast_sum(address + 64, multicast.address + 16, 16, 7)
handle = c_void_p(stream.handle)
print(list((c_float * 4).from_buffer_copy(cuda.read(address + 64, 16, handle))))
"""
    done = run(program)
    if mistake == "nothing":
        assert done.stdout.strip() == "[3.0, 3.0, 3.0, 3.0]", done.stderr
    else:
        assert done.returncode != 0
        assert mistake in done.stderr
