"""What an asynchronous operation leaves in the user's hands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.compiler import disable, is_dynamo_compiling

from hvdlite._native import StartedBurst, StartedOperation
from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.request import title_of
from hvdlite.recorder import NO_SPAN, Lane, Recorder
from hvdlite.torch.eager import eager

T = TypeVar("T")
U = TypeVar("U")

_NO_HANDLE = "expected the handle that an _async operation returned, got {!r}"


def label_of(operation: str, name: str | None) -> str:
    """For errors and the timeline.

    Raises:
        TypeError: see `check_name`.
    """
    check_name(operation, name)
    return title_of(operation, name)


def check_name(operation: str, name: object) -> None:
    """See that an operation is named by a string, which messages and the timeline show, or not at all.

    Raises:
        TypeError: ``name`` is something else.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{operation}: name is {name!r}, of type {type(name).__name__}; pass a string, or None")


class Pending(Protocol):
    """An operation under way, or several."""

    def poll(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self) -> Any:
        """Sleep until it is complete; raises what it ended in."""


class Handle(Generic[T]):
    """An operation under way; it keeps the operation's tensors alive."""

    __slots__ = ("_finish", "_label", "_pending", "_recorder", "_result")

    def __init__(self, pending: Pending, recorder: Recorder, label: str, finish: Callable[[], T]) -> None:
        self._pending = pending
        self._recorder = recorder
        self._label = label
        self._finish: Callable[[], T] | None = finish

    def map(self, function: Callable[[T], U]) -> Handle[U]:
        """A handle of the same operation whose result is ``function`` of this one's; it takes this one's place."""
        return Handle(self._pending, self._recorder, self._label, lambda: function(self._finished()))

    def poll(self) -> bool:
        """Whether `synchronize` would return, or raise, at once."""
        return self._pending.poll()

    @eager
    def synchronize(self) -> T:
        """Sleep until the operation is complete.

        Returns:
            Its result; the same one every time.

        Raises:
            HorovodInternalError: the operation did not happen; says why.
        """
        with self._recorder.span(Lane.WAIT, self._label) if self._recorder.enabled else NO_SPAN:
            self._pending.wait()
        return self._finished()

    def _finished(self) -> T:
        if self._finish is not None:  # it may copy back into the user's tensor, so once only
            self._result = self._finish()
            self._finish = None
        return self._result


class HandleInBurst(Handle[torch.Tensor]):
    """Of an operation that was collected: made a thousand times in a millisecond, so it is no more than it must be.

    Args:
        burst: what the operation is part of.
        number: which part.
        result: what it has brought when it is complete.
        name: the user's, if there is one.
    """

    __slots__ = ("_burst", "_name", "_number")

    def __init__(
        self, recorder: Recorder, burst: Burst | StartedBurst, number: int, result: torch.Tensor, name: str | None
    ) -> None:
        self._burst = burst
        self._number = number
        self._recorder = recorder
        self._name = name
        self._result = result

    def map(self, function: Callable[[torch.Tensor], U]) -> Handle[U]:
        """See `Handle`."""
        pending = _PartOfBurst(self._burst, self._number)
        return Handle(pending, self._recorder, label_of("allreduce", self._name), lambda: function(self._result))

    def poll(self) -> bool:
        """See `Handle`."""
        return self._burst.poll(self._number)

    def synchronize(self) -> torch.Tensor:
        """See `Handle`."""
        if is_dynamo_compiling():  # as `eager`, without another call
            return disable(self.synchronize)()  # type: ignore[no-untyped-call, no-any-return]
        burst = self._burst
        if burst.has_succeeded:  # as most have that are waited for after others
            burst.ask()
        elif self._recorder.enabled:
            with self._recorder.span(Lane.WAIT, label_of("allreduce", self._name)):
                burst.wait(self._number)
        else:
            burst.wait(self._number)
        return self._result


class StartedHandle(Handle[torch.Tensor]):
    """Of an operation that native code has started: no more than it must be either.

    Args:
        started: the operation.
        result: what it has brought when it is complete.
        name: the user's, if there is one.
    """

    __slots__ = ("_name",)

    def __init__(self, recorder: Recorder, started: StartedOperation, result: torch.Tensor, name: str | None) -> None:
        self._pending = started
        self._recorder = recorder
        self._name = name
        self._result = result

    def map(self, function: Callable[[torch.Tensor], U]) -> Handle[U]:
        """See `Handle`."""
        label = label_of("allreduce", self._name)
        return Handle(self._pending, self._recorder, label, lambda: function(self._result))

    def synchronize(self) -> torch.Tensor:
        """See `Handle`."""
        if is_dynamo_compiling():
            return disable(self.synchronize)()  # type: ignore[no-untyped-call, no-any-return]
        self._pending.wait()
        return self._result


class _PartOfBurst:
    """A `Pending`."""

    def __init__(self, burst: Burst | StartedBurst, number: int) -> None:
        self.poll = partial(burst.poll, number)
        self.wait = partial(burst.wait, number)


def poll(handle: Handle[Any]) -> bool:
    """Whether the operation is complete, so that `synchronize` would not wait.

    Raises:
        ValueError: ``handle`` is not what an ``_async`` operation returned.
    """
    if not isinstance(handle, Handle):
        raise ValueError(_NO_HANDLE.format(handle))
    return handle.poll()


def synchronize(handle: Handle[T]) -> T:
    """Sleep until the operation is complete and return its result.

    Raises:
        ValueError: ``handle`` is not what an ``_async`` operation returned.
        HorovodInternalError: the operation did not happen, on any rank; says why.
    """
    if not isinstance(handle, Handle):
        raise ValueError(_NO_HANDLE.format(handle))
    return handle.synchronize()


def only(handle: Handle[list[T]]) -> Handle[T]:
    """The handle of a group of one as that of its only member."""
    return handle.map(lambda group: group[0])
