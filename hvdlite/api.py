"""What `import hvdlite` gives: the framework-free part of the public interface."""

from __future__ import annotations

import logging

from hvdlite import _native
from hvdlite.config import INSTRUCTION_SET, Config, instruction_set
from hvdlite.default_runtime import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    restart,
    runtime,
    shutdown,
    size,
    statistics,
)
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import (
    CollectiveError,
    ConfigError,
    DuplicateNameError,
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    RankFailedError,
    ShutDownError,
    StallError,
    StartupError,
    UsageError,
)
from hvdlite.launch import run
from hvdlite.memory.views import TensorView
from hvdlite.runtime import Runtime
from hvdlite.version import __version__

__all__ = [
    "CollectiveError",
    "Config",
    "ConfigError",
    "DType",
    "DuplicateNameError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "NotInitializedError",
    "RankFailedError",
    "ReduceOp",
    "Runtime",
    "ShutDownError",
    "StallError",
    "StartupError",
    "TensorView",
    "UsageError",
    "__version__",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "restart",
    "run",
    "runtime",
    "shutdown",
    "size",
    "statistics",
]

logging.getLogger("hvdlite").addHandler(logging.NullHandler())

if instruction_set():
    try:
        _native.use_instruction_set(instruction_set())
    except ValueError as error:
        raise ConfigError(f"{INSTRUCTION_SET}={instruction_set()!r}: {error}") from error
