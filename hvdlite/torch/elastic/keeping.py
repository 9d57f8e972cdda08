"""Under mpirun an elastic job is started anew: its commits are in the care of keepers, which outlive the ranks.

The first rank of each node hands its commits over to the keeper there, which costs the network nothing; any copy is
enough. It is written while training goes on, so a keeper may still have the commit before the last.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Protocol

import cloudpickle
import torch

import hvdlite
from hvdlite import default_runtime
from hvdlite.config import TO_SAVE, other_variable
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt, UnrecoverableError
from hvdlite.recovery.safekeeping import Safekeeping

_LOG = logging.getLogger("hvdlite")


class Kept(Protocol):
    """What is kept of a `State`; see there."""

    def kept(self) -> dict[str, Any] | None: ...
    def take(self, kept: dict[str, Any], commits: int) -> None: ...
    def keep(self) -> None: ...
    def restore(self) -> None: ...


def _own_keeper() -> Safekeeping | None:
    """The one to which this rank speaks; None: it has none, or another rank of this node does so."""
    keeper = default_runtime.peers().keeper
    return None if keeper is None or hvdlite.local_rank() != 0 else keeper


def deposit(state: Kept, commits: int) -> None:
    """Let the keeper have what ``state`` has saved as commit ``commits``, while this thread goes on.

    Waits until it has the commit before.
    """
    keeper = _own_keeper()
    if keeper is None or (kept := state.kept()) is None:
        return
    wait_for_copies = _copies_of_gpu()

    def write(target: BinaryIO) -> None:
        wait_for_copies()
        # What came from another rank is of classes that only cloudpickle knows, if the program itself has defined them.
        torch.save(kept, target, pickle_module=cloudpickle)

    keeper.hand_over(commits, write, is_alone=hvdlite.local_size() == hvdlite.size())


def _copies_of_gpu() -> Callable[[], object]:
    """Waits for what `State.save` has begun on this thread's stream: another thread's is not ordered after it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    saved = torch.cuda.current_stream().record_event()
    return lambda: saved.synchronize()


def recall(state: Kept) -> None:
    """Make ``state`` that of the commit that is kept on this host, if there is one; `State.sync` shares the newest."""
    keeper = _own_keeper()
    if keeper is None:
        return
    try:
        commits, file = keeper.fetch()
    except OSError as error:
        _LOG.warning("rank %d: the keeper of this host cannot be asked: %s", hvdlite.rank(), error)
        return
    if file is None:
        return
    with open(file, "rb") as source:
        source.seek(0)
        kept: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=False)
    state.take(kept, commits)
    _LOG.info("rank %d takes up commit %d", hvdlite.rank(), commits)


def only_to_save() -> str:
    """Why these ranks shall not train, but may save what is kept; empty where they train."""
    return other_variable(TO_SAVE)


@contextmanager
def at_work() -> Iterator[None]:
    """The ranks train, until all have come to the end: mpirun may call ranks that were killed a success."""
    _say_at_work(True)
    yield
    _say_at_work(False)


def _say_at_work(is_at_work: bool) -> None:
    keeper = default_runtime.peers().keeper
    if keeper is not None and hvdlite.rank() == 0:
        with suppress(OSError):  # it has ended with hvdliterun
            keeper.say_at_work(is_at_work)


def news() -> int:
    """Whether hosts come or go, in bits, as far as this rank is to hear it from its keeper."""
    keeper = _own_keeper()
    if keeper is None:
        return 0
    try:
        return keeper.news()
    except OSError:  # a commit says so
        return 0


def end_to_begin_anew(state: Kept, why: HorovodInternalError | HostsUpdatedInterrupt) -> None:
    """End this process; hvdliterun starts the ranks again, on the hosts that there are then.

    Raises:
        SystemExit: hosts have changed; with 0, so that MPI ends in order.
        UnrecoverableError: after a failure, once the state is that of the last commit: who wants to can save it.
    """
    if isinstance(why, HorovodInternalError):
        state.restore()
        default_runtime.peers().say_failed()
        raise UnrecoverableError(
            "these ranks end, and hvdliterun --elastic starts them anew from the last commit, which the state is now, "
            f"unless no restart is left. What has happened: {why}"
        ) from why
    state.keep()
    keeper = default_runtime.peers().keeper
    if keeper is not None:
        # All ranks say so, as one of them, or a keeper, may be stopped just now. What nobody hears hvdliterun takes for
        # a failure, after which the ranks begin anew likewise.
        with suppress(OSError):
            keeper.begin_anew()
    # hvdlite ends with the process: until then its heartbeats tell who does not come to the end of MPI.
    sys.exit(0)
