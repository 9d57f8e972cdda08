"""Other processes of this machine: which one is meant, whether it has ended, and whether it is stopped."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

_STOPPED_LOOKS, _LOOK_S = 20, 0.1
_END_S = 5.0  # for the kernel to end a process that was killed


class ProcessAddress(NamedTuple):
    """A process among those of all machines.

    Attributes:
        machine: other after each start of a machine.
        namespace: in which ``pid`` counts; each container has its own.
    """

    machine: str
    namespace: int
    pid: int

    @classmethod
    def own(cls) -> ProcessAddress:
        return cls(machine(), os.stat("/proc/self/ns/pid").st_ino, os.getpid())

    @property
    def is_in_sight(self) -> bool:
        """Whether this process can see it, as long as it lives."""
        return self[:2] == self.own()[:2]

    def open(self) -> int | None:
        """A pidfd; None where it has ended, or is out of sight."""
        return end_of(self.pid) if self.is_in_sight else None

    def wait_for_end(self, patience_s: float) -> None:
        """Returns once it has ended, after ``patience_s`` at the latest; at once where it is out of sight."""
        end = self.open()
        if end is not None:
            _poll(end, patience_s)
            os.close(end)


@cache
def machine() -> str:
    """Other on each machine, and after each of its starts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def state_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, the state; raises OSError where there is no such process."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return stat[stat.rindex(b")") + 2 :].decode().split()  # behind the name, which may have blanks and brackets


def words_of(pid: int) -> list[str]:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP, and will not go on by itself."""
    return _is_in_state(pid, "T")


def end_if_stopped(pid: int) -> bool:
    """Kill a process that stays stopped for two seconds; whether it has ended, by this or another process.

    Looks are counted rather than time: where all processes of a job are stopped, some go on later than this one.
    """
    end = end_of(pid)
    if end is None:
        return False
    try:
        for _ in range(_STOPPED_LOOKS):
            if not is_stopped(pid):
                return has_ended(end)
            time.sleep(_LOOK_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        return _poll(end, _END_S)
    finally:
        os.close(end)


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, and its parent has not asked for its exit status."""
    return _is_in_state(pid, "Z")


def _is_in_state(pid: int, letter: str) -> bool:
    try:
        return state_of(pid)[0] == letter
    except OSError:  # there is no such process any more
        return False


def end_of(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends; None where it has, or the kernel has none."""
    with suppress(OSError):
        return os.pidfd_open(pid)
    return None


def has_ended(end: int) -> bool:
    """Whether the process of a pidfd has."""
    return _poll(end, 0.0)


def shares_network(pid: int) -> bool:
    """Whether a process is on this host, as far as its network says; raises OSError where it has ended."""
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")


def _poll(end: int, patience_s: float) -> bool:
    look = select.poll()  # select() takes 1024 descriptors
    look.register(end, select.POLLIN)
    return bool(look.poll(1000 * patience_s))
