"""The native code on a processor that orders less of what memory sees: compiled for aarch64, and run by qemu.

Qemu shows whether the code is right there, but reorders no accesses; ThreadSanitizer looks for orders that were not
asked for, whatever the processor (test_threads.py).
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from compiler import CSRC, Run, ranks_as_threads, run

CROSS = "aarch64-linux-gnu-g++"
QEMU = "qemu-aarch64-static"
FLAGS = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-iquote", CSRC]
CALLED = ["-ffunction-sections", "-Wl,--gc-sections"]  # so that what is not called need not be there
NEEDED = "apt install g++-aarch64-linux-gnu qemu-user-static"


@pytest.fixture(scope="module")
def cross() -> str:
    found = shutil.which(CROSS)
    if found is None:
        pytest.skip(f"no {CROSS} ({NEEDED})")
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, cross: str) -> Run:
    """ranks_as_threads, which is run with the name of a case, and names all cases without one."""
    qemu = shutil.which(QEMU)
    if qemu is None:
        pytest.skip(f"no {QEMU} ({NEEDED})")
    directory = tmp_path_factory.mktemp("aarch64")
    binary = directory / "ranks_as_threads"
    result = run(cross, *FLAGS, *CALLED, "-static", *ranks_as_threads(directory), "-o", binary)
    assert result.returncode == 0, result.stdout
    return lambda *case: run(qemu, binary, *case)


def test_every_case(program: Run) -> None:
    cases = [case for case in program().stdout.splitlines() if case != "race"]  # for ThreadSanitizer
    assert len(cases) > 1
    results = {case: program(case) for case in cases}
    failures = {case: result.stdout for case, result in results.items() if result.returncode != 0}
    assert not failures, "\n".join(f"{case}:\n{output}" for case, output in failures.items())


@pytest.mark.thorough
def test_the_extension_compiles(tmp_path: Path, cross: str) -> None:
    """All of it: Python's headers of this machine do, as both processors have 64 bits."""
    pybind11 = pytest.importorskip("pybind11")
    headers = ["-isystem", sysconfig.get_path("include"), "-isystem", pybind11.get_include()]
    sources = sorted(CSRC.glob("*/*.cpp"))
    assert sources
    as_for_python = ["-fPIC", "-fvisibility=hidden"]
    result = run(cross, *FLAGS, *headers, *as_for_python, "-c", *sources, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
