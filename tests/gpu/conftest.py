"""Tests on a GPU, with any number of ranks (run.sh); skipped where there is none. Ranks agree as in tests/mpi."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from gpu_lab import IS_HERE, IS_SIMULATED, Gpu, SimulatedGpu
from hvdlite import _native
from hvdlite.config import NCCL_LIBRARY, other_variable

if IS_HERE:  # else nothing shall start MPI
    _of_ranks = Path(__file__).parents[1] / "mpi"
    sys.path.append(str(_of_ranks))  # of what its conftest imports
    _spec = importlib.util.spec_from_file_location("rank_hooks", _of_ranks / "conftest.py")
    assert _spec is not None and _spec.loader is not None
    _hooks = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_hooks)
    globals().update({name: value for name, value in vars(_hooks).items() if name.startswith("pytest_")})
    running, comm = _hooks.running, _hooks.comm
    if not IS_SIMULATED:  # else the NCCL that is here stays hidden, as for tests/mpi
        _native.use_nccl_library(other_variable(NCCL_LIBRARY))
else:

    @pytest.fixture(scope="module")
    def running() -> None:
        pytest.skip("torch sees no GPU here")


@pytest.fixture(scope="module")
def gpu(running: None) -> Gpu:
    return SimulatedGpu() if IS_SIMULATED else Gpu()


@pytest.fixture(scope="module")
def cuda(gpu: Gpu) -> Gpu:
    """``gpu``, for what needs torch's own half of CUDA."""
    if IS_SIMULATED:
        pytest.skip("the simulated driver is not torch's")
    return gpu
