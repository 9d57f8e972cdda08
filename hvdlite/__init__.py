"""hvdlite: data-parallel training with MPI. The framework-free part; PyTorch users import hvdlite.torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder


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

from hvdlite.api import *  # noqa: E402, F403 (wherever the path leads)
from hvdlite.api import __all__, __version__  # noqa: E402, F401
