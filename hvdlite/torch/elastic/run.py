"""elastic.run: calls a training function again, from the last commit, after a collective has failed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import hvdlite
from hvdlite.errors import CollectiveError, HorovodInternalError, HostsUpdatedInterrupt, MismatchError, UsageError
from hvdlite.torch.elastic.state import State
from hvdlite.torch.startup import restart

_LOG = logging.getLogger("hvdlite")

S = TypeVar("S", bound=State)
T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function ``func(state, ...)``, so that it starts with rank 0's state and survives failures.

    - First, and each time that it starts over, ``state`` is synchronized.
    - After a `HorovodInternalError` hvdlite is started again, on all ranks that init() had, which must come to it
      within HVDLITE_START_TIMEOUT, and ``state`` is put back to its last commit. Process sets are kept, with their
      numbers. Where another rank has failed, that is as far as it goes: a rank cannot be replaced, so the error
      is raised, and the caller can still save a checkpoint of the last commit.
    - After a `HostsUpdatedInterrupt` it goes on with ``state`` as it is.
    - A `MismatchError` or a `UsageError` is raised: it is the program's, and would come again.

    Callbacks of ``state.register_reset_callbacks`` are called before it starts over.

    Args:
        func: its first argument is a `State`; it must be able to start from any commit.

    Raises:
        NotInitializedError: hvdlite does not run; call hvd.init() first.
        CollectiveError: a rank has failed; ``state`` is that of the last commit.
    """

    @functools.wraps(func)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> T:
        rank = hvdlite.rank()  # raises before init()
        starts_over, skip_sync = False, False
        while True:
            try:
                if starts_over:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except (MismatchError, UsageError):
                raise
            except HorovodInternalError as error:
                skip_sync = False
                _start_again(state, rank, error)
            starts_over = True

    return wrapped


def _start_again(state: State, rank: int, error: HorovodInternalError) -> None:
    if isinstance(error, CollectiveError):
        state.restore()
        raise CollectiveError(
            "hvd.elastic.run cannot go on, since a rank cannot be replaced. The state is that of the last "
            f"commit; start the job again from a checkpoint of it. What has failed: {error}"
        ) from error
    _LOG.warning("rank %d: hvd.elastic.run goes back to the last commit, after: %s", rank, error)
    restart()  # ends what other ranks wait for with an error, so that they come here as well
    state.abandon()
    state.restore()
