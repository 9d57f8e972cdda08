"""`hvdliterun --check-build` about GPUs: what the driver sees, and no more than a look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpusim.build import built
from hvdlite import _native

KERNELS = {
    "ptx": "  [X] kernels: PTX, compiled when hvdlite was built",
    "nvrtc": "  [X] kernels: source, which libnvrtc compiles at first use",
}
MODULE = """
import mmap, os
__file__ = {library!r}
with open({segment!r}, "wb+") as file:
    file.truncate(mmap.PAGESIZE)
    memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
class COMM_WORLD:
    class Get_info(dict):
        def Free(self): pass
def Is_initialized(): return True
def Is_finalized(): return False
"""
WITHOUT_CONTEXTS = """
#include <cstdlib>
extern "C" int cuDevicePrimaryCtxRetain(void**, int) { std::abort(); }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated driver, except that making a context ends the process."""
    directory = tmp_path_factory.mktemp("driver")
    source, library = directory / "driver.cpp", directory / "libdriver.so"
    source.write_text(WITHOUT_CONTEXTS)
    subprocess.run(["c++", "-shared", "-fPIC", "-Wl,--no-as-needed", source, built(), "-o", library], check=True)
    return library


def section(title: str, library: Path, **environ: str) -> list[str]:
    """Its lines."""
    command = [sys.executable, "-m", "hvdlite", "run", "--check-build"]
    environ = os.environ | {"HVDLITE_CUDA_LIBRARY": str(library)} | environ
    said = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    return said.split(f"{title}:\n")[1].split("\n\n")[0].splitlines()


def gpus(library: Path, **environ: str) -> list[str]:
    return section("GPUs", library, **environ)


def test_every_gpu_by_name_and_uuid(driver: Path) -> None:
    assert gpus(driver, GPUSIM_DEVICES="2") == [
        "  [X] CUDA driver, for CUDA 13.0",
        "  [X] GPU 0: Simulated GPU, GPU-01010101-0101-0101-0101-010101010101",
        "  [X] GPU 1: Simulated GPU, GPU-02020202-0202-0202-0202-020202020202",
        KERNELS[_native.kernel_image()],
    ]


def test_a_driver_that_sees_none(driver: Path) -> None:
    assert gpus(driver, CUDA_VISIBLE_DEVICES="")[0].startswith(f"  [ ] CUDA driver: {driver}: cuInit: ")


def test_no_driver(tmp_path: Path) -> None:
    found = gpus(tmp_path / "none.so")
    assert len(found) == 2
    assert found[0].startswith("  [ ] CUDA driver: no CUDA driver: ") and "none.so" in found[0]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ("return 1;", "  [X] MPI, from GPU to GPU: it says that it takes memory of CUDA GPUs"),
        ("return 0;", "  [ ] MPI, from GPU to GPU: it does not say that it takes memory of CUDA GPUs"),
        (
            "__builtin_trap();",
            "  [ ] MPI, from GPU to GPU: it cannot be started here to be asked whether it takes memory of CUDA GPUs",
        ),
    ],
)
def test_mpi_is_asked_in_a_process_of_its_own(tmp_path: Path, answer: str, line: str) -> None:
    """Where mpi4py is linked to an MPI that gives this answer."""
    source, library = tmp_path / "mpi.c", tmp_path / "libmpi.so"
    source.write_text(f"int MPIX_Query_cuda_support(void) {{ {answer} }}")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    segment = Path(f"/dev/shm/sm_segment.{tmp_path.parent.name}.{tmp_path.name}.{os.getpid()}")
    (package / "MPI.py").write_text(MODULE.format(library=str(library), segment=str(segment)))
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    assert line in section("Ways of communication", tmp_path / "none.so", PYTHONPATH=search)
    assert not segment.exists()
