"""What `import hvdlite.torch` costs on top of torch, in processor time of fresh processes that take turns.

python benchmarks/imports.py                           # with the hvdlite that this Python has
python benchmarks/imports.py . ../another/checkout     # with those of trees whose extension has been compiled
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

TORCH = "import torch"
BOTH = "import torch, hvdlite.torch"


def processor_s(program: str, environment: dict[str, str]) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, env=environment, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as bytecode:  # as installed packages have it
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        paths = [str(tree.resolve()) for tree in arguments.trees] or [environment.get("PYTHONPATH", "")]
        ways = {"torch alone": (TORCH, environment)}
        ways |= {f"hvdlite {path}".strip(): (BOTH, {**environment, "PYTHONPATH": path}) for path in paths}
        for way in ways.values():
            processor_s(*way)
        times = [{name: processor_s(*way) for name, way in ways.items()} for _ in range(arguments.rounds)]
    alone = median(row["torch alone"] for row in times)
    print(f"torch alone: {alone:.3f} s of processor time (median of {arguments.rounds})")
    for name in [*ways][1:]:
        print(f"{name}: {median(row[name] - row['torch alone'] for row in times):.3f} s on top of it")


if __name__ == "__main__":
    main()
