"""hvdlite.processes: whether another process has ended, as far as this one can see it."""

from __future__ import annotations

import subprocess
import sys
import time

from hvdlite.processes import ProcessAddress, is_stopped

PATIENCE_S = 60.0


def child() -> subprocess.Popen[str]:
    """Ends when its input does."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)


def address_of(process: subprocess.Popen[str]) -> ProcessAddress:
    return ProcessAddress.own()._replace(pid=process.pid)


def test_the_end_of_a_process_is_waited_for() -> None:
    with child() as process:
        address = address_of(process)
        process.communicate("\n")
        address.wait_for_end(PATIENCE_S)
        assert process.returncode == 0
        assert address.open() is None


def test_a_process_that_lives_is_waited_for_as_long_as_one_likes() -> None:
    with child() as process:
        start = time.monotonic()
        address_of(process).wait_for_end(0.2)
        assert time.monotonic() - start >= 0.2
        assert process.poll() is None
        assert not is_stopped(process.pid)
        process.communicate("\n")


def test_a_process_of_another_machine_or_container_is_out_of_sight() -> None:
    own = ProcessAddress.own()
    assert own.is_in_sight
    for other in (own._replace(machine="another"), own._replace(namespace=own.namespace + 1)):
        assert not other.is_in_sight
        assert other.open() is None
        other.wait_for_end(PATIENCE_S)
