"""`hvdliterun --check-build`: what this hvdlite has, as horovodrun tells it."""

from __future__ import annotations

import platform
from importlib import metadata

from hvdlite import _native, builds
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
        "Launcher:",
        _line(mpi, f"mpirun: {reason}"),
        "",
        "Ways of communication:",
        _line(True, "shared memory, within a node"),
        _line(builds.mpi_built(), "MPI, between nodes"),
        _line(*_gpus()),
        _line(bool(builds.nccl_built()), "NCCL"),
        _line(builds.gloo_built(), "Gloo"),
        _line(builds.ddl_built(), "DDL"),
        _line(builds.ccl_built(), "CCL"),
    ]
    return "\n".join(lines)


def _gpus() -> tuple[bool, str]:
    """Whether there are GPUs, and how many; else why not."""
    try:
        count = _native.cuda_devices()
    except RuntimeError as error:
        return False, f"GPUs, by way of pinned memory: {error}"
    return count > 0, f"GPUs, by way of pinned memory: {count}"


def _line(there: bool, what: str) -> str:
    return f"  [{'X' if there else ' '}] {what}"
