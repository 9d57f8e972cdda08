"""What this hvdlite has: facts, each there or not; `hvdliterun --check-build` prints them as horovodrun does."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from typing import NamedTuple

from hvdlite import _native, builds, nccl_library
from hvdlite.cli.mpirun import find_mpirun
from hvdlite.errors import StartupError
from hvdlite.version import __version__

_START_S = 60.0  # for MPI
_ASK_MPI = """
from mpi4py import MPI
from hvdlite import cuda_aware_mpi, mpi
mpi.unlink_shared_files()  # which Open MPI leaves where a process was started alone
print(cuda_aware_mpi.is_reported())
"""


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
        "Launchers": [Fact(True, "hvdliterun itself, on one machine"), _mpirun()],
        "GPUs": [*_gpus(), _kernels()],
        "Ways of communication": [
            Fact(True, "shared memory, within a node"),
            Fact(builds.mpi_built(), "MPI, between nodes"),
            _mpi_on_gpus(),
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


def _mpi_on_gpus() -> Fact:
    """Whether MPI says that it takes memory of GPUs. It has to be started for that: in a process of its own."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_MPI], capture_output=True, text=True, timeout=_START_S
        ).stdout
    except subprocess.TimeoutExpired:
        asked = ""
    told = {"True": "it says that it takes", "False": "it does not say that it takes"}
    answer = asked.strip()
    reason = told.get(answer, "it cannot be started here to be asked whether it takes")
    return Fact(answer == "True", f"MPI, from GPU to GPU: {reason} memory of CUDA GPUs")


def _nccl() -> Fact:
    """Whether there is an NCCL, and which; else why not."""
    try:
        return Fact(True, f"NCCL, between GPUs: {nccl_library.load()}")
    except RuntimeError as error:
        return Fact(False, f"NCCL, between GPUs: {error}")
