"""Two ranks add with the hvdlite that is installed, without torch and MPI: hvdliterun -np 2 tools/wheel_check.py"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np

import hvdlite
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import allreduce_async

extension = Path(hvdlite._native.__file__)
assert Path(__file__).resolve().parents[1] not in extension.parents, f"{extension} is the checkout's"
flags = set(Path("/proc/cpuinfo").read_text().split()) if platform.machine() == "x86_64" else set()
widest = "avx512" if "avx512vl" in flags else "avx2" if "avx2" in flags else "plain"
taken = hvdlite._native.instruction_set()
assert taken == widest, f"the kernels take {taken}, not {widest}"
hvdlite.init()
assert hvdlite.size() == 2
array = np.arange(100_000, dtype=np.float32) * (hvdlite.rank() + 1)
view = TensorView.of_numpy(array)
allreduce_async(hvdlite.runtime().group, [view], [view]).wait()
np.testing.assert_array_equal(array, np.arange(100_000) * 3)
print(f"rank {hvdlite.rank()}: {platform.machine()}, Python {platform.python_version()}, {extension}")
