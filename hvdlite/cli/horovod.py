"""`python -m hvdlite horovod train.py`: run a program written for Horovod, unedited, with hvdlite in its place."""

from __future__ import annotations

import importlib.util
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from hvdlite.cli import horovod_install
from hvdlite.cli.job import check_directory
from hvdlite.cli.reader import ends_with_reader
from hvdlite.errors import ConfigError

USAGE = """\
usage: python -m hvdlite horovod script.py [arguments]
       python -m hvdlite horovod application [arguments]
       python -m hvdlite horovod -m module [arguments]
       python -m hvdlite horovod --install | --uninstall

Runs the program as python would; import horovod, horovod.torch and the like give it hvdlite, whether or not Horovod is
installed. With several ranks: hvdliterun -np 2 python -m hvdlite horovod script.py
An application is a zip or a directory with a __main__.py.

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
    if not argv[0].endswith(".py") and argv[0] != "-m" and not _is_program(Path(argv[0])):
        print(f"python -m hvdlite horovod: {argv[0]!r} is neither a script nor -m; see --help", file=sys.stderr)
        return 2
    try:
        check_directory()
    except ConfigError as error:
        print(f"python -m hvdlite horovod: {error}", file=sys.stderr)
        return 2
    from hvdlite.compat.horovod import search_path  # from here on `horovod` is hvdlite

    sys.path.insert(1, search_path())
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        _search_first(os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        _run_file(argv[0])
    return 0


def _is_program(path: Path) -> bool:
    return path.is_file() or (path / "__main__.py").is_file()


@ends_with_reader
def _explain(status: int) -> int:
    print(USAGE, end="")
    return status


def _run_file(path: str) -> None:
    """As python runs a file. `runpy.run_path` would take its ``__main__`` away at the end, while atexit needs it."""
    finder = pkgutil.get_importer(path)
    if finder is not None:  # python looks for modules there
        _search_first(path)
        spec = finder.find_spec("__main__", None)
        if spec is None or spec.loader is None:
            sys.exit(f"python -m hvdlite horovod: there is no __main__.py in {path}")
        sys.modules["__main__"] = application = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(application)
        return
    try:
        code = _code(path)
    except OSError as error:
        sys.exit(f"python -m hvdlite horovod: cannot read {path}: {error.strerror}")
    _search_first(str(Path(path).resolve().parent))
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _code(path: str) -> CodeType:
    if path.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", path).get_code("__main__")
        assert compiled is not None
        return compiled
    with io.open_code(str(Path(path).absolute())) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _search_first(directory: str) -> None:
    """As python does; `python -m` has put the current directory there, the command `hvdlite` its own."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory
