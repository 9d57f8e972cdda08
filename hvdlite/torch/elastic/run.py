"""elastic.run: calls a training function again, from the last commit, after a collective has failed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import hvdlite
from hvdlite import default_runtime
from hvdlite.errors import (
    CollectiveError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    ShutDownError,
    StallError,
    StartupError,
    UnrecoverableError,
    UsageError,
)
from hvdlite.torch.elastic import keeping
from hvdlite.torch.elastic.state import State
from hvdlite.torch.functions import allgather_object
from hvdlite.torch.startup import restart

_LOG = logging.getLogger("hvdlite")

_REASON_S = 2.0  # how long a failure in one world of this process may be on its way to another

S = TypeVar("S", bound=State)
T = TypeVar("T")

Why = HorovodInternalError | HostsUpdatedInterrupt


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function ``func(state, ...)``, so that it starts with one state and survives failures.

    - First, and each time that it starts over, ``state`` is synchronized: all ranks get that of the newest commit.
    - After a `HorovodInternalError` hvdlite is started again, and ``state`` is put back to its last commit. Under
      ``hvdliterun --elastic`` that is on all ranks that live and those that have come; elsewhere on the ranks that
      init() had, which must come to it within HVDLITE_START_TIMEOUT: a rank that has failed cannot be replaced there,
      so the error is raised, and the caller can still save a checkpoint of the last commit.
    - After a `HostsUpdatedInterrupt` it goes on with ``state`` as it is, under ``hvdliterun --elastic`` on the ranks
      that there are now.
    - A `MismatchError` or a `UsageError` is raised: it is the program's, and would come again.

    A rank that comes later runs the script from its beginning: what the others have finished by then it leaves out, so
    that ``func`` is not called there, and the result is None. Within another training function ``func`` does not start
    over by itself: the outer one does.

    Process sets are kept, with their numbers, where the ranks are the same as before, and gone where they are not.
    Callbacks of ``state.register_reset_callbacks`` are called before it starts over.

    Args:
        func: its first argument is a `State`; it must be able to start from any commit.

    Raises:
        NotInitializedError: hvdlite does not run; call hvd.init() first.
        ValueError: what ``func`` is called with first is no `State`.
        UnrecoverableError: the job cannot go on; ``state`` is that of the last commit. A `CollectiveError`.
    """

    @functools.wraps(func)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> T:
        hvdlite.rank()  # raises before init()
        if not isinstance(state, State):
            raise ValueError(
                f"hvd.elastic.run: '{func.__name__}' was called with a {type(state).__name__} first; pass a "
                "hvd.elastic.State, as hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)"
            )
        if _outermost.is_at_work:
            return _run_within(func, state, *args, **kwargs)
        keeping.recall(state)
        if why := keeping.only_to_save():
            state.sync()
            raise UnrecoverableError(
                f"the job ends: {why}. These ranks were started once more with the state of the last commit: save a "
                "checkpoint of it, and start the job again"
            )
        with keeping.at_work(), _leaving(), _outermost.begun() as call:
            return run_with(_strategy(), lambda: _is_due(call), func, state, *args, **kwargs)

    return wrapped


def run_with(
    start_again: Callable[[S, Why], object],
    is_due: Callable[[], bool],
    func: Callable[..., T],
    state: S,
    *args: Any,
    **kwargs: Any,
) -> T:
    """``func(state, ...)``, until it returns or raises what ends the job; None where it is not due.

    Args:
        is_due: called each time before it; all ranks call it.
        start_again: called before each further time, with what has ended the one before; it has put the state back
            after a failure, and raises where the job cannot go on.
    """
    why: Why | None = None
    while True:
        try:
            if why is not None:
                start_again(state, why)
                state.on_reset()
            if not is_due():
                return None  # type: ignore[return-value]  # whose caller is about to come to the next one
            if isinstance(why, HostsUpdatedInterrupt) and why.skip_sync and _are_alike():
                state.share()
            else:
                state.sync()
            return func(state, *args, **kwargs)
        except (MismatchError, UsageError, UnrecoverableError, NotInitializedError):
            raise
        except (HostsUpdatedInterrupt, HorovodInternalError) as reason:
            why = reason
        except RuntimeError:
            why = _failure_beneath()
            if why is None:
                raise


class _Outermost:
    """Training functions of this process that are not called by another one."""

    def __init__(self) -> None:
        self.is_at_work = False
        self._calls = 0

    @contextmanager
    def begun(self) -> Iterator[int]:
        """One is at work; how many have been."""
        self._calls += 1
        self.is_at_work = True
        try:
            yield self._calls
        finally:
            self.is_at_work = False


