"""The kernels on every instruction set of this machine: they pass the same tests and agree to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import test_native_pack
import test_native_reduce
from hvdlite import _native

PATHS = ["plain", "avx2", "avx512"]
NARROWER = PATHS[: PATHS.index(_native.instruction_set())]


def in_path(path: str, program: str) -> subprocess.CompletedProcess[str]:
    """``program`` in a Python whose kernels take ``path``."""
    search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {**os.environ, "HVDLITE_INSTRUCTION_SET": path, "PYTHONPATH": search_path}
    directory = os.path.dirname(__file__)
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=directory, capture_output=True, text=True, timeout=300
    )


def digests() -> str:
    return f"{_native.instruction_set()} {test_native_reduce.digest()} {test_native_pack.digest()}"


@pytest.mark.parametrize("path", NARROWER)
def test_narrower_paths_agree_to_the_last_bit_and_pass_the_same_tests(path: str) -> None:
    result = in_path(
        path,
        """
import pytest, test_native_instruction_sets
print("digests", test_native_instruction_sets.digests())
files = [f"test_native_{name}.py" for name in ("reduce", "pack", "staged_allreduce")]
raise SystemExit(pytest.main(["-q", "-x", "--capture=no", "-p", "no:cacheprovider", *files]))
""",
    )
    expected = digests().replace(_native.instruction_set(), path, 1)
    assert f"digests {expected}\n" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_unknown_instruction_set() -> None:
    result = in_path("sse9", "import hvdlite")
    assert result.returncode != 0
    widest = PATHS[len(NARROWER)]
    error = f"ConfigError: HVDLITE_INSTRUCTION_SET='sse9': must be plain, avx2 or avx512, and at most {widest} on this"
    assert error in result.stderr and "another exception" not in result.stderr and "direct cause" not in result.stderr
