"""`hvdliterun --check-build`: what this hvdlite has, as horovodrun tells it."""

from __future__ import annotations

import platform
from importlib import metadata

from hvdlite import _native, builds, nccl_library
from hvdlite.cli.mpirun import find_mpirun
from hvdlite.errors import StartupError
from hvdlite.version import __version__


def report() -> str:
    """A line for everything that may be there, ticked or not."""
    try:
        mpirun = find_mpirun()
        mpi, reason = True, f"{mpirun}, {mpirun.path}"
    except StartupError as error:
        mpi, reason = False, str(error)
    lines = [
        f"hvdlite {__version__}, Python {platform.python_version()}",
        "",
        "Frameworks:",
        _line(True, f"PyTorch {metadata.version('torch')}"),
        _line(False, "TensorFlow"),
        _line(False, "MXNet"),
        "",
        "Launchers:",
        _line(True, "hvdliterun itself, on one machine"),
        _line(mpi, f"mpirun: {reason}"),
        "",
        "GPUs:",
        *_gpus(),
        _kernels(),
        "",
        "Ways of communication:",
        _line(True, "shared memory, within a node"),
        _line(builds.mpi_built(), "MPI, between nodes"),
        _line(*_nccl()),
        _line(builds.gloo_built(), "Gloo"),
        _line(builds.ddl_built(), "DDL"),
        _line(builds.ccl_built(), "CCL"),
    ]
    return "\n".join(lines)


def _gpus() -> list[str]:
    """The CUDA driver and its GPUs; else why there are none. Creates no CUDA context."""
    try:
        version, count = _native.cuda_version(), _native.cuda_devices()
        gpus = [
            _line(True, f"GPU {i}: {_native.cuda_device_name(i)}, {_uuid(_native.cuda_device_uuid(i))}")
            for i in range(count)
        ]
    except RuntimeError as error:
        return [_line(False, f"CUDA driver: {error}")]
    return [_line(True, f"CUDA driver, for CUDA {version // 1000}.{version % 1000 // 10}"), *gpus]


def _kernels() -> str:
    compiled = {"ptx": "PTX, compiled when hvdlite was built", "nvrtc": "source, which libnvrtc compiles at first use"}
    return _line(True, f"kernels: {compiled[_native.kernel_image()]}")


def _uuid(digits: str) -> str:
    """As nvidia-smi writes it."""
    parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return f"GPU-{'-'.join(parts)}"


def _nccl() -> tuple[bool, str]:
    """Whether there is an NCCL, and which; else why not."""
    try:
        return True, f"NCCL, between GPUs: {nccl_library.load()}"
    except RuntimeError as error:
        return False, f"NCCL, between GPUs: {error}"


def _line(there: bool, what: str) -> str:
    return f"  [{'X' if there else ' '}] {what}"
