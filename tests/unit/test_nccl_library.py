"""Which NCCL a process gets, and what is said where there is none that will do; with libraries that do nothing."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite import nccl_library
from hvdlite.device_engine import _Card, _connected_by_nccl
from hvdlite.nccl_library import NcclLibrary

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "csrc" / "gpu" / "nccl_library.h").read_text()
SYMBOLS = re.findall(r"\b(nccl[A-Z]\w+), (?:Result|const char\*)", TABLE)
NAME = "libnccl.so.2"
OWN_FUNCTION = (
    "int ncclOwnVersion(void) { return %d; } int ncclGetVersion(int *v) { *v = ncclOwnVersion(); return 0; }\n"
)


def make(directory: Path, version: int, without: str = "") -> Path:
    """A library in ``directory``; it learns its version from itself, by way of the dynamic linker."""
    directory.mkdir(parents=True)
    functions = [symbol for symbol in SYMBOLS if symbol not in ("ncclGetVersion", without)]
    source = directory / "nccl.c"
    source.write_text(OWN_FUNCTION % version + "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions))
    library = directory / NAME
    subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{NAME}", source, "-o", library], check=True)
    return library


def load(
    *, before: Path | None = None, wheels: Path | None = None, system: Path | None = None, named: Path | None = None
) -> str:
    """What a new process says, which has the library ``before`` already, for all to call."""
    code = [
        "import ctypes, os, sys",
        f"ctypes.CDLL({str(before)!r}, os.RTLD_GLOBAL | os.RTLD_NOW)" if before else "",
        "from hvdlite import builds, nccl_library",
        "sys.path[:] = [path for path in sys.path if not os.path.exists(path + '/nvidia/nccl')]",  # torch's, for GPUs
        f"sys.path.append({str(wheels)!r})" if wheels else "",
        "try: library = nccl_library.load()",
        "except RuntimeError as error: print(builds.nccl_built(), error)",
        "else: print(builds.nccl_built(), library)",
    ]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HVDLITE_CUDA_LIBRARY": "/nowhere"}
    environ["HVDLITE_NCCL_LIBRARY"] = str(named or "")
    environ["LD_LIBRARY_PATH"] = str(system.parent if system else "")
    command = [sys.executable, "-c", "\n".join(code)]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.strip()


def test_the_table_has_been_read() -> None:
    assert {"ncclGetVersion", "ncclCommInitRankConfig", "ncclReduceScatter", "ncclGetLastError"} <= set(SYMBOLS)


def test_what_the_process_has_goes_before_all_that_nobody_named(tmp_path: Path) -> None:
    before, system = make(tmp_path / "torch", 22809), make(tmp_path / "system", 22105)
    wheels = tmp_path / "site-packages"
    make(wheels / "nvidia" / "nccl" / "lib", 22304)
    assert load(before=before, wheels=wheels, system=system) == f"22809 2.28.9, {before}"


def test_a_wheel_goes_before_the_system(tmp_path: Path) -> None:
    wheels, system = tmp_path / "site-packages", make(tmp_path / "system", 22105)
    wheel = make(wheels / "nvidia" / "nccl" / "lib", 22304)
    assert load(wheels=wheels, system=system) == f"22304 2.23.4, {wheel}"
    assert load(wheels=tmp_path, system=system) == f"22105 2.21.5, {system}"


def test_what_is_named_goes_before_everything(tmp_path: Path) -> None:
    """And calls its own functions, even where another copy was there first."""
    before, system = make(tmp_path / "torch", 22809), make(tmp_path / "system", 22105)
    named = make(tmp_path / "named", 23007)
    assert load(before=before, system=system, named=named) == f"23007 2.30.7, {named}"


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    said = load(named=tmp_path / "none.so", system=make(tmp_path / "system", 22105))
    assert said.startswith("0 HVDLITE_NCCL_LIBRARY: ")
    assert "none.so" in said


@pytest.mark.skipif(ctypes.util.find_library("nccl") is not None, reason="the system has an NCCL")
def test_no_library() -> None:
    assert re.fullmatch(rf"0 no NCCL: {NAME}: .+", load())


def test_a_library_that_is_too_old(tmp_path: Path) -> None:
    old = make(tmp_path / "old", 21304)
    assert load(named=old) == f"0 {old} is NCCL 2.13.4; hvdlite needs 2.14.0 or later"
    oldest = make(tmp_path / "oldest", 21403)
    assert load(named=oldest) == f"21403 2.14.3, {oldest}"
    ancient = make(tmp_path / "ancient", 2708)
    assert load(named=ancient) == f"0 {ancient} is NCCL 2.7.8; hvdlite needs 2.14.0 or later"


@pytest.mark.parametrize("symbol", ["ncclCommInitRankConfig", "ncclGroupEnd"])
def test_a_library_without_a_function(tmp_path: Path, symbol: str) -> None:
    library = make(tmp_path / "old", 22809, without=symbol)
    assert load(named=library) == f"0 {library} has no {symbol}; hvdlite needs NCCL 2.14.0 or later"


@pytest.mark.parametrize("symbol", ["ncclCommRegister", "ncclCommWindowDeregister"])
def test_a_library_that_is_older_than_a_function(tmp_path: Path, symbol: str) -> None:
    assert symbol in SYMBOLS
    library = make(tmp_path / "old", 22210, without=symbol)
    assert load(named=library) == f"22210 2.22.10, {library}"


OLDER_NCCL = """
import nccl_lab
from hvdlite.dtypes import DType

