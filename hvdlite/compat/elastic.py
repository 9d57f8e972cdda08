"""`horovod.common.elastic`: states whose broadcast is a function, and the loop of `hvd.elastic.run` with any reset."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hvdlite.errors import CollectiveError, HorovodInternalError, HostsUpdatedInterrupt, MismatchError, UsageError
from hvdlite.torch import elastic

__all__ = ["ObjectState", "State", "WorkerNotificationManager", "notification_manager", "run_fn"]

T = TypeVar("T")

BroadcastObject = Callable[[Any], Any]


class State(elastic.State):
    """`hvdlite.torch.elastic.State`, for one whose methods are written in terms of these functions.

    Args:
        bcast_object: rank 0's object -> the same on every rank.
        get_rank: of this process.
    """

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int]) -> None:
        super().__init__()
        self._bcast_object = bcast_object
        self._rank = get_rank


class ObjectState(elastic.ObjectState):
    """`hvdlite.torch.elastic.ObjectState` that is synchronized by ``bcast_object``; arguments as of `State`."""

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._bcast_object = bcast_object
        self._rank = get_rank

    def sync(self) -> None:
        for name, value in self._bcast_object(self._values()).items():
            setattr(self, name, value)
        self.save()


class WorkerNotificationManager:
    """Tells states of hosts that come and go; in an MPI job none does."""

    def init(self) -> None:
        """Nothing."""

    def register_listener(self, listener: elastic.State) -> None:
        """Nothing."""

    def remove_listener(self, listener: elastic.State) -> None:
        """Nothing."""


notification_manager = WorkerNotificationManager()


def run_fn(func: Callable[..., T], reset: Callable[[], object]) -> Callable[..., T]:
    """``func(state, ...)``, called again from the last commit after a collective has failed, as `hvd.elastic.run` does.

    Args:
        reset: called before it starts over; starts hvdlite again.

    Raises:
        CollectiveError: a rank has failed, which nothing can replace; ``state`` is that of the last commit.
        MismatchError, UsageError: the program's mistake, which would come again.
    """

    @functools.wraps(func)
    def wrapper(state: elastic.State, *args: Any, **kwargs: Any) -> T:
        starts_over, skip_sync = False, False
        while True:
            if starts_over:
                reset()
                state.on_reset()
            if not skip_sync:
                state.sync()
            try:
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except (MismatchError, UsageError):
                raise
            except HorovodInternalError as error:
                state.restore()
                if isinstance(error, CollectiveError):
                    raise
                skip_sync = False
            starts_over = True

    return wrapper
