"""Builds hvdlite._native; everything that needs no program is in pyproject.toml.

The result does not depend on the machine it is built on: no -march=native, the kernels choose their instructions at
run time. It links neither torch nor MPI, so one build serves every version of both. Where nvcc is found it compiles the
kernels for GPUs, which else are compiled when they are first used (csrc/cuda/embed.py).

SOURCE_URL is the one place that says where hvdlite is published; the index page's links follow from it.

HVDLITE_SANITIZE=address,undefined builds it with GCC's sanitizers, as tests/sanitizers does, which says how to run it.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import CompileError

# Of the tree that a browser shows, as in "https://.../blob/main"; while empty, the index page has no links to files.
SOURCE_URL = ""
OTHER_SYSTEMS = {
    "darwin": "on macOS run it in a Linux container or virtual machine",
    "win32": "on Windows run it in WSL 2",
    "cygwin": "on Windows run it in WSL 2",
}
COMPILE_ARGS = [
    "-O3",
    "-ffp-contract=off",  # a fused multiply-add on one path only would make ranks differ in the last bit
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # about vectors passed between files; here they stay in one
]
# They come after Python's own flags, of which -fwrapv and -DNDEBUG would hide what is looked for. Unoptimized, since
# then nothing undefined has been optimized away, and the kernels compile in a fifth of the time.
SANITIZE_ARGS = ["-O0", "-g1", "-fno-wrapv", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS", "-fno-sanitize-recover=all"]
# Up to so many compile the files of each of these directories sooner as one. The last is compiled first.
FEW_PROCESSORS = 2
JOINED = {"of_ranks": ("waiting", "node", "prepared", "messages"), "with_pybind11": ("bindings", "calls")}
NEEDED = {
    "#include <optional>\nstd::optional<int> none;\n": (
        "hvdlite needs a C++17 compiler to build its kernels, and none works here; install one "
        "(Debian, Ubuntu: apt install g++; Fedora, RHEL: dnf install gcc-c++; conda: conda install gxx), then try again"
    ),
    "#include <Python.h>\n": (
        "hvdlite needs Python's C headers to build its kernels, and they are not here; install them "
        "(Debian, Ubuntu: apt install python3-dev; Fedora, RHEL: dnf install python3-devel), then try again"
    ),
}


def check_platform() -> None:
    if sys.platform != "linux":
        way_out = OTHER_SYSTEMS.get(sys.platform, "run it in a Linux virtual machine")
        raise SystemExit(
            f"\nhvdlite runs on Linux, where ranks meet in futexes and /dev/shm. This is {sys.platform}: {way_out}."
        )


def joined(sources: list[str], directory: Path) -> list[str]:
    """``sources``, with those of each of `JOINED` as one file in ``directory``: most of what the compiler does for each
    of them is for what they include, such as pybind11's own functions. With the sanitizers those with pybind11 take
    160 s of a processor one by one, and 67 s together; those of ranks 24 s and 6 s."""
    for name, folders in JOINED.items():
        parts = [source for source in sources if Path(source).parent.name in folders]
        path = directory / f"{name}.cpp"
        text = "".join(f'#include "{Path(source).resolve()}"\n' for source in parts)
        if not path.exists() or path.read_text() != text:  # what is newer than the extension has it compiled again
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        sources = [str(path), *(source for source in sources if source not in parts)]
    return sources


class BuildNative(build_ext):
    """build_ext that ends with one sentence on what to install where nothing can be compiled."""

    def build_extensions(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for source, sentence in NEEDED.items():
                path = Path(directory, "check.cpp")
                path.write_text(source)
                try:
                    self.compiler.compile([str(path)], output_dir=directory, extra_postargs=["-std=c++17"])
                except (CompileError, OSError) as error:
                    raise SystemExit(f"\n{sentence}. (The compiler said: {error})") from None
        kernel_image = Path(self.build_temp, "kernel_image.cpp")
        embedding = runpy.run_path("csrc/cuda/embed.py")
        # What is built for sanitizers is never loaded beside a GPU: 6 s of a processor for code that nothing runs.
        embedding["embed"](kernel_image, None if sanitizers else embedding["find_nvcc"]())
        for extension in self.extensions:
            extension.sources.append(str(kernel_image))
            if len(os.sched_getaffinity(0)) <= FEW_PROCESSORS:
                extension.sources = joined(extension.sources, Path(self.build_temp))
        super().build_extensions()


check_platform()
ParallelCompile("HVDLITE_BUILD_JOBS").install()

sanitizers = os.environ.get("HVDLITE_SANITIZE")
sanitize = [f"-fsanitize={sanitizers}"] if sanitizers else []

index_page = runpy.run_path("tools/index_page.py")

setup(
    long_description=index_page["without_relative_links"](Path("README.md").read_text(encoding="utf-8"), SOURCE_URL),
    long_description_content_type="text/markdown",
    project_urls=index_page["project_urls"](SOURCE_URL),
    ext_modules=[
        Pybind11Extension(
            "hvdlite._native",
            sorted(glob("csrc/*/*.cpp")),
            depends=sorted(glob("csrc/*/*.h") + glob("csrc/cuda/*")),
            include_dirs=["csrc"],
            cxx_std=17,
            extra_compile_args=COMPILE_ARGS + (SANITIZE_ARGS + sanitize if sanitize else []),
            extra_link_args=sanitize,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
