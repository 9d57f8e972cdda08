"""Every setting that exists, with its meaning: `Config` has the settings of a job, `OTHER_VARIABLES` the rest.

``HVDLITE_X`` goes before ``HOROVOD_X``, and ``HOROVOD_X`` before the default.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from hvdlite import environment
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


_LARGEST = 1e9  # seconds: 30 years, which every clock and wait of Python and of the kernel takes


def _int_up_to(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise ValueError("must be a whole number") from error
        if value > most:
            raise ValueError(f"must be at most {most}")
        return value

    return parse


_int = _int_up_to(10**12)  # bytes or a count: no machine has more, and queues and kernels take that


def _number(text: str) -> float:
    value = _number_or_inf(text)
    if math.isinf(value):
        raise ValueError("must be finite")
    if value > _LARGEST:
        raise ValueError(f"must be at most {_LARGEST:.0f}")
    return value


def _number_or_inf(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError("must be a number")
    return value


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


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return word

    return parse


def _timeline(text: str) -> str:
    # Horovod's word for: no file now, start_timeline() may come.
    return "" if text == "DYNAMIC" else text


def _setting(default: T, parse: Callable[[str], T], *names: str) -> T:
    """A field read from HVDLITE_<name> or HOROVOD_<name>, by the first name that is set; ``$`` marks a full name."""
    return field(default=default, metadata={"parse": parse, "names": names})


_UB_METHODS = ("auto", "window", "ring_exchange", "pipeline", "bulk", "multicast", "unfused", "none")


@dataclass(frozen=True)
class Config:
    """The settings of a job. Build them in code, or from the environment with `Config.from_env`."""

    fusion_threshold_bytes: int = _setting(128 << 20, _not_negative(_int), "FUSION_THRESHOLD")
    """Most bytes that are fused into one collective; 0 disables fusion."""
    bucket_bytes: int = _setting(0, _not_negative(_int), "BUCKET_BYTES")
    """Size of DistributedOptimizer's gradient buckets, never above ``fusion_threshold_bytes``; 0: by what the nodes and
    the network between them are like, see `hvdlite.torch.bucketing.choose_bucket_bytes`."""
    staging_bytes: int = _setting(32 << 20, _positive(_int), "STAGING_BYTES")
    """Size of each rank's copy of the fusion buffer for tensors from elsewhere; touched as it is used."""
    chunk_bytes: int = _setting(128 << 10, _positive(_int), "CHUNK_BYTES")
    """On one node, tensors from elsewhere pass the fusion buffer in chunks of this size, which stay in cache."""
    segment_bytes: int = _setting(63 << 10, _positive(_int), "SEGMENT_BYTES")
    """Unit of overlap in the ring across nodes: one segment travels while the one before it is added.

    MPI sends messages below its eager limit, 64 KiB over TCP, without asking the receiver first, which would wait for
    the receiver's next look at MPI."""
    small_bytes: int = _setting(32 << 10, _not_negative(_int), "SMALL_BYTES")
    """Up to this size an allreduce across four nodes takes recursive doubling; the sizes of other cases follow."""
    gpu_allreduce: str = _setting("auto", _one_of("auto", "hierarchical", "nccl"), "GPU_ALLREDUCE")
    """How GPUs of several nodes reduce. nccl: by NCCL over all; hierarchical: within a node, and by MPI across; auto:
    whichever was faster when the first tensors on GPUs came."""
    gpu_mpi: str = _setting("auto", _one_of("auto", "pinned", "direct"), "GPU_MPI")
    """How MPI across nodes gets what is on GPUs. pinned: by way of pinned memory of the host; direct: from where it is,
    which MPI must be able to do; auto: whichever was faster, where MPI says that it can and a trial is right."""
    rails: int = _setting(0, _not_negative(_int), "RAILS")
    """Most ranks of a node that speak to other nodes, each for its share of the bytes; 0: as many as there can be."""
    cycle_ms: float = _setting(0.0, _not_negative(_number), "CYCLE_TIME")
    """How long a ready tensor may wait for others to fuse with, in ms. Nothing polls, so 0 is a good default."""
    cache_capacity: int = _setting(1024, _not_negative(_int), "CACHE_CAPACITY")
    """Requests that are remembered so that later submissions send their number only; 0 spells out every one."""
    prepared_operations: bool = _setting(True, _boolean, "PREPARED_OPERATIONS")
    """Do in native code what repeats: blocking operations on one node, those of few bytes between nodes, the messages
    of larger ones there. Otherwise Python does it, step by step."""
    tree_fanout: int = _setting(4, _positive(_int), "TREE_FANOUT")
    """Children of a node leader in the negotiation tree."""
    spin_us: int = _setting(50, _not_negative(_int_up_to(10**8)), "SPIN_MICROSECONDS")
    """How long a rank looks for others of its node before it sleeps; four times as long where ranks outnumber cores."""

    idle_s: float = _setting(5.0, _positive(_number_or_inf), "IDLE_SECONDS")
    """Longest that a coordinator thread sleeps. Whatever happens wakes it, so any length will do, ``inf`` as well."""

    autotune: bool = _setting(False, _boolean, "AUTOTUNE")
    """Choose settings by measured step time while DistributedOptimizer trains; see docs/autotuning.md."""
    autotune_log: str = _setting("", str, "AUTOTUNE_LOG")
    """Path of the log that rank 0 writes; empty means none."""
    autotune_load: str = _setting("", str, "AUTOTUNE_LOAD")
    """Path of an earlier log on rank 0's machine, whose choice is taken."""
    autotune_warmup_samples: int = _setting(1, _not_negative(_int), "AUTOTUNE_WARMUP_SAMPLES")
    """Samples at the start that do not count."""
    autotune_steps_per_sample: int = _setting(4, _positive(_int), "AUTOTUNE_STEPS_PER_SAMPLE")
    """Steps that are measured with the same settings, after some in which the job adapts to them."""
    autotune_max_samples: int = _setting(14, _positive(_int), "AUTOTUNE_MAX_SAMPLES", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES")
    """Most samples in all."""

    network_interfaces: str = _setting("", str, "NETWORK_INTERFACES", "$NCCL_SOCKET_IFNAME", "$GLOO_SOCKET_IFNAME")
    """Interfaces to use, in NCCL's syntax: prefixes, ``^`` excludes, ``=`` is exact; empty means every interface."""
    start_timeout_s: float = _setting(30.0, _positive(_number), "START_TIMEOUT")
    """Longest that init() may take."""
    heartbeat_timeout_s: float = _setting(30.0, _positive(_number), "HEARTBEAT_TIMEOUT_SECONDS")
    """A neighbour that is silent for longer counts as failed."""
    collective_timeout_s: float = _setting(600.0, _positive(_number), "COLLECTIVE_TIMEOUT_SECONDS")
    """Longest that a rank waits inside a running collective."""
    ub_timeout_s: float = _setting(110.0, _positive(_number), "UB_TIMEOUT_SECONDS", "$UB_TIMEOUT")
    """Longest that a rank waits for the others of its team in shared memory, see `hvdlite.tensor_parallel`."""
    ub_skip_multicast: bool = _setting(False, _boolean, "UB_SKIPMC", "$UB_SKIPMC")
    """Leave multicast between GPUs alone, also where they offer it, see `hvdlite.tensor_parallel`."""
    ub_method: str = _setting("", _one_of(*_UB_METHODS), "UB_METHOD")
    """How the ranks of a team exchange rows, whatever their program says; empty: as it says."""
    ub_tuning_file: str = _setting("", str, "UB_TUNING_FILE")
    """Path on the machine of a team's first rank: how its ranks exchange rows, as measured earlier; what is measured
    now is added. Empty means none."""
    elastic_timeout_s: float = _setting(600.0, _positive(_number), "ELASTIC_TIMEOUT")
    """Under `hvd.elastic.run`, longest that ranks wait for one that is to meet them anew after a failure, or for new
    ranks where too few are left."""
    failure_grace_s: float = _setting(5.0, _not_negative(_number), "FAILURE_GRACE_SECONDS")
    """After a rank failed, how long the others may take to raise and end before they are ended."""
    mpi_threads_disable: bool = _setting(False, _boolean, "MPI_THREADS_DISABLE")
    """Accept an MPI without MPI_THREAD_MULTIPLE; then no other thread may call MPI."""

    timeline: str = _setting("", _timeline, "TIMELINE")
    """Path of the Chrome trace to write; empty means none."""
    timeline_mark_cycles: bool = _setting(False, _boolean, "TIMELINE_MARK_CYCLES")
    """Mark each cycle of the coordinator thread in the timeline."""
    timeline_events: int = _setting(1 << 16, _positive(_int), "TIMELINE_EVENTS")
    """Most events that a rank keeps until they are written; older ones are dropped and counted."""

    link_check_s: float = _setting(5.0, _not_negative(_number), "LINK_CHECK_SECONDS")
    """How often a rank of several nodes asks its kernel how fast its TCP connections are, to name one that has become
    much slower, or stuck; 0: never."""

    disable_nvtx_ranges: bool = _setting(False, _boolean, "DISABLE_NVTX_RANGES")
    """Show no spans to Nsight, which otherwise sees them as NVTX ranges where torch has CUDA."""

    metrics_port: int = _setting(0, _not_negative(_int_up_to(65535)), "METRICS_PORT")
    """Answer Prometheus on 127.0.0.1, each rank on this port plus its local rank; 0: do not listen."""

    check_numerics: str = _setting("off", _one_of("off", "warn", "raise"), "CHECK_NUMERICS")
    """Whether DistributedOptimizer looks for NaN and Inf in each rank's gradients before they are reduced: ``warn`` or
    ``raise``, with rank, parameter and step; see docs/seeing.md."""
    check_every: int = _setting(0, _not_negative(_int), "CHECK_EVERY")
    """Compare parameters and optimizer state of DistributedOptimizer between ranks after every so many steps, and raise
    where they differ; 0: only parameters, with the first step, to warn."""

    stall_check_disable: bool = _setting(False, _boolean, "STALL_CHECK_DISABLE")
    """Neither report tensors that wait for ranks nor end the job for them."""
    stall_check_time_s: float = _setting(60.0, _not_negative(_number), "STALL_CHECK_TIME_SECONDS")
    """After this long a tensor that waits for ranks is reported; 0 disables."""
    stall_shutdown_time_s: float = _setting(0.0, _not_negative(_number), "STALL_SHUTDOWN_TIME_SECONDS")
    """After this long the job ends; 0 means never."""

    log_level: str = _setting("warning", _one_of("trace", "debug", "info", "warning", "error", "fatal"), "LOG_LEVEL")
    """Least severe log lines that are written: trace, debug, info, warning, error or fatal."""
    log_hide_time: bool = _setting(False, _boolean, "LOG_HIDE_TIME")
    """Write log lines without the time."""

    @property
    def stall_patience_s(self) -> float:
        """How long the root need not know who waits for whom: a tenth of what is reported, at least 1 s."""
        limits = [seconds for seconds in (self.stall_check_time_s, self.stall_shutdown_time_s) if seconds > 0]
        return max(1.0, min(limits) / 10) if limits and not self.stall_check_disable else math.inf

    @property
    def stall_report_s(self) -> float:
        """After how long a wait for other ranks is reported."""
        return math.inf if self.stall_check_disable else self.stall_check_time_s or math.inf

    @property
    def caller_patience_s(self) -> float:
        """How long who does an operation himself waits for late ranks, before the coordinator does."""
        return min(self.stall_patience_s, self.idle_s)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the settings from ``environ``, by default this process's environment.

        Raises:
            ConfigError: a variable does not parse; names the variable, its value and what it may be.
        """
        environ = environment.variables() if environ is None else environ
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


def has_setting(name: str, environ: Mapping[str, str]) -> bool:
    """Whether ``environ`` says what the setting ``name`` of `Config` is."""
    (names,) = (item.metadata["names"] for item in fields(Config) if item.name == name)
    return _first_set(environ, names) is not None


class Tunable(NamedTuple):
    """The settings of `Config` that may change while a job runs, between two operations on all ranks alike."""

    bucket_bytes: int = Config.bucket_bytes
    segment_bytes: int = Config.segment_bytes
    small_bytes: int = Config.small_bytes
    rails: int = Config.rails

    @classmethod
    def of(cls, config: Config) -> Tunable:
        return cls(*(getattr(config, name) for name in cls._fields))

    def within(self, config: Config) -> Config:
        """``config`` with these."""
        return replace(config, **self._asdict())


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    for name in names:
        candidates = [name[1:]] if name.startswith("$") else [f"HVDLITE_{name}", f"HOROVOD_{name}"]
        for candidate in candidates:
            if environ.get(candidate, "") != "":
                return candidate
    return None


_ANSWERS = {
    "NVTE_UB_SOCKET_IFNAME": "tensor parallelism: NVTE_UB_SOCKET_IFNAME is not used; ranks of a node find one another "
    "without a network, and HVDLITE_NETWORK_INTERFACES, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME choose the interfaces "
    "between nodes",
}


def answers(environ: Mapping[str, str] | None = None) -> list[str]:
    """What is to be said of variables of TransformerEngine that are set, and that hvdlite does not need."""
    environ = environment.variables() if environ is None else environ
    return [answer for name, answer in _ANSWERS.items() if environ.get(name, "") != ""]


INSTRUCTION_SET = "HVDLITE_INSTRUCTION_SET"
CUDA_LIBRARY = "HVDLITE_CUDA_LIBRARY"
NCCL_LIBRARY = "HVDLITE_NCCL_LIBRARY"
FULL_TRACEBACKS = "HVDLITE_FULL_TRACEBACKS"
CALL_KEY = "HVDLITE_CALL_KEY"
CALL_ADDRESS = "HVDLITE_CALL_ADDRESS"
DOCTOR = "HVDLITE_DOCTOR"
MEETING_POINT = "HVDLITE_MEETING_POINT"
RANK = "HVDLITE_RANK"
SIZE = "HVDLITE_SIZE"
RAY_JOB = "HVDLITE_RAY_JOB"
WORKER = "HVDLITE_WORKER"
KEEPER = "HVDLITE_KEEPER"
START = "HVDLITE_START"
NOTICES = "HVDLITE_NOTICES"
MPI_INTERFACES = "HVDLITE_MPI_INTERFACES"
TO_SAVE = "HVDLITE_TO_SAVE"
TOLD = frozenset(
    {
        *(DOCTOR, MEETING_POINT, RANK, SIZE, CALL_KEY, CALL_ADDRESS),
        *(WORKER, KEEPER, START, NOTICES, MPI_INTERFACES, TO_SAVE, RAY_JOB),
        *(f"HOROVOD_{level}{what}" for level in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")),
    }
)
"""By launchers, to each rank: no settings. Some hold secrets."""

OTHER_VARIABLES = {
    INSTRUCTION_SET: "when hvdlite is imported: kernels for plain, avx2 or avx512; by default the processor's widest",
    CUDA_LIBRARY: "when hvdlite is imported: the CUDA driver to load, by default libcuda.so.1",
    NCCL_LIBRARY: "when hvdlite is imported: the NCCL to load, by default torch's, then a wheel's, then the system's",
    FULL_TRACEBACKS: "when an exception is not caught: 1 shows the frames of hvdlite as well",
    CALL_KEY: "from `hvdlite.run` to its ranks: the secret by which they prove to be its own",
    CALL_ADDRESS: "from `hvdlite.run` to its ranks: where they fetch the function",
    DOCTOR: "from `hvdliterun --doctor` to its ranks: the port at which hosts find one another, a secret, the hosts",
    MEETING_POINT: "from hvdliterun to ranks that it starts without MPI: where they meet",
    RANK: "likewise: the number of the rank",
    SIZE: "likewise: how many ranks there are",
    WORKER: "from `hvdliterun --elastic` to its ranks: the number of the process, which no other one will have",
    KEEPER: "from `hvdliterun --elastic` to ranks under mpirun: where the keeper of their host listens, and a secret",
    START: "from hvdliterun to its ranks: how many times they have been started",
    NOTICES: "from hvdliterun to ranks under mpirun: where they say how they start, and that they end after a failure",
    MPI_INTERFACES: "from hvdliterun to ranks under mpirun: what it has set that names interfaces of its own machine",
    TO_SAVE: "from `hvdliterun --elastic` to ranks that it starts only so that they can save the last commit: why",
    RAY_JOB: "from `hvdlite.ray` to its actors: that they were not started by hvdliterun",
    "HVDLITE_TORCH": "in tools/environment.py: what to install as torch, in pip's words",
    "HVDLITE_BUILD_JOBS": "in setup.py: how many compilers run at a time",
    "HVDLITE_SANITIZE": "in setup.py: sanitizers to compile in, as address,undefined",
}
"""Variables that are no settings of a job: where they are used, and what they mean. They have no HOROVOD_ form."""


def misspelt_settings(environ: Mapping[str, str]) -> list[str]:
    """A sentence on each variable of ``environ`` that nobody reads, and whose name is nearly one of hvdlite's."""
    names = [name for item in fields(Config) for name in item.metadata["names"] if not name.startswith("$")]
    names += [name.removeprefix("HVDLITE_") for name in OTHER_VARIABLES.keys() - TOLD]
    known = {*TOLD, *(f"HVDLITE_{name}" for name in names)}
    sentences = []
    for name in sorted(name for name in environ.keys() - known if name.startswith("HVDLITE_")):
        meant = difflib.get_close_matches(name.removeprefix("HVDLITE_"), names)
        if meant:
            sentences.append(f"{name} is no setting, and is ignored: is HVDLITE_{' or HVDLITE_'.join(meant)} meant?")
    return sentences


def other_variable(name: str) -> str:
    """What one of `OTHER_VARIABLES` says; empty where it is not set."""
    return environment.variables().get(name, "")


def told_number(name: str) -> int | None:
    """The number that hvdliterun has given this process as one of `TOLD`; None where it has given none.

    Raises:
        ConfigError: what is there is no number.
    """
    text = other_variable(name)
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: must be a number; hvdliterun sets it, so unset it")
    return int(text) if text else None
