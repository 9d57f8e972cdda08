"""The native code under GCC's sanitizers.

Its unit tests run under AddressSanitizer and UndefinedBehaviorSanitizer, with an extension that setup.py builds for it.
ThreadSanitizer would see little in a Python that was not built for it, whose GIL orders nearly everything: it gets a
program of its own, ranks_as_threads.cpp.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
ADDRESS = "address,undefined,float-cast-overflow"
UNIT_TESTS = [
    "test_native_reduce.py",
    "test_native_pack.py",
    "test_native_staged_allreduce.py",
    "test_native_instruction_sets.py",
    "test_native_signal.py",
    "test_native_socket_bell.py",
    "test_control_page.py",
]
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


@pytest.fixture(scope="module")
def fixed_addresses() -> list[str]:
    """What goes before a command to load it at addresses that are not random, where that is allowed.

    With vm.mmap_rnd_bits of 32, which newer distributions set, programs of GCC's sanitizers end at their start, always
    or now and then (google/sanitizers issues 1614 and 1716).
    """
    command = ["setarch", platform.machine(), "--addr-no-randomize"]
    try:
        return command if run(*command, "true").returncode == 0 else []
    except FileNotFoundError:
        return []


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


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, fixed_addresses: list[str]) -> Run:
    """Runs Python, in tests/unit, with a hvdlite whose extension says what it should not have done."""
    directory = tmp_path_factory.mktemp("address")
    libraries = runtimes(ADDRESS, directory, fixed_addresses)
    if not any("libasan" in library for library in libraries):
        pytest.skip(f"{shlex.join(COMPILER)} has no AddressSanitizer as a shared library, which Python could preload")
    lib = directory / "lib"
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", directory / "build", "--build-lib", lib]
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


@pytest.fixture(scope="module")
def ranks_as_threads(tmp_path_factory: pytest.TempPathFactory, fixed_addresses: list[str]) -> Run:
    directory = tmp_path_factory.mktemp("thread")
    runtimes("thread", directory, fixed_addresses)
    program = directory / "ranks_as_threads"
    sources = [source for source in (ROOT / "csrc").glob("*.cpp") if source.name != "bindings.cpp"]
    # Optimized enough for memory orders to be constants: GCC takes all others for sequentially consistent.
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", "-Wno-psabi", "-iquote", ROOT / "csrc"]
    result = run(*COMPILER, *flags, *sources, Path(__file__).with_name("ranks_as_threads.cpp"), "-o", program)
    assert result.returncode == 0, result.stdout
    return lambda *case: run(*fixed_addresses, program, *case, TSAN_OPTIONS="halt_on_error=1")


def test_a_race_is_seen(ranks_as_threads: Run) -> None:
    result = ranks_as_threads("race")
    assert result.returncode != 0
    assert "data race" in result.stdout


def test_ranks_as_threads(ranks_as_threads: Run) -> None:
    cases = ranks_as_threads().stdout.splitlines()
    assert len(cases) > 1
    results = {case: ranks_as_threads(case) for case in cases if case != "race"}
    failures = {case: result.stdout for case, result in results.items() if result.returncode != 0}
    assert not failures, "\n".join(f"{case}:\n{output}" for case, output in failures.items())
