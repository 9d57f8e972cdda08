"""Horovod's script that says which hosts a job may use: called every second while ranks run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, TypeVar

from hvdlite.cli.children import signal_groups
from hvdlite.cli.job import Host, is_this_machine, parse_host, refusal, united
from hvdlite.errors import ConfigError

_EVERY_S = 1.0
_LIMIT_S = 30.0  # for one call
_LOOK_S = 0.1  # between two looks at whether it is waited for

IsOver = Callable[[], bool]
Found = TypeVar("Found")


def hosts_of(script: str, slots_per_host: int, is_over: IsOver = lambda: False) -> tuple[Host, ...]:
    """The hosts that a call of ``script`` prints, one a line: "a:2" or "a".

    One that prints none is called once more: `kubectl get pods | sed ...`, whose server does not answer for a moment,
    prints nothing and has the exit status of the last command, which is 0.

    Args:
        slots_per_host: of a host without a number.
        is_over: whether nobody waits for it any more.

    Raises:
        ConfigError: the script cannot be run, fails, or prints what is no host.
    """
    if hosts := _found_by(script, slots_per_host, is_over):
        return hosts
    until_s = time.monotonic() + _EVERY_S
    while not is_over() and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return _found_by(script, slots_per_host, is_over)


def _found_by(script: str, slots_per_host: int, is_over: IsOver) -> tuple[Host, ...]:
    """Those of one call, see `hosts_of`."""
    try:
        text = _printed_by(script, is_over)
    except FileNotFoundError as error:
        what = "what its first line names is missing" if os.path.exists(script) else error
        raise ConfigError(f"--host-discovery-script {script}: {what}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--host-discovery-script {script}: {str(error).rstrip('.')}") from error
    return printed_hosts(text, slots_per_host)


def _printed_by(script: str, is_over: IsOver) -> str:
    """Raises OSError and SubprocessError. A call that is not waited for is ended, with all that it has started."""
    until_s = time.monotonic() + _LIMIT_S
    with (
        subprocess.Popen(
            [script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            errors="replace",
            start_new_session=True,
        ) as child,
        ExitStack() as on_failure,
    ):
        on_failure.callback(signal_groups, [child.pid], signal.SIGKILL)
        while True:
            try:
                text, _ = child.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if is_over() or time.monotonic() >= until_s:
                    raise subprocess.TimeoutExpired(script, _LIMIT_S) from None
        on_failure.pop_all()
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, script)
    return text


def printed_hosts(text: str, slots_per_host: int) -> tuple[Host, ...]:
    """What a script has printed. Of 0 slots is a host that may not be used now; ``#`` starts a comment.

    Raises:
        ConfigError: a line is no host.
    """
    hosts = []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        if line.endswith(":0") and parse_host(line.removesuffix(":0")):
            continue
        host = parse_host(line, slots_per_host)
        if host is None:
            raise ConfigError(f"--host-discovery-script: {refusal(line, line, 'print host:slots, a host a line')}")
        hosts.append(host)
    return united(hosts)


def slots_of(script: str, slots_per_host: int, is_over: IsOver = lambda: False) -> int:
    """How many ranks this machine may have, by a call of ``script``, which prints a host a line: "a:2" or "a".

    Args:
        slots_per_host: of a host without a number.
        is_over: whether nobody waits for it any more.

    Raises:
        ConfigError: the script cannot be run, fails, or prints what is no host, or another machine.
    """
    hosts = hosts_of(script, slots_per_host, is_over)
    others = [host.name for host in hosts if not is_this_machine(host)]
    if others:
        raise ConfigError(
            f"--host-discovery-script {script} names {others[0]}: ranks may come and go on this machine only"
        )
    return sum(host.slots for host in hosts)


class Discovery(Generic[Found]):
    """Looks at what the job may use on a thread of its own, until it is closed: nobody waits for a script that hangs.

    Args:
        look: returns it, as hosts or slots; it is given what says that this is closed.
        on_change: called with what was found when that is not the same as before; of what ``look`` raises, with the
            error.
    """

    def __init__(self, look: Callable[[IsOver], Found], on_change: Callable[[Found | ConfigError], object]) -> None:
        self._look = look
        self._on_change = on_change
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        last: Found | str | None = None
        while not self._is_over.wait(_EVERY_S):
            try:
                found: Found | ConfigError = self._look(self._is_over.is_set)
            except ConfigError as error:
                if self._is_over.is_set():
                    return
                found = error
            known = str(found) if isinstance(found, ConfigError) else found
            if known != last:
                last = known
                self._on_change(found)
