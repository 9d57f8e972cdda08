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
# Without --fmad=false a * b + c would be rounded once, and on CPUs twice.
NVCC_ARGS = ["-ptx", "-std=c++17", "--fmad=false"]
# The oldest GPUs that run them.
ARCHITECTURES = {"kernels": "compute_80", "multicast": "compute_90"}


def source(module: str = "kernels") -> str:
    """One file without includes."""
    parts = [(HERE / f"{name}.h").read_text() for name in ("parameters", "portable", "values", module)]
    return re.sub(r'^#(pragma once|include ".*")\n', "", "".join(parts), flags=re.MULTILINE)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home, "bin")))


def ptx(nvcc: str | None, directory: Path, module: str = "kernels") -> str:
    """Nothing without an nvcc that works."""
    output = directory / f"{module}.ptx"
    if nvcc is None:
        return ""
    arguments = [*NVCC_ARGS, f"--gpu-architecture={ARCHITECTURES[module]}"]
    result = subprocess.run([nvcc, *arguments, HERE / f"{module}.cu", "-o", output], capture_output=True, text=True)
    if result.returncode != 0:
        print(f"kernels will be compiled at their first use, since {nvcc} fails: {result.stderr}", file=sys.stderr)
        return ""
    return output.read_text()


def embed(file: Path, nvcc: str | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        "kKernelSource": source(),
        "kKernelPtx": ptx(nvcc, file.parent),
        "kMulticastSource": source("multicast"),
        "kMulticastPtx": ptx(nvcc, file.parent, "multicast"),
    }
    chars = "".join(
        f'extern const char {name}[];\nconst char {name}[] = R"hvdlite({text})hvdlite";\n'
        for name, text in texts.items()
    )
    text = f"namespace hvdlite {{\n{chars}}}  // namespace hvdlite\n"
    if not file.exists() or file.read_text() != text:  # what is newer than the extension has it compiled again
        file.write_text(text)


if __name__ == "__main__":
    embed(Path(sys.argv[1]), find_nvcc())
