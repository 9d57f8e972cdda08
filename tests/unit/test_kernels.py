"""The kernels for GPUs: what compilers make of them, and what they do, one GPU thread after the other on the host."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kernels.build import CSRC, ROOT, built

EMBED = runpy.run_path(str(CSRC / "cuda" / "embed.py"))
CASES = [
    "reduce",
    "reduce all scalings",
    "reduce many arrays",
    "move types",
    "move tiles",
    "move tables",
    "fill",
    "multicast",
    "refused",
    "turns",
]
Result = subprocess.CompletedProcess


def run(*command: str | Path, **environment: str) -> Result[str]:
    return subprocess.run(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@pytest.fixture(scope="module")
def kernels() -> Path:
    if shutil.which("c++") is None:
        pytest.skip("there is no compiler c++")
    return built()


# What they do.


def test_cases_are_all(kernels: Path) -> None:
    assert sorted(run(kernels).stdout.splitlines()) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_as_the_kernels_of_the_host(kernels: Path, case: str) -> None:
    result = run(kernels, case, "loops")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("case", CASES)
def test_whoever_comes_first(kernels: Path, case: str) -> None:
    for seed in range(3):
        result = run(kernels, case, str(seed))
        assert result.returncode == 0, (seed, result.stdout)


# What the compilers make of them.


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = EMBED["find_nvcc"]()
    if found is None:
        pytest.skip("there is no nvcc")
    return str(found)


@cache
def kernel_names(module: str = "kernels") -> list[str]:
    """As whoever launches them spells them, out of the lists in parameters.h."""
    text = (CSRC / "cuda" / "parameters.h").read_text()
    rows = dict(re.findall(r"#define HVDLITE_(\w+)\(F\)((?:.*\\\n)+.*)", text))
    if module == "multicast":
        added = re.findall(r"F\((\w+),", rows["ADDED_BY_MULTICAST"])
        return ["multicast_store", *(f"multicast_sum_{name}" for name in added)]
    names = ["fill"]
    names += [f"reduce_{name}" for name in re.findall(r"F\((\w+),", rows["REDUCED"])]
    for verb in ("pack", "unpack"):
        names += [f"{verb}_{source}_{to}" for source, to in re.findall(r"F\((\w+), \w+, (\w+),", rows["CASTS"])]
        names += [f"{verb}_copy_{size}" for size in re.findall(r"F\((\d),", rows["COPIES"])]
    return names


def check_machine_code(nvcc: str, module: str, architecture: str, source: Path, *arguments: str) -> None:
    """All kernels of ``source`` become code for ``architecture`` that spills nothing."""
    chosen = f"--gpu-architecture={architecture}"
    output = source.with_suffix(".cubin")
    result = run(nvcc, *arguments, chosen, "-cubin", "--resource-usage", source, "-o", output)
    assert result.returncode == 0, result.stdout
    compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", result.stdout)
    assert sorted(compiled) == sorted((name, architecture) for name in kernel_names(module))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.stdout)
    assert len(spills) >= len(compiled)
    assert set(spills) == {("0", "0")}, result.stdout


# For sm_80 see test_ptx: of the source nvcc would make the same PTX once more first.
@pytest.mark.parametrize(
    ("module", "architecture"),
    [
        ("kernels", "sm_90"),
        ("multicast", "sm_90"),
        pytest.param("kernels", "sm_100", marks=pytest.mark.thorough),
        pytest.param("multicast", "sm_100", marks=pytest.mark.thorough),
    ],
)
def test_gpu_code_spills_nothing(nvcc: str, tmp_path: Path, module: str, architecture: str) -> None:
    embedded = tmp_path / "kernels.cu"  # as it is in the extension
    embedded.write_text(EMBED["source"](module))
    arguments = [argument for argument in EMBED["NVCC_ARGS"] if argument != "-ptx"]
    check_machine_code(nvcc, module, architecture, embedded, *arguments)


def test_ptx(nvcc: str, tmp_path: Path) -> None:
    ptx = EMBED["ptx"](nvcc, tmp_path)
    assert sorted(re.findall(r"\.entry (\w+)", ptx)) == sorted(kernel_names())
    assert re.findall(r"^\.target (\w+)", ptx, re.MULTILINE) == ["sm_80"]
    assert "fma." not in ptx  # rounded once, where CPUs round twice
    assert re.search(r"ld(\.global)?\.v4", ptx)  # 16 bytes at once
    check_machine_code(nvcc, "kernels", "sm_80", tmp_path / "kernels.ptx")


def test_ptx_of_multicast(nvcc: str, tmp_path: Path) -> None:
    """16-bit floats are added in fp32, by whole vectors."""
    ptx = EMBED["ptx"](nvcc, tmp_path, "multicast")
    assert sorted(re.findall(r"\.entry (\w+)", ptx)) == sorted(kernel_names("multicast"))
    assert re.findall(r"^\.target (\w+)", ptx, re.MULTILINE) == ["sm_90"]
    added = set(re.findall(r"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.([\w.:]+)", ptx))
    assert added == {"acc::f32.v4.f16x2", "acc::f32.v4.bf16x2", "v4.f32", "f64"}
    assert set(re.findall(r"multimem\.st\.relaxed\.sys\.global\.([\w.:]+)", ptx)) == {"v4.f32"}


def test_a_compiler_that_fails_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "nvcc"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert EMBED["find_nvcc"]() == str(fails)
    assert EMBED["ptx"](str(fails), tmp_path) == ""


@cache
def nvrtc() -> Path | None:
    """The directory of a libnvrtc."""
    places = [Path(place, "nvidia") for place in [*site.getsitepackages(), *sys.path]]
    wheels = [file for place in places for file in place.glob("*/lib/libnvrtc.so.1[23]")]
    known = [Path(place, "libnvrtc.so.13") for place in os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    system = [Path("/usr/local/cuda/lib64/libnvrtc.so.13"), Path("/usr/local/cuda/lib64/libnvrtc.so.12")]
    return next((file.parent for file in [*wheels, *known, *system] if file.exists()), None)


def version_of(directory: Path) -> tuple[int, int]:
    (library,) = directory.glob("libnvrtc.so.1[23]")
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert ctypes.CDLL(str(library)).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return major.value, minor.value


def test_the_compiler_at_run_time(kernels: Path, tmp_path: Path) -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("there is no libnvrtc; pip install nvidia-cuda-nvrtc")
    environment = {"LD_LIBRARY_PATH": str(library)}
    command = [kernels, "compile", "kernels", tmp_path / "hvdlite"]
    first, again = (subprocess.run(command, env=environment, capture_output=True) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(b"\x7fELF")
    for name in kernel_names():
        assert name.encode() in first.stdout
    (kept,) = (tmp_path / "hvdlite").iterdir()
    assert kept.read_bytes() == first.stdout == again.stdout
    kept.write_bytes(b"kept")
    assert subprocess.run(command, env=environment, capture_output=True).stdout == b"kept"
    for nowhere in ("", "/proc/nowhere"):
        command[-1] = nowhere
        assert subprocess.run(command, env=environment, capture_output=True).stdout == first.stdout
    multicast = subprocess.run([kernels, "compile", "multicast"], env=environment, capture_output=True)
    if version_of(library) >= (12, 2):  # older ones know no sums of 16-bit floats in fp32, and it is an error in words
        assert multicast.stdout.startswith(b"\x7fELF"), multicast.stderr
    else:
        assert b"libnvrtc cannot compile them" in multicast.stderr


def test_processes_of_one_number_that_keep_kernels_at_a_time(kernels: Path, tmp_path: Path) -> None:
    """As those of two hosts or containers may be, which share a directory."""
    library = nvrtc()
    if library is None:
        pytest.skip("there is no libnvrtc; pip install nvidia-cuda-nvrtc")
    environment = {"LD_LIBRARY_PATH": str(library)}
    compile_into = f'"{kernels}" compile kernels "{tmp_path}"'
    first = subprocess.run(compile_into, shell=True, env=environment, capture_output=True)
    (kept,) = tmp_path.iterdir()
    other = f'mv "{kept}" "{kept}.$$" && exec {compile_into}'  # which keeps its number
    assert subprocess.run(other, shell=True, env=environment, capture_output=True).stdout == first.stdout
    assert kept.read_bytes() == first.stdout
    (theirs,) = tmp_path.glob(f"{kept.name}.*")
    assert theirs.read_bytes() == first.stdout


def test_without_a_compiler_at_run_time(kernels: Path, tmp_path: Path) -> None:
    if nvrtc() is not None and not os.environ.get("LD_LIBRARY_PATH"):
        pytest.skip("there is a libnvrtc, which cannot be hidden")
    result = run(kernels, "compile", "kernels", str(tmp_path), LD_LIBRARY_PATH="")
    assert result.returncode != 0
    assert "install a torch for CUDA, or nvidia-cuda-nvrtc" in result.stdout


# What csrc/gpu/cuda_driver.h says of the driver.


@cache
def cuda_headers() -> Path | None:
    found = EMBED["find_nvcc"]()
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]
    if found is not None:
        stated = run(found, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null").stdout
        places += [Path(place) for place in re.findall(r'"-I([^"]+)"', stated)]
    return next((place for place in places if (place / "cuda.h").exists()), None)


WRONG = [
    ("kMultiprocessorCount = 16", "kMultiprocessorCount = 17"),
    (
        "(Stream, Address, std::uint32_t value, unsigned flags)",
        "(Stream, Address, std::uint64_t value, unsigned flags)",
    ),
    ("(void** memory, std::size_t n, unsigned flags)", "(void** memory, std::size_t n)"),
    ("(Device * device, int ordinal)", "(Device device, int ordinal)"),
    ("int handle_types;", "long handle_types;"),
]


@pytest.mark.parametrize(("right", "wrong"), [("", ""), *WRONG])
def test_driver_table(tmp_path: Path, right: str, wrong: str) -> None:
    headers = cuda_headers()
    if headers is None:
        pytest.skip("there is no cuda.h")
    text = (CSRC / "gpu" / "cuda_driver.h").read_text()
    assert right in text
    changed = tmp_path / "gpu" / "cuda_driver.h"
    changed.parent.mkdir()
    changed.write_text(text.replace(right, wrong))
    source = ROOT / "tests" / "kernels" / "driver_table.cpp"
    result = run("c++", "-std=c++17", "-fsyntax-only", "-isystem", headers, "-iquote", tmp_path, source)
    assert (result.returncode != 0) == bool(right), result.stdout
