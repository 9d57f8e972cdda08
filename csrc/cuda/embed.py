"""Writes the C++ file that has the kernels in it: their source, and as PTX where nvcc is found.

python3 csrc/cuda/embed.py kernel_image.cpp
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The oldest GPUs that run the PTX. Without --fmad=false a * b + c would be rounded once, and on CPUs twice.
NVCC_ARGS = ["-ptx", "-std=c++17", "--gpu-architecture=compute_80", "--fmad=false"]


def source() -> str:
    """One file without includes."""
    parts = [(HERE / name).read_text() for name in ("parameters.h", "portable.h", "kernels.h")]
    return re.sub(r'^#(pragma once|include ".*")\n', "", "".join(parts), flags=re.MULTILINE)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home, "bin")))


def ptx(nvcc: str | None, directory: Path) -> str:
    """Nothing without an nvcc that works."""
    output = directory / "kernels.ptx"
    if nvcc is None:
        return ""
    result = subprocess.run([nvcc, *NVCC_ARGS, HERE / "kernels.cu", "-o", output], capture_output=True, text=True)
    if result.returncode != 0:
        print(f"kernels will be compiled at their first use, since {nvcc} fails: {result.stderr}", file=sys.stderr)
        return ""
    return output.read_text()


def embed(file: Path, nvcc: str | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    chars = "".join(
        f'extern const char {name}[];\nconst char {name}[] = R"hvdlite({text})hvdlite";\n'
        for name, text in {"kKernelSource": source(), "kKernelPtx": ptx(nvcc, file.parent)}.items()
    )
    file.write_text(f"namespace hvdlite {{\n{chars}}}  // namespace hvdlite\n")


if __name__ == "__main__":
    embed(Path(sys.argv[1]), find_nvcc())
