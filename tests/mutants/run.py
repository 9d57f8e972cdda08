"""Lines that are wrong on purpose, one at a time: each must fail the tests that are named for it.

    python3 tests/mutants/run.py               # all, in an environment that tests/run.py has made
    python3 tests/mutants/run.py --only ring   # those whose place or text has this word; may be repeated

A test suite is worth what it notices. Whoever makes tests fewer or faster runs this before and after. Each mutant of
every.py is applied to a copy of the tree, whose tests then run with the first numbers of ranks named; a test that hangs
has noticed as well. The exit status is 1 if one survives, or if the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from every import MUTANTS
from mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
COPIED = (
    "csrc",
    "hvdlite",
    "hvdlite_torch_backend.py",
    "hvdlite_untraced.py",
    "tests",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "docs",
    "tools",
    "examples",
)


class Tree:
    """A copy of the tree, compiled in place."""

    def __init__(self, directory: Path, time_limit_s: float) -> None:
        self._directory = directory
        self._time_limit_s = time_limit_s
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, directory / name, **({"ignore": ignore} if source.is_dir() else {}))
        self.compile()

    def compile(self) -> bool:
        """Whether that succeeds."""
        command = [str(PYTHON), "setup.py", "-q", "build_ext", "--inplace"]
        return subprocess.run(command, cwd=self._directory, capture_output=True).returncode == 0

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self._directory / mutant.path
        text = path.read_text()
        assert text.count(mutant.line) == 1, f"{mutant.path}: not there once: {mutant.line!r}"
        path.write_text(text.replace(mutant.line, mutant.wrong))
        native = path.suffix in (".cpp", ".h")
        try:
            if native and not self.compile():
                raise AssertionError(f"{mutant.path}: does not compile: {mutant.wrong!r}")
            yield
        finally:
            path.write_text(text)
            if native:
                self.compile()

    def notices(self, tests: str) -> str:
        """How the tests fail; nothing if they pass.

        Args:
            tests: files below tests/, and before them the number of ranks for those that run under mpirun.
        """
        ranks, *files = tests.split() if tests[0].isdigit() else ("0", *tests.split())
        pytest = [str(PYTHON.parent / "pytest"), "-q", "-x", "-p", "no:cacheprovider", "-c", "../pyproject.toml"]
        launcher = [str(PYTHON), "-m", "hvdlite", "run", "--mpi", "-np", ranks] if ranks != "0" else []
        environ = os.environ | {"PYTHONPATH": str(self._directory), "PYTHONDONTWRITEBYTECODE": "1"}
        environ["HVDLITE_IDLE_SECONDS"] = "inf"  # see tests/run.py
        child = subprocess.Popen(
            [*launcher, str(PYTHON), *pytest, *files],
            cwd=self._directory / "tests",
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=self._time_limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()  # the launcher passes it on to the ranks
            try:
                child.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
            return "does not end"
        if child.returncode == 0:
            return ""
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"exit status {child.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="WORD", help="of the path, the right or the wrong line")
    parser.add_argument("--time-limit", type=float, default=180.0, metavar="S", help="of the tests of one mutant")
    arguments = parser.parse_args()
    words = arguments.only or [""]
    chosen = [
        mutant for mutant in MUTANTS if any(word in f"{mutant.path} {mutant.line} {mutant.wrong}" for word in words)
    ]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="hvdlite-mutants-") as directory:
        tree = Tree(Path(directory), arguments.time_limit)
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            failure = tree.notices(tests)
            if failure:
                print(f"without any mutant: {tests}: {failure}")
                return 1
        for number, mutant in enumerate(chosen, start=1):
            start = time.monotonic()
            with tree.changed(mutant):
                noticed = tree.notices(mutant.tests)
            survivors += not noticed
            print(
                f"[{number}/{len(chosen)}] {mutant.path}: {mutant.line.strip()} -> {mutant.wrong.strip() or 'nothing'}"
            )
            print(f"    {noticed or 'SURVIVES ' + mutant.tests} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} noticed, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
