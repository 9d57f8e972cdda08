"""What programs find in `hvdlite`; command line tools need none of it."""

from hvdlite.config import Config as Config
from hvdlite.default_runtime import (
    cross_rank as cross_rank,
    cross_size as cross_size,
    init as init,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    restart as restart,
    runtime as runtime,
    shutdown as shutdown,
    size as size,
    statistics as statistics,
)
from hvdlite.dtypes import DType as DType, ReduceOp as ReduceOp
from hvdlite.errors import (
    CollectiveError as CollectiveError,
    ConfigError as ConfigError,
    DivergenceError as DivergenceError,
    DuplicateNameError as DuplicateNameError,
    HorovodInternalError as HorovodInternalError,
    HorovodVersionMismatchError as HorovodVersionMismatchError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    MismatchError as MismatchError,
    NotInitializedError as NotInitializedError,
    NumericsError as NumericsError,
    RankFailedError as RankFailedError,
    ShutDownError as ShutDownError,
    StallError as StallError,
    StartupError as StartupError,
    UnrecoverableError as UnrecoverableError,
    UsageError as UsageError,
)
from hvdlite.job_runtime import Runtime as Runtime
from hvdlite.memory.views import TensorView as TensorView
