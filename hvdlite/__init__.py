"""hvdlite: data-parallel training with MPI. The framework-free part; PyTorch users import hvdlite.torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any


def _has_extension(directories: Sequence[str]) -> bool:
    return PathFinder.find_spec(f"{__name__}._native", directories) is not None


def _path() -> list[str]:
    """Where the modules of this package are.

    In a checkout, Python finds this directory before the installed package, though the compiled extension is only
    there. The modules then come from there too, so that sources and extension belong together.
    """
    for directories in (__path__, *([f"{directory or '.'}/{__name__}"] for directory in sys.path)):
        if _has_extension(directories):
            return list(directories)
    raise ImportError(
        f"hvdlite's compiled extension is not in {__path__[0]}, and no other hvdlite is installed. Install hvdlite "
        "(python3 examples/quickstart.py makes an environment with it), or compile the extension in a checkout: "
        "python setup.py build_ext --inplace"
    )


__path__ = _path()

from hvdlite.garbage import uncollected

with uncollected():
    from hvdlite import _native
    from hvdlite.config import CUDA_LIBRARY, INSTRUCTION_SET, NCCL_LIBRARY, Config as Config, other_variable
    from hvdlite.default_runtime import (
        cross_rank as cross_rank,
        cross_size as cross_size,
        init as init,
        is_homogeneous as is_homogeneous,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        rank as rank,
        restart as restart,
        runtime as runtime,
        shutdown as shutdown,
        size as size,
        statistics as statistics,
    )
    from hvdlite.dtypes import DType as DType, ReduceOp as ReduceOp
    from hvdlite.environment import cache_directory
    from hvdlite.errors import (
        CollectiveError as CollectiveError,
        ConfigError as ConfigError,
        DivergenceError as DivergenceError,
        DuplicateNameError as DuplicateNameError,
        HorovodInternalError as HorovodInternalError,
        HorovodVersionMismatchError as HorovodVersionMismatchError,
        HostsUpdatedInterrupt as HostsUpdatedInterrupt,
        MismatchError as MismatchError,
        NotInitializedError as NotInitializedError,
        NumericsError as NumericsError,
        RankFailedError as RankFailedError,
        ShutDownError as ShutDownError,
        StallError as StallError,
        StartupError as StartupError,
        UnrecoverableError as UnrecoverableError,
        UsageError as UsageError,
    )
    from hvdlite.memory.views import TensorView as TensorView
    from hvdlite.runtime import Runtime as Runtime
    from hvdlite.version import __version__ as __version__

if TYPE_CHECKING:
    from hvdlite.launch import run as run
else:  # or type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """hvdlite.run, imported by the programs that use it."""
        if name != "run":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("hvdlite.launch").run


def __dir__() -> list[str]:
    return sorted({*globals(), "run"})


logging.getLogger("hvdlite").addHandler(logging.NullHandler())

_native.use_cuda_library(other_variable(CUDA_LIBRARY))
_native.use_nccl_library(other_variable(NCCL_LIBRARY))
_native.use_kernel_cache(cache_directory())
if other_variable(INSTRUCTION_SET):
    try:
        _native.use_instruction_set(other_variable(INSTRUCTION_SET))
    except ValueError as error:
        raise ConfigError(f"{INSTRUCTION_SET}={other_variable(INSTRUCTION_SET)!r}: {error}") from error
