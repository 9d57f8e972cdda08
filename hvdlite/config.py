"""Settings. The only reader of os.environ: ``HVDLITE_X`` first, then ``HOROVOD_X``, then the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hvdlite.errors import ConfigError

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def _boolean(text: str) -> bool:
    # Horovod parses booleans by number, so "true" silently means 0; people mean what they write.
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("must be 1, true, yes, on, or 0, false, no, off")


def _positive(convert: Callable[[str], T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        value = convert(text)
        if value <= 0:  # type: ignore[operator]
            raise ValueError("must be above 0")
        return value

    return parse


def _not_negative(convert: Callable[[str], T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        value = convert(text)
        if value < 0:  # type: ignore[operator]
            raise ValueError("must not be negative")
        return value

    return parse


def _log_level(text: str) -> str:
    level = text.strip().lower()
    if level not in ("trace", "debug", "info", "warning", "error", "fatal"):
        raise ValueError("must be trace, debug, info, warning, error or fatal")
    return level


def _timeline(text: str) -> str:
    # Horovod's word for: no file now, start_timeline() may come.
    return "" if text == "DYNAMIC" else text


def _setting(default: T, parse: Callable[[str], T], *names: str) -> T:
    """A field read from HVDLITE_<name> or HOROVOD_<name>, by the first name that is set; ``$`` marks a full name."""
    return field(default=default, metadata={"parse": parse, "names": names})


@dataclass(frozen=True)
class Config:
    """Everything that can be set. Build it in code, or from the environment with `Config.from_env`."""

    fusion_threshold_bytes: int = _setting(128 << 20, _not_negative(int), "FUSION_THRESHOLD")
    """Most bytes that are fused into one collective; 0 disables fusion."""
    bucket_bytes: int = _setting(0, _not_negative(int), "BUCKET_BYTES")
    """Size of DistributedOptimizer's gradient buckets, never above ``fusion_threshold_bytes``; 0: by what the nodes and
    the network between them are like, see `hvdlite.torch.buckets.choose_bucket_bytes`."""
    staging_bytes: int = _setting(32 << 20, _positive(int), "STAGING_BYTES")
    """Size of each rank's copy of the fusion buffer for tensors from elsewhere; touched as it is used."""
    chunk_bytes: int = _setting(128 << 10, _positive(int), "CHUNK_BYTES")
    """On one node, tensors from elsewhere pass the fusion buffer in chunks of this size, which stay in cache."""
    segment_bytes: int = _setting(63 << 10, _positive(int), "SEGMENT_BYTES")
    """Unit of overlap in the ring across nodes: one segment travels while the one before it is added.

    MPI sends messages below its eager limit, 64 KiB over TCP, without asking the receiver first, which would wait for
    the receiver's next look at MPI."""
    small_bytes: int = _setting(32 << 10, _not_negative(int), "SMALL_BYTES")
    """Up to this size an allreduce across four nodes takes recursive doubling; the sizes of other cases follow."""
    rails: int = _setting(0, _not_negative(int), "RAILS")
    """Most ranks of a node that speak to other nodes, each for its share of the bytes; 0: as many as there can be."""
    cycle_ms: float = _setting(0.0, _not_negative(float), "CYCLE_TIME")
    """How long a ready tensor may wait for others to fuse with, in ms. Nothing polls, so 0 is a good default."""
    cache_capacity: int = _setting(1024, _not_negative(int), "CACHE_CAPACITY")
    """Requests that are remembered so that later submissions send their number only; 0 spells out every one."""
    tree_fanout: int = _setting(4, _positive(int), "TREE_FANOUT")
    """Children of a node leader in the negotiation tree."""
    spin_us: int = _setting(50, _not_negative(int), "SPIN_MICROSECONDS")
    """How long a barrier inside a node spins before it sleeps; 0 where ranks outnumber cores."""

    autotune: bool = _setting(False, _boolean, "AUTOTUNE")
    """Choose settings by measured step time while DistributedOptimizer trains; see docs/autotuning.md."""
    autotune_log: str = _setting("", str, "AUTOTUNE_LOG")
    """Path of the log that rank 0 writes; empty means none."""
    autotune_load: str = _setting("", str, "AUTOTUNE_LOAD")
    """Path of an earlier log on rank 0's machine, whose choice is taken."""
    autotune_warmup_samples: int = _setting(1, _not_negative(int), "AUTOTUNE_WARMUP_SAMPLES")
    """Samples at the start that do not count."""
    autotune_steps_per_sample: int = _setting(4, _positive(int), "AUTOTUNE_STEPS_PER_SAMPLE")
    """Steps that are measured with the same settings, after some in which the job adapts to them."""
    autotune_max_samples: int = _setting(14, _positive(int), "AUTOTUNE_MAX_SAMPLES", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES")
    """Most samples in all."""

    network_interfaces: str = _setting("", str, "NETWORK_INTERFACES", "$NCCL_SOCKET_IFNAME", "$GLOO_SOCKET_IFNAME")
    """Interfaces to use, in NCCL's syntax: prefixes, ``^`` excludes, ``=`` is exact; empty means every interface."""
    start_timeout_s: float = _setting(30.0, _positive(float), "START_TIMEOUT")
    """Longest that init() may take."""
    heartbeat_timeout_s: float = _setting(30.0, _positive(float), "HEARTBEAT_TIMEOUT_SECONDS")
    """A neighbour that is silent for longer counts as failed."""
    collective_timeout_s: float = _setting(600.0, _positive(float), "COLLECTIVE_TIMEOUT_SECONDS")
    """Longest that a rank waits inside a running collective."""
    failure_grace_s: float = _setting(5.0, _not_negative(float), "FAILURE_GRACE_SECONDS")
    """After a rank failed, how long the others may take to raise and end before they are ended."""
    mpi_threads_disable: bool = _setting(False, _boolean, "MPI_THREADS_DISABLE")
    """Accept an MPI without MPI_THREAD_MULTIPLE; then no other thread may call MPI."""

    timeline: str = _setting("", _timeline, "TIMELINE")
    """Path of the Chrome trace to write; empty means none."""
    timeline_mark_cycles: bool = _setting(False, _boolean, "TIMELINE_MARK_CYCLES")
    """Mark each cycle of the coordinator thread in the timeline."""
    timeline_events: int = _setting(1 << 16, _positive(int), "TIMELINE_EVENTS")
    """Most events that a rank keeps until they are written; older ones are dropped and counted."""

    stall_check_disable: bool = _setting(False, _boolean, "STALL_CHECK_DISABLE")
    stall_check_time_s: float = _setting(60.0, _not_negative(float), "STALL_CHECK_TIME_SECONDS")
    """After this long a tensor that waits for ranks is reported; 0 disables."""
    stall_shutdown_time_s: float = _setting(0.0, _not_negative(float), "STALL_SHUTDOWN_TIME_SECONDS")
    """After this long the job ends; 0 means never."""

    log_level: str = _setting("warning", _log_level, "LOG_LEVEL")
    log_hide_time: bool = _setting(False, _boolean, "LOG_HIDE_TIME")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Read the settings.

        Raises:
            ConfigError: a variable does not parse; names the variable, its value and what it may be.
        """
        values: dict[str, Any] = {}
        for item in fields(cls):
            variable = _first_set(environ, item.metadata["names"])
            if variable is None:
                continue
            try:
                values[item.name] = item.metadata["parse"](environ[variable])
            except ValueError as error:
                raise ConfigError(f"{variable}={environ[variable]!r}: {error}") from error
        return cls(**values)


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    for name in names:
        candidates = [name[1:]] if name.startswith("$") else [f"HVDLITE_{name}", f"HOROVOD_{name}"]
        for candidate in candidates:
            if environ.get(candidate, "") != "":
                return candidate
    return None
