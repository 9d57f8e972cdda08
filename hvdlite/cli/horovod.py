"""`python -m hvdlite horovod train.py`: run a program written for Horovod, unedited, with hvdlite in its place."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hvdlite.cli import horovod_install
from hvdlite.cli.reader import ends_with_reader

USAGE = """\
usage: python -m hvdlite horovod script.py [arguments]
       python -m hvdlite horovod -m module [arguments]
       python -m hvdlite horovod --install | --uninstall

Runs the program as python would; import horovod, horovod.torch and the like give it hvdlite, whether or not Horovod is
installed. With several ranks: hvdliterun -np 2 python -m hvdlite horovod script.py

--install makes that so in this whole environment, without this command, and writes the command horovodrun;
--uninstall undoes it.
"""


def main(argv: Sequence[str]) -> int:
    """Run the program that ``argv`` names; returns 0, or what it raises goes on."""
    if not argv or list(argv) in (["-h"], ["--help"], ["-m"]):
        return _explain(0 if argv and argv[0] != "-m" else 2)
    if argv[0] in ("--install", "--uninstall") and len(argv) == 1:
        try:
            return horovod_install.install() if argv[0] == "--install" else horovod_install.uninstall()
        except OSError as error:
            print(f"python -m hvdlite horovod {argv[0]}: {error.filename}: {error.strerror}", file=sys.stderr)
            return 1
    if not argv[0].endswith(".py") and argv[0] != "-m" and not Path(argv[0]).is_file():
        print(f"python -m hvdlite horovod: {argv[0]!r} is neither a script nor -m; see --help", file=sys.stderr)
        return 2
    from hvdlite.compat.horovod import search_path  # from here on `horovod` is hvdlite

    sys.path.insert(1, search_path())
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        _search_first(os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        _run_script(argv[0])
    return 0


@ends_with_reader
def _explain(status: int) -> int:
    print(USAGE, end="")
    return status


def _run_script(path: str) -> None:
    """As python runs a script. `runpy.run_path` would take its ``__main__`` away at the end, while atexit needs it."""
    try:
        with io.open_code(str(Path(path).absolute())) as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"python -m hvdlite horovod: cannot read {path}: {error.strerror}")
    _search_first(str(Path(path).resolve().parent))
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _search_first(directory: str) -> None:
    """As python does; `python -m` has put the current directory there, the command `hvdlite` its own."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory
