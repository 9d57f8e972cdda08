"""Every exception that hvdlite raises on purpose.

HorovodInternalError(RuntimeError)       a collective did not happen; elastic code catches this name
├── MismatchError                        the caller's mistake, the same text on every rank; the job can go on
├── UsageError(…, ValueError, AssertionError)  a mistake of this rank's program, before anything was submitted
├── DivergenceError                      parameters or optimizer state differ between ranks; raised on every rank
├── ShutDownError                        hvdlite is shutting down, or this process was forked
│   └── NotInitializedError(…, ValueError)  before init(), and after shutdown()
└── CollectiveError                      the world failed; this runtime is closed
    ├── RankFailedError                  a rank died, raised, or stopped answering; names it
    ├── UnrecoverableError               hvd.elastic.run cannot go on
    └── StallError                       a rank never submitted what the others wait for
StartupError(RuntimeError)               init() cannot succeed: network, versions, MPI thread level, memory
├── ConfigError(StartupError, ValueError)  a setting does not make sense
└── HorovodVersionMismatchError(StartupError, ImportError)  ranks run different versions of a package
NumericsError(FloatingPointError)        a gradient of this rank is NaN or infinite
DuplicateNameError(ValueError)           a name that is already in flight
HostsUpdatedInterrupt(RuntimeError)      no failure: elastic code starts over since the hosts of the job have changed
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

from hvdlite.processes import ProcessAddress


class HorovodInternalError(RuntimeError):
    """A collective did not happen. Horovod's name, so that code that catches it keeps working."""


class MismatchError(HorovodInternalError):
    """Ranks submitted the same name with different dtype, shape, op, root or scale."""


class UsageError(HorovodInternalError, ValueError, AssertionError):
    """A call that makes no sense here, on this rank alone: a wrong op, or gradients touched on their way.

    The job can go on. Programs written for Horovod catch HorovodInternalError for some of these mistakes, ValueError or
    AssertionError for others.
    """


class DivergenceError(HorovodInternalError):
    """Ranks that should train alike have other parameters or optimizer state: a flipped bit, or a program's mistake.

    With HVDLITE_CHECK_EVERY, by step() of every rank. The job can go on, and elastic code goes back to its last commit.
    """


class ShutDownError(HorovodInternalError):
    """A rank has shut hvdlite down, so that an operation cannot complete; or this process is a forked child.

    Args:
        leaver: the process of that rank, which ends; None where it goes on.
        is_final: that rank comes to no other start.
    """

    def __init__(self, text: str, *, leaver: ProcessAddress | None = None, is_final: bool = False) -> None:
        super().__init__(text)
        self.leaver = leaver
        self.is_final = is_final


class NotInitializedError(ShutDownError, ValueError):
    """hvdlite does not run in this process: before init(), or after shutdown()."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text or _not_running())


def _not_running() -> str:
    text = "hvdlite is not running in this process; call hvd.init() first"
    if multiprocessing.parent_process() is not None:
        text += ". A rank's own worker (of a DataLoader, for example) cannot: hand it what it needs, as hvd.rank()"
    return text


class CollectiveError(HorovodInternalError):
    """Communication failed. The contents of buffers in flight are undefined and the runtime is closed."""


@contextmanager
def gpu_blamed(rank: int, title: str) -> Iterator[None]:
    """In the ``with`` block ``rank`` asks the driver for a part of ``title``, on which other ranks count.

    Raises:
        CollectiveError: the driver has answered by an error; what all ranks hear.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # which is how the driver's come
            raise
        raise CollectiveError(
            f"rank {rank}: {title}: its GPU has failed: {error}. As a rule that was a kernel of the program before it; "
            "with CUDA_LAUNCH_BLOCKING=1 the error comes where that is called"
        ) from error


class RankFailedError(CollectiveError):
    """A rank died, raised an exception, or stopped answering."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.rank, str(self))


class UnrecoverableError(CollectiveError):
    """`hvd.elastic.run` cannot go on; the state is that of the last commit, of which a checkpoint can be saved."""


class StallError(CollectiveError):
    """A tensor waited longer than HVDLITE_STALL_SHUTDOWN_TIME_SECONDS for some ranks."""


class StartupError(RuntimeError):
    """init() cannot succeed; the text is one sentence with the way out.

    Args:
        concerns_all: other ranks end by the same, mostly, so that one of them may speak for all.
    """

    def __init__(self, text: str, *, concerns_all: bool = True) -> None:
        super().__init__(text)
        self.concerns_all = concerns_all


class ConfigError(StartupError, ValueError):
    """A setting does not make sense."""


class HorovodVersionMismatchError(StartupError, ImportError):
    """Ranks run different versions of a package. Horovod's name."""


class NumericsError(FloatingPointError):
    """A gradient of this rank has NaN or Inf, before it is reduced; with HVDLITE_CHECK_NUMERICS=raise, on this rank."""


class DuplicateNameError(ValueError):
    """A tensor name was submitted while an operation of that name was still in flight."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added to the job or removed; `hvd.elastic.run` catches it. Horovod's name.

    Args:
        skip_sync: whether every rank that goes on has the state already, since hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return type(self), (self.skip_sync,)


def is_known_everywhere(error: BaseException | None) -> bool:
    """Whether every rank hears of ``error`` without being told: not so of a mistake of one rank's program."""
    return isinstance(error, HorovodInternalError) and not isinstance(error, (UsageError, NotInitializedError))
