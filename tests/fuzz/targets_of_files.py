"""What users write, and what hvdlite has written into files of theirs; see targets.py."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from unittest import mock

from fuzzed import Fuzzed
from hvdlite.cli.allocation import find_allocation
from hvdlite.cli.discovery import printed_hosts
from hvdlite.cli.horovodrun import read_config_file
from hvdlite.cli.job import Host as JobHost, read_hostfile
from hvdlite.config import Config
from hvdlite.errors import ConfigError, UsageError
from hvdlite.links.interfaces import Interface, select
from hvdlite.tensor_parallel.methods import Method
from hvdlite.tensor_parallel.tuning import Tuner
from hvdlite.timeline.trace_file import TraceError, TraceFile, merge_traces


def trace(data: bytes) -> None:
    """A file that is no trace is refused, by those who read it, merge it, or begin a new one in its place."""
    with directory_in_memory() as directory:
        path, out = Path(directory, "trace.json"), Path(directory, "out.json")
        path.write_bytes(data)
        with suppress(TraceError):
            merge_traces(str(out), [str(path)])
            json.loads(out.read_bytes())
        file = TraceFile(str(path), 7)
        file.open([b'{"ph":"M","pid":0,"name":"process_name"}'])
        file.append([b'{"ph":"X","pid":0,"name":"a"}'])
        file.complete()
        assert json.loads(path.read_bytes())["traceEvents"][-1]["name"] == "a"


def hostfile(data: bytes) -> None:
    """Names that mpirun and ssh take for nothing else; as in what a scheduler says, or the user's script."""
    text = data.decode("utf-8", "replace")
    first, _, rest = text.partition("\n")
    with directory_in_memory() as directory:
        path = Path(directory, "hosts")
        path.write_bytes(data)
        _check_hosts(lambda: read_hostfile(str(path)))
        for environ in (
            {"PBS_NODEFILE": str(path)},
            {"LSB_MCPU_HOSTS": text},
            {"SLURM_JOB_NODELIST": first, "SLURM_TASKS_PER_NODE": rest},
        ):
            _check_hosts(lambda environ=environ: found.hosts if (found := find_allocation(environ)) else ())
        _check_hosts(lambda: printed_hosts(text, 2))


def _check_hosts(read: Callable[[], Iterable[JobHost]]) -> None:
    with suppress(ConfigError):
        for host in read():
            assert host.name[0] != "-" and host.name.isascii() and not set(host.name) & set(" ,:/$`;\\\"'\n\0")
            assert 0 < host.slots < 1_000_000


def settings(data: bytes) -> None:
    """Settings and interfaces, as users write them."""
    text = data.decode("utf-8", "surrogateescape")
    for names in ("FUSION_THRESHOLD", "START_TIMEOUT", "IDLE_SECONDS", "AUTOTUNE", "LOG_LEVEL", "CYCLE_TIME"):
        with suppress(ConfigError):
            config = Config.from_env({f"HVDLITE_{names}": text})
            assert 0 < config.start_timeout_s <= 1e9 and config.idle_s > 0 and 0 <= config.cycle_ms <= 1e9
    with suppress(ConfigError):
        select(text, [Interface("eth0", "192.0.2.1", up=True, loopback=False)])


def directory_in_memory() -> tempfile.TemporaryDirectory[str]:
    """In memory, and by its name not taken for what a job has left there: tests of jobs run at the same time."""
    return tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def tuning(data: bytes) -> None:
    """A file of methods says one of those that there are, or none; what is none of ours is left as it is."""
    meeting = mock.Mock(rank=0, size=2, tell=lambda title, text: [text])
    with directory_in_memory() as directory:
        path = Path(directory, "tuning.json")
        path.write_bytes(data)
        with suppress(UsageError):
            assert Tuner(meeting, str(path)).choose("x", [Method.WINDOW, Method.BULK], lambda method: None) in Method
            return
        assert path.read_bytes() == data


def config_file(data: bytes) -> None:
    """horovodrun's settings are settings of hvdlite, or refused."""
    with directory_in_memory() as directory:
        path = Path(directory, "config.yaml")
        path.write_bytes(data)
        with suppress(ConfigError):
            Config.from_env(read_config_file(str(path)).settings)


_EVENTS = [{"ph": "X", "pid": 0, "name": "a"}]
_TRACE = {"otherData": {"hvdlite": "timeline 1", "origin_ns": "7"}, "traceEvents": _EVENTS}
_TUNING = {"x, 2 ranks": {"method": "bulk", "ms": {"bulk": 1.0}}}
_CONFIG = b"""params: {fusion_threshold_mb: 32, cycle_time_ms: 1e1, cache_capacity: 0x10}
timeline: {filename: /tmp/t.json, mark_cycles: off}
stall_check: {enabled: yes, warning_time_seconds: 3_0.5}
controller: gloo
when: 2001-12-14 21:59:43.10 -5
"""

TARGETS = {
    "trace": Fuzzed(trace, [json.dumps(_TRACE).encode()]),
    "hostfile": Fuzzed(hostfile, [b"node0 slots=2 # a\nuser@node1:4\n\n-o\n", b"a[01-03,7]x,b\n2(x4),1", b"a 2 b 1"]),
    "settings": Fuzzed(settings, [b"1e9", b"^=eth0,ib", b"-inf", b"true"]),
    "tuning": Fuzzed(tuning, [json.dumps(_TUNING).encode()]),
    "config_file": Fuzzed(config_file, [_CONFIG, b"a: !!binary aGk=\nb: &x [1, *x]\n? !!set {c}\n: 1_000"]),
}
