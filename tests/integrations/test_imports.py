"""Nobody pays for a library that is installed but not asked for."""

from __future__ import annotations

import subprocess
import sys

LIBRARIES = (
    "accelerate",
    "lightning",
    "lightning_utilities",
    "pytorch_lightning",
    "ray",
    "torchmetrics",
    "transformers",
)


def test_hvdlite_imports_no_training_library() -> None:
    ours = "hvdlite.integrations, hvdlite.ray, hvdlite.torch"
    program = f"import sys, {ours}; print(sorted(set({LIBRARIES}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
