"""`python -m hvdlite` and `hvdlite`: the command line tools. Each is a module under cli/, loaded when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hvdlite.cli.reader import ends_with_reader

TOOLS = {
    "bench": "time an operation by size: hvdliterun -np 2 python -m hvdlite bench allreduce",
    "doctor": "examine this machine, for yourself or for a bug report: doctor --json",
    "horovod": "run a program written for Horovod, unedited: horovod train.py",
    "run": "start a script with several ranks: run -np 4 train.py",
    "timeline": "read a timeline: timeline report trace.json",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool that ``argv``, by default this process's, names; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        return _explain(0 if argv else 2)
    if argv[0] not in TOOLS:
        print(f"python -m hvdlite: no tool {argv[0]!r}; there are {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"hvdlite.cli.{argv[0]}").main(argv[1:])
    return status


@ends_with_reader
def _explain(status: int) -> int:
    print("usage: python -m hvdlite TOOL ...\n")
    for name, purpose in TOOLS.items():
        print(f"  {name:<10} {purpose}")
    print("\npython -m hvdlite TOOL --help says more.")
    return status


if __name__ == "__main__":
    sys.exit(main())