class Alone:
    rank, size = 0, 1
    def allgather(self, value): return [value]

simulated = nccl_lab.simulated()
memory = nccl_lab.OwnMemory()
backend = nccl_lab.build(Alone(), memory=memory)
buf = memory.allocate(4000).buffer(0, 1000, DType.FLOAT32)
backend.prepare(buf)
print(getattr(simulated, "nccl_sim_buffers", lambda: "none")())
backend.allreduce(buf)
backend.close()
"""


@pytest.mark.parametrize(("without", "registered"), [("windows", "1"), ("windows buffers", "none")])
def test_memory_is_registered_as_far_as_the_library_can(without: str, registered: str) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environ["NCCL_LAB_WITHOUT"] = without
    command = [sys.executable, "-c", OLDER_NCCL]
    assert subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.strip() == registered


def test_wheels_are_where_pip_puts_them(tmp_path: Path) -> None:
    (tmp_path / "a" / "nvidia").mkdir(parents=True)
    library = make(tmp_path / "b" / "nvidia" / "nccl" / "lib", 22809)
    assert nccl_library.wheels([str(tmp_path / "a"), "", str(tmp_path / "b")]) == [str(library)]


@pytest.mark.parametrize(
    ("setting", "version", "shared"), [("1", 23003, True), ("1", 22907, False), ("0", 23003, False)]
)
def test_ranks_on_one_gpu_are_connected_where_nccl_says_that_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, setting: str, version: int, shared: bool
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", setting)
    library = NcclLibrary("libnccl.so.2", version)
    assert _connected_by_nccl([_Card("a", nccl=library), _Card("a", nccl=library)]) == shared
    assert _connected_by_nccl([_Card("a", nccl=library), _Card("b", nccl=library)])
    assert not _connected_by_nccl([_Card("a", nccl=library), _Card("b")])


def test_check_build_says_which(tmp_path: Path) -> None:
    library = make(tmp_path / "nccl", 22809)
    environ = os.environ | {"HVDLITE_NCCL_LIBRARY": str(library)}
    command = [sys.executable, "-m", "hvdlite", "run", "--check-build"]
    said = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    assert f"  [X] NCCL, between GPUs: 2.28.9, {library}\n" in said
    environ["HVDLITE_NCCL_LIBRARY"] = "/nowhere"
    said = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    assert "  [ ] NCCL, between GPUs: HVDLITE_NCCL_LIBRARY: /nowhere: " in said
