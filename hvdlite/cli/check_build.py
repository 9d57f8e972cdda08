"""What this hvdlite has: facts, each there or not; `hvdliterun --check-build` prints them as horovodrun does."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import NamedTuple

from hvdlite import _native, builds, nccl_library
from hvdlite.cli.mpirun import find_mpirun
from hvdlite.errors import StartupError
from hvdlite.version import __version__


class Fact(NamedTuple):
    """Something that may be there."""

    there: bool
    what: str


def report() -> str:
    """A line for every fact, ticked or not."""
    lines = [f"hvdlite {__version__}, Python {platform.python_version()}"]
    for title, facts in sections().items():
        lines += ["", f"{title}:", *(f"  [{'X' if fact.there else ' '}] {fact.what}" for fact in facts)]
    return "\n".join(lines)


def sections() -> dict[str, list[Fact]]:
    """All facts, by title."""
    return {
        "Frameworks": [
            Fact(True, f"PyTorch {metadata.version('torch')}"),
            Fact(False, "TensorFlow"),
            Fact(False, "MXNet"),
        ],
        "Launcher": [_mpirun()],
        "GPUs": [*_gpus(), _kernels()],
        "Ways of communication": [
            Fact(True, "shared memory, within a node"),
            Fact(builds.mpi_built(), "MPI, between nodes"),
            _nccl(),
            Fact(builds.gloo_built(), "Gloo"),
            Fact(builds.ddl_built(), "DDL"),
            Fact(builds.ccl_built(), "CCL"),
        ],
    }


def _mpirun() -> Fact:
    try:
        mpirun = find_mpirun()
        return Fact(True, f"mpirun: {mpirun}, {mpirun.path}")
    except StartupError as error:
        return Fact(False, f"mpirun: {error}")


def _gpus() -> list[Fact]:
    """The CUDA driver and its GPUs; else why there are none. Creates no CUDA context."""
    try:
        version, count = _native.cuda_version(), _native.cuda_devices()
        gpus = [
            Fact(True, f"GPU {i}: {_native.cuda_device_name(i)}, {_uuid(_native.cuda_device_uuid(i))}")
            for i in range(count)
        ]
    except RuntimeError as error:
        return [Fact(False, f"CUDA driver: {error}")]
    return [Fact(True, f"CUDA driver, for CUDA {version // 1000}.{version % 1000 // 10}"), *gpus]


def _kernels() -> Fact:
    compiled = {"ptx": "PTX, compiled when hvdlite was built", "nvrtc": "source, which libnvrtc compiles at first use"}
    return Fact(True, f"kernels: {compiled[_native.kernel_image()]}")


def _uuid(digits: str) -> str:
    """As nvidia-smi writes it."""
    parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return f"GPU-{'-'.join(parts)}"


def _nccl() -> Fact:
    """Whether there is an NCCL, and which; else why not."""
    try:
        return Fact(True, f"NCCL, between GPUs: {nccl_library.load()}")
    except RuntimeError as error:
        return Fact(False, f"NCCL, between GPUs: {error}")
