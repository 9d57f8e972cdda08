"""Builds kernels.cpp with the kernels for the host."""

from __future__ import annotations

import fcntl
import hashlib
import os
import runpy
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC, TESTS = ROOT / "csrc", ROOT / "tests"
COMPARED = [
    *(CSRC / "gpu" / f"{name}.cpp" for name in ("device_stream", "nvrtc")),
    *(CSRC / "kernels" / f"{name}.cpp" for name in ("instruction_set", "pack", "reduce")),
]
WATCHED = [
    *(CSRC / "gpu" / f"{name}.cpp" for name in ("device_kernels", "kernel_module", "multicast_kernels")),
    TESTS / "gpusim" / "host_kernels.cpp",
    TESTS / "kernels" / "table_driver.cpp",
    TESTS / "kernels" / "kernels.cpp",
]
SCHEDULER = [TESTS / "gpusim" / "fibers.cpp", TESTS / "gpusim" / "gpu_thread.cpp"]
# As setup.py: a fused multiply-add would be rounded once.
OPTIONS = ["-std=c++17", "-ffp-contract=off", "-Wno-psabi", "-pthread", "-iquote", str(CSRC), "-iquote", str(TESTS)]


def build(directory: Path, compiler: Sequence[str], unwatched: Iterable[Path], *sanitizers: str) -> Path:
    """The program, in which ``sanitizers`` watch what belongs to the kernels, and not what is compiled already."""
    watched = compiled(directory, [*compiler, "-O1", "-g", *sanitizers], WATCHED)
    program = directory / "kernels"
    run([*compiler, *sanitizers, *watched, *unwatched, "-pthread", "-ldl", "-o", program])
    return program


def build_unwatched(compiler: Sequence[str]) -> list[Path]:
    """Who compares the kernels and schedules them: objects for any number of programs, made once like `built`."""
    with _kept(compiler) as directory:
        image, done = directory / "kernel_image.cpp", directory / "done"
        sources = [*COMPARED, *SCHEDULER, image]
        if done.exists():
            return [_object(directory, source) for source in sources]
        runpy.run_path(str(CSRC / "cuda" / "embed.py"))["embed"](image, None)
        objects = compiled(directory, [*compiler, "-O1"], sources)
        done.touch()
        return objects


def compiled(directory: Path, compiler: Sequence[str], sources: Sequence[Path]) -> list[Path]:
    def compile_one(source: Path) -> Path:
        output = _object(directory, source)
        run([*compiler, *OPTIONS, "-c", source, "-o", output])
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def run(command: Sequence[str | Path]) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout


def built() -> Path:
    """The program without sanitizers, built once per version of its sources, compiler and user."""
    compiler = ["c++"]
    unwatched = build_unwatched(compiler)
    with _kept(compiler) as directory:
        program = directory / "kernels"
        return program if program.exists() else build(directory, compiler, unwatched)


def _object(directory: Path, source: Path) -> Path:
    return directory / f"{source.stem}.o"


@contextmanager
def _kept(compiler: Sequence[str]) -> Iterator[Path]:
    """A directory for what ``compiler`` makes of these sources, by one process after the other."""
    files = sorted(path for folder in (CSRC, TESTS / "gpusim", TESTS / "kernels") for path in folder.rglob("*.*"))
    contents = [path.read_bytes() for path in files if path.suffix != ".pyc"]
    version = hashlib.sha256(b"".join([shlex.join(compiler).encode(), *contents])).hexdigest()[:16]
    directory = Path(tempfile.gettempdir(), f"hvdlite-kernels-{os.getuid()}-{version}")
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