_outermost = _Outermost()


def _run_within(func: Callable[..., T], state: State, *args: Any, **kwargs: Any) -> T:
    """``func(state, ...)``, once; a failure leaves the state of the last commit, from which the outer one goes on."""
    try:
        state.sync()
        return func(state, *args, **kwargs)
    except HorovodInternalError:
        state.abandon()
        state.restore()
        raise


def _is_due(call: int) -> bool:
    """Whether all ranks of an elastic job have come to training function ``call``; False where others are further."""
    if default_runtime.membership() is None:
        return True  # no rank comes later
    calls = allgather_object(call)
    while min(calls) < call == max(calls):
        calls = allgather_object(call)
    is_behind: bool = call < max(calls)
    if is_behind:
        _LOG.info("rank %d leaves out a training function that the others have finished", hvdlite.rank())
    return not is_behind


@contextmanager
def _leaving() -> Iterator[None]:
    """Whatever is raised is the end of this rank for the others: once it shuts hvdlite down, it is not waited for."""
    hvdlite.runtime().is_left = False
    default_runtime.expect_recovery(True)  # also after an earlier training function
    try:
        yield
    except BaseException:
        default_runtime.leave()
        raise
    finally:
        default_runtime.expect_recovery(False)


def _failure_beneath() -> HorovodInternalError | None:
    """Of a rank, where torch's C++ has made another exception of it, as DistributedDataParallel does.

    It was met in a process group's world; the others of this process hear of it in a moment.
    """
    if not default_runtime.worlds().has_failed:
        return None
    return hvdlite.runtime().world.health.wait_for_failure(_REASON_S)


def _are_alike() -> bool:
    """Whether all ranks have the same state, as all have been interrupted at the same point."""
    member = default_runtime.membership()
    return member is None or member.generation is None or member.generation.are_alike


def _strategy() -> Callable[[State, Why], None]:
    """What is done before the training function starts over."""
    if default_runtime.peers().keeper is None:
        return _start_again
    return keeping.end_to_begin_anew if default_runtime.membership() is None else _go_on_or_begin_anew


def _go_on_or_begin_anew(state: State, why: Why) -> None:
    """Under mpirun: the ranks that live go on where they can; else all end, to begin anew."""
    may_go_on = not isinstance(why, (HostsUpdatedInterrupt, StallError))
    if may_go_on and not (isinstance(why, ShutDownError) and why.is_final):
        try:
            _restart(state, why)
            return
        except StartupError as error:
            _LOG.warning("rank %d: %s", hvdlite.runtime().rank, error)
    keeping.end_to_begin_anew(state, why)


def _start_again(state: State, why: Why) -> None:
    is_elastic = default_runtime.membership() is not None
    if isinstance(why, HorovodInternalError):
        if not is_elastic and (cause := _hindrance(why)):
            state.restore()
            raise _unrecoverable(cause, why) from why
    elif not is_elastic:
        return
    try:
        _restart(state, why)
    except StartupError as error:
        if isinstance(why, HorovodInternalError):
            state.restore()
        raise _unrecoverable(str(error), why) from error


def _restart(state: State, why: Why) -> None:
    """hvdlite runs again, with the state of the last commit after a failure. Raises StartupError."""
    if isinstance(why, HorovodInternalError):
        _LOG.warning("rank %d: hvd.elastic.run goes back to the last commit, after: %s", hvdlite.runtime().rank, why)
    restart(follows_rank_0=state.follows_rank_0)  # ends what other ranks wait for with an error: they come as well
    state.abandon()
    if isinstance(why, HorovodInternalError):
        state.restore()


def _hindrance(failure: HorovodInternalError) -> str:
    """Why the same ranks cannot start again after ``failure``; empty where they can."""
    if isinstance(failure, StallError):
        return "the ranks live, but wait for one another"
    if isinstance(failure, CollectiveError):
        return "only under `hvdliterun --elastic` does a job go on after the failure of a rank"
    if isinstance(failure, ShutDownError) and failure.is_final:
        return "a rank has ended by itself"
    return ""


def _unrecoverable(because: str, why: Why) -> UnrecoverableError:
    return UnrecoverableError(
        f"hvd.elastic.run cannot go on: {because.rstrip('.')}. The state is that of the last commit; save a checkpoint "
        f"of it, and start the job again. What has happened: {why}"
    )
