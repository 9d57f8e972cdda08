"""The compiler of these tests, and what its sanitizers need to run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*command: str | Path, cwd: Path = UNIT, **environment: str) -> subprocess.CompletedProcess[str]:
    """``command`` with ``environment`` added to this process's; what it wrote to stderr is in stdout."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def first_words(result: subprocess.CompletedProcess[str]) -> str:
    return " ".join(result.stdout.split())[:200]


def runtimes(sanitizers: str, directory: Path, before: list[str]) -> list[str]:
    """The shared libraries that a program with ``sanitizers`` loads; skips where none can be built or none runs."""
    source, program = directory / "probe.cpp", directory / "probe"
    source.write_text('#include <string>\nint main(int count, char**) { return std::to_string(count) != "1"; }\n')
    try:
        result = run(*COMPILER, f"-fsanitize={sanitizers}", source, "-o", program)
    except FileNotFoundError:
        pytest.skip(f"there is no compiler {COMPILER[0]}")
    if result.returncode != 0:
        pytest.skip(f"{shlex.join(COMPILER)} has no -fsanitize={sanitizers}: {first_words(result)}")
    result = run(*before, program)
    if result.returncode != 0:
        pytest.skip(f"no program with -fsanitize={sanitizers} runs here: {first_words(result)}")
    return re.findall(r"=> (\S+)", run("ldd", program).stdout)
