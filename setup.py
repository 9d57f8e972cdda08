"""Builds hvdlite._native; everything that needs no program is in pyproject.toml.

The result does not depend on the machine it is built on: no -march=native, the kernels choose their instructions at
run time. It links neither torch nor MPI, so one build serves every version of both.
"""

from __future__ import annotations

import subprocess
import tempfile
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError

COMPILE_ARGS = [
    "-O3",
    "-ffp-contract=off",  # a fused multiply-add on one path only would make ranks differ in the last bit
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors are passed between functions of one file only
]


class BuildNative(build_ext):
    """build_ext that says in one sentence what to install where nothing compiles."""

    def build_extensions(self) -> None:
        self._check_compiler()
        super().build_extensions()

    def _check_compiler(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory, "check.cpp")
            source.write_text("#include <atomic>\n#include <optional>\nstd::optional<std::atomic<int>*> none;\n")
            try:
                self.compiler.compile([str(source)], output_dir=directory, extra_postargs=["-std=c++17"])
            except (CompileError, OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    "hvdlite needs a C++17 compiler, and none works here: install GCC 9 or newer "
                    "(Debian, Ubuntu: apt install g++; Fedora, RHEL: dnf install gcc-c++; conda: conda install gxx) "
                    f"or set CXX to one ({error})."
                ) from error


ParallelCompile("HVDLITE_BUILD_JOBS", default=2).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "hvdlite._native",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            cxx_std=17,
            extra_compile_args=COMPILE_ARGS,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
