"""`python -m hvdlite horovod --install`: `import horovod` and the command horovodrun mean hvdlite in this environment.

Two files are written: a .pth file among the packages, which adds the directory of our `horovod` behind all others on
sys.path, and the command. `--uninstall` removes them.
"""

from __future__ import annotations

import shlex
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from hvdlite import compat

_MARK = "# Written by `python -m hvdlite horovod --install`; `--uninstall` removes it.\n"
# A line that begins with #! ends at the first blank of a path. So sh starts Python, which sees a string in that line.
_COMMAND = """\
#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
{mark}import sys

from hvdlite.cli.run import main

sys.exit(main())
"""


def install() -> int:
    """Write both files, or say why not; returns the exit status."""
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        version = None
    if version is not None:
        return _refuse(f"Horovod {version} is installed here, and would be found first: pip uninstall horovod")
    command = _command()
    if command.exists() and not _is_ours(command):
        return _refuse(f"{command} is somebody else's; remove it first")
    _path_file().write_text(f"{_MARK}{Path(compat.__file__).parent / 'on_path'}\n")
    command.write_text(_COMMAND.format(python=shlex.quote(sys.executable), mark=_MARK))
    command.chmod(0o755)
    print(f"wrote {_path_file()}\nwrote {command}")
    return 0


def uninstall() -> int:
    """Remove what `install` wrote; returns the exit status."""
    for path in (_path_file(), _command()):
        if path.exists() and _is_ours(path):
            path.unlink()
            print(f"removed {path}")
    return 0


def _path_file() -> Path:
    return Path(sysconfig.get_path("purelib"), "horovod-is-hvdlite.pth")


def _command() -> Path:
    return Path(sysconfig.get_path("scripts"), "horovodrun")


def _is_ours(path: Path) -> bool:
    return _MARK in path.read_text(errors="replace")


def _refuse(text: str) -> int:
    print(f"python -m hvdlite horovod --install: {text}", file=sys.stderr)
    return 1
