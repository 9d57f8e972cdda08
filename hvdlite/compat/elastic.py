"""`horovod.common.elastic`: states whose broadcast is a function, and the loop of `hvd.elastic.run` with any reset."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hvdlite import default_runtime
from hvdlite.errors import CollectiveError, HorovodInternalError, UnrecoverableError
from hvdlite.torch import elastic
from hvdlite.torch.elastic.run import run_with

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
    """Horovod tells states of hosts that come and go by it; here states ask at each commit."""

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
        UnrecoverableError: a rank has failed, which nothing can replace; ``state`` is that of the last commit.
        MismatchError, UsageError: the program's mistake, which would come again.
    """

    @functools.wraps(func)
    def wrapper(state: elastic.State, *args: Any, **kwargs: Any) -> T:
        def start_again(state: elastic.State, why: Exception) -> None:
            if isinstance(why, HorovodInternalError):
                state.restore()
            if isinstance(why, CollectiveError) and default_runtime.membership() is None:
                raise UnrecoverableError(f"a rank has failed, which nothing can replace: {why}") from why
            reset()

        return run_with(start_again, lambda: True, func, state, *args, **kwargs)

    return wrapper
