"""Wrong lines of the kernels for GPUs."""

from __future__ import annotations

from mutant import Mutant

_KERNELS = "csrc/cuda/kernels.h"
_VALUES = "csrc/cuda/values.h"
_LOOPS = "unit/test_kernels.py::test_as_the_kernels_of_the_host"

MUTANTS = [
    # Kernels for GPUs: edges of tiles, groups and tables, what is rounded when, who does what.
    Mutant(
        _KERNELS,
        "const Count stop = smaller(tile + kTileNumel, p.end);",
        "const Count stop = smaller(tile + kTileNumel - 1, p.end);",
        _LOOPS,
    ),
    Mutant(_KERNELS, "      if (at < begin) body.gap(at, begin);\n", "", _LOOPS),
    Mutant(
        "csrc/cuda/multicast.h",
        "  const Count stride = Count(own.blocks) * own.threads;",
        "  const Count stride = own.threads;",
        "sanitizers/test_kernels_as_fibers.py::test_every_case[thread]",
    ),
    Mutant("csrc/cuda/multicast.h", "values[i] = copy == 0 ? value :", "values[i] = copy < 2 ? value :", _LOOPS),
    Mutant(_VALUES, "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "(bits + 0x8000) >> 16", _LOOPS),
    Mutant(
        _VALUES,
        "return float_of((bits_of(nearest) - (too_far ? 1 : 0)) | (inexact ? 1 : 0));",
        "return nearest;",
        _LOOPS,
    ),
    Mutant(_KERNELS, "if constexpr (kScaled) values[i] = scaled(values[i], p.prescale, 0.0);", "", _LOOPS),
    Mutant(_VALUES, "singles = numel - groups * kCount;", "singles = head;", _LOOPS),
    Mutant(
        _VALUES,
        "for (Count i = first; i < groups; i += stride)",
        "for (Count i = first; i <= groups; i += stride)",
        _LOOPS,
    ),
    Mutant(_KERNELS, "return a < b || a != a ? a : b;", "return a < b ? a : b;", _LOOPS),
    Mutant(
        _KERNELS,
        "divisor == 0.0 ? value * static_cast<float>(factor) : value / static_cast<float>(divisor)",
        "value * static_cast<float>(factor)",
        _LOOPS,
    ),
    Mutant(_KERNELS, "numel, alike ? head : numel,", "numel, head,", _LOOPS),
    Mutant(_KERNELS, "if (tensor.address != 0 && to != from) move", "if (to != from) move", _LOOPS),
    Mutant(  # the result is the same
        _KERNELS,
        "tile += own.blocks * kTileNumel",
        "tile += kTileNumel",
        "sanitizers/test_kernels_as_fibers.py::test_every_case[thread]",
    ),
    Mutant(
        "csrc/gpu/device_kernels.cpp",
        "p.end = is_any_left() ? p.tensors[p.count - 1].end : end;",
        "p.end = end;",
        _LOOPS,
    ),
    Mutant(
        "csrc/gpu/device_kernels.cpp",
        "p.buffer = buffer + (at - begin) * buffer_item_bytes;",
        "p.buffer = buffer + at * buffer_item_bytes;",
        _LOOPS,
    ),
]
