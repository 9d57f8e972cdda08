"""Ranges in other tools' profiles, with the names of the timeline: torch.profiler's, and NVTX's for Nsight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hvdlite import environment
from hvdlite.recorder import Profiler

_INJECTION = "NVTX_INJECTION64_PATH"  # the library by which Nsight Systems and others hear of ranges; they set it


def profiler_of_this_process(nvtx_is_disabled: bool) -> Profiler:
    """What `hvdlite.recorder.Recorder` shows spans to."""
    if _INJECTION in environment.variables() and not nvtx_is_disabled and torch.cuda.is_available():
        return _NvtxRanges()
    return torch.autograd.profiler  # type: ignore[return-value]


class _NvtxRanges:
    """A profiler that always runs, in a process that was started by one. On any thread."""

    _is_profiler_enabled = True

    def record_function(self, name: str) -> AbstractContextManager[Any, Any]:
        if torch.autograd.profiler._is_profiler_enabled:
            return torch.autograd.profiler.record_function(name)  # under emit_nvtx() this is NVTX's as well
        return _range(name)


@contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push(name)
    try:
        yield
    finally:
        nvtx.range_pop()
