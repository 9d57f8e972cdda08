"""The unit tests of the native code under AddressSanitizer and UndefinedBehaviorSanitizer.

setup.py builds an extension for them.
"""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from compiler import COMPILER, ROOT, Run, one_for_all, run, runtimes

ADDRESS = "address,undefined,float-cast-overflow"
UNIT_TESTS = [
    "test_native_reduce.py",
    "test_native_pack.py",
    "test_native_scan.py",
    "test_native_staged_allreduce.py",
    "test_native_messages.py",
    pytest.param("test_native_instruction_sets.py", marks=pytest.mark.thorough),
    "test_native_signal.py",
    "test_native_deadline.py",
    "test_native_socket_bell.py",
    "test_control_page.py",
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, fixed_addresses: list[str]) -> Run:
    """Runs Python, in tests/unit, with a hvdlite whose extension says what it should not have done."""
    directory = tmp_path_factory.mktemp("address")
    libraries = runtimes(ADDRESS, directory, fixed_addresses)
    if not any("libasan" in library for library in libraries):
        pytest.skip(f"{shlex.join(COMPILER)} has no AddressSanitizer as a shared library, which Python could preload")
    with one_for_all(tmp_path_factory, "sanitized") as (built, is_built):
        lib = built / "lib"
        if not is_built:
            build = [sys.executable, "setup.py", "-q", "build", "--build-base", built / "build", "--build-lib", lib]
            result = run(*build, cwd=ROOT, CXX=shlex.join(COMPILER), HVDLITE_SANITIZE=ADDRESS)
            assert result.returncode == 0, result.stdout
    environment = {
        # AddressSanitizer itself has to come first, and finds C++'s exceptions only in what is loaded with it.
        "LD_PRELOAD": " ".join(library for library in libraries if re.search(r"san\.so|libstdc\+\+", library)),
        "PYTHONPATH": str(lib),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves memory to its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return lambda *arguments: run(*fixed_addresses, sys.executable, *arguments, **environment)


@pytest.mark.parametrize(
    ("call", "report"),
    [("copy(a, b, 1001)", "heap-buffer-overflow"), ("load32(a + 2)", "misaligned address")],
)
def test_what_is_wrong_is_seen(python: Run, call: str, report: str) -> None:
    program = f"""
import numpy
from hvdlite import _native
arrays = [numpy.zeros(1000, numpy.uint8) for _ in range(2)]
a, b = (array.ctypes.data for array in arrays)
_native.{call}
"""
    result = python("-c", program)
    assert result.returncode != 0
    assert report in result.stdout


@pytest.mark.parametrize("file", UNIT_TESTS)
def test_unit_tests(python: Run, file: str) -> None:
    # Without pytest's capture, in which the last words of a process that is ended would be lost.
    result = python("-m", "pytest", "-q", "-x", "--capture=no", "-p", "no:cacheprovider", file)
    assert result.returncode == 0, result.stdout
