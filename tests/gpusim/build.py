"""Builds the simulated driver, and the simulated NCCL that works on it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NCCL = HERE / "nccl"
CSRC = HERE.parents[1] / "csrc"

Command = list[str | Path]


def sources() -> list[Path]:
    return sorted(HERE.glob("*.cpp"))


def joined(sources: Sequence[Path]) -> Command:
    """What a compiler is given, and no other source, so that it compiles ``sources`` as one file: most of its work is
    for what they include."""
    *before, last = sources
    return [*(word for source in before for word in ("-include", source)), last]


def command(library: Path, *compiler: str | Path) -> Command:
    """Compiles the simulated driver to ``library`` by ``compiler`` with its options."""
    return [
        *compiler,
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-pthread",
        "-ffp-contract=off",
        "-iquote",
        CSRC,
        *joined(sources()),
        "-ldl",
        "-o",
        library,
    ]


def nccl_command(library: Path, *compiler: str | Path, without: Sequence[str] = ()) -> Command:
    """Compiles the simulated NCCL; one that is older is ``without`` the functions of exported_*.cpp."""
    left_out = [f"exported_{name}" for name in without]
    sources = [path for path in sorted(NCCL.glob("*.cpp")) if path.stem not in left_out]
    return [*compiler, "-std=c++17", "-shared", "-fPIC", "-pthread", *joined(sources), "-ldl", "-o", library]


def built() -> Path:
    """The simulated driver, compiled once per version of its sources and user."""
    return _built("cuda", [*sources(), *HERE.glob("*.h"), *CSRC.rglob("*.h")], command)


def built_nccl(*without: str) -> Path:
    """The simulated NCCL, likewise; see `nccl_command`."""

    def compile_nccl(library: Path, *compiler: str | Path) -> Command:
        return nccl_command(library, *compiler, without=without)

    return _built("-".join(["nccl", *without]), [*NCCL.glob("*.cpp"), *NCCL.glob("*.h")], compile_nccl)


def _built(name: str, depends: Sequence[Path], command: Callable[..., Command]) -> Path:
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(depends))).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"hvdlite-{name}-sim-{os.getuid()}-{version}.so")
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several ranks, one compiles
        if not library.exists():
            own = library.with_suffix(f".{os.getpid()}")
            subprocess.run(command(own, "c++", "-O1"), check=True)
            own.replace(library)
    return library
