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

from hvdlite import _native
from hvdlite.config import CUDA_LIBRARY, INSTRUCTION_SET, NCCL_LIBRARY, other_variable
from hvdlite.environment import cache_directory
from hvdlite.errors import ConfigError
from hvdlite.garbage import uncollected
from hvdlite.version import __version__ as __version__

if TYPE_CHECKING:
    from hvdlite.launch import run as run
    from hvdlite.public import *  # noqa: F403
else:  # or type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """What programs use, imported once they ask for it: command line tools start three times as fast."""
        if not name.startswith("__") and not _is_module(name):  # `from hvdlite import mpi` asks here first
            if name == "run":
                return import_module("hvdlite.launch").run
            globals().update(_public())
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_module(name: str) -> bool:
    return PathFinder.find_spec(f"{__name__}.{name}", __path__) is not None


def _public() -> dict[str, Any]:
    with uncollected():
        found = vars(import_module("hvdlite.public"))
    return {name: found[name] for name in found if not name.startswith("_")}


def __dir__() -> list[str]:
    return sorted({*globals(), *_public(), "run"})


logging.getLogger("hvdlite").addHandler(logging.NullHandler())

_native.use_cuda_library(other_variable(CUDA_LIBRARY))
_native.use_nccl_library(other_variable(NCCL_LIBRARY))
_native.use_kernel_cache(cache_directory())
if other_variable(INSTRUCTION_SET):
    try:
        _native.use_instruction_set(other_variable(INSTRUCTION_SET))
    except ValueError as error:
        raise ConfigError(f"{INSTRUCTION_SET}={other_variable(INSTRUCTION_SET)!r}: {error}") from None
