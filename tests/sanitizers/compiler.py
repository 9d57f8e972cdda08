"""The compiler of these tests, and what its sanitizers need to run."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpusim.build import command

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
UNIT = ROOT / "tests" / "unit"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
# Optimized enough for memory orders to be constants: GCC takes all others for sequentially consistent.
THREAD_FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fsanitize=thread", "-Wno-psabi", "-iquote", CSRC]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def ranks_as_threads(directory: Path) -> list[Path]:
    """The sources of that program, and of what ranks do on CPUs: they need neither Python nor a GPU. All but kernels,
    which are compiled for several processors, are one file in ``directory``: most of the compiler's work is for what
    they include (8 s of a processor, for 26)."""
    parts = [CSRC / part for part in ("waiting", "node", "prepared", "messages")]
    joined = [source for part in parts for source in sorted(part.glob("*.cpp"))]
    joined += [HERE / f"{name}_as_threads.cpp" for name in ("nodes", "ordered", "prepared", "ranks")]
    file = directory / "ranks_as_threads.cpp"
    file.write_text("".join(f'#include "{source}"\n' for source in joined))
    return [file, *sorted((CSRC / "kernels").glob("*.cpp"))]


def of_gpus(*names: str) -> list[Path]:
    return [CSRC / "gpu" / f"{name}.cpp" for name in names]


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


@contextmanager
def one_for_all(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """A directory that all workers of pytest-xdist share, by one after the other; and whether it was used before."""
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    directory.mkdir(exist_ok=True)
    done = directory / "done"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory, done.exists()
        done.touch()


def thread_driver(factory: pytest.TempPathFactory) -> Path:
    """The simulated driver for ThreadSanitizer, compiled once for all tests."""
    with one_for_all(factory, "thread-driver") as (directory, is_built):
        driver = directory / "driver.so"
        if not is_built:
            result = run(*command(driver, *COMPILER, *THREAD_FLAGS))
            assert result.returncode == 0, result.stdout
    return driver


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
