"""Memory of another process of this machine, read without its help (process_vm_readv of Linux)."""

from __future__ import annotations

import ctypes
import hmac

from hvdlite.links.proof import KEY_BYTES


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Proof:
    """Random bytes at a place of this process's memory: who can read them there reaches this process, and no other."""

    def __init__(self, content: bytes) -> None:
        assert len(content) == KEY_BYTES
        self._memory = ctypes.create_string_buffer(content, KEY_BYTES)
        self.address = ctypes.addressof(self._memory)


def reaches(process: int, address: int, content: bytes) -> bool:
    """Whether this process may read memory of ``process``, and finds ``content``, its `Proof`, at ``address``."""
    found = ctypes.create_string_buffer(KEY_BYTES)
    done = read(process, address, memoryview(found).cast("B"))
    return done and hmac.compare_digest(found.raw, content)


def read(process: int, address: int, target: memoryview) -> bool:
    """Fill ``target`` from ``address`` of ``process``, without the GIL; whether it could be read."""
    place = ctypes.addressof(ctypes.c_char.from_buffer(target))
    done = 0
    while done < len(target):
        own, theirs = _Span(place + done, len(target) - done), _Span(address + done, len(target) - done)
        count = _process_vm_readv(process, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0)
        if count <= 0:
            return False
        done += count
    return True


_process_vm_readv = ctypes.CDLL(None).process_vm_readv
_process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Span),
    ctypes.c_ulong,
    ctypes.POINTER(_Span),
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_process_vm_readv.restype = ctypes.c_ssize_t
