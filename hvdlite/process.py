"""The default runtime of a process, and what it hooks into the process: its end, an uncaught exception, a fork."""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hvdlite import _native, mpi, tracebacks
from hvdlite.errors import HorovodInternalError, RankFailedError, ShutDownError, StartupError, is_known_everywhere
from hvdlite.job_runtime import Runtime
from hvdlite.launched import launched_rank, this_process
from hvdlite.peers import Peers
from hvdlite.process_worlds import ProcessWorlds
from hvdlite.processes import ProcessAddress
from hvdlite.worker_error import WorkerError

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger("hvdlite")
_RANK_0_FIRST_S = 1.0  # launchers end a job within milliseconds of its first rank
_LEAVER_S = 3.0  # for a process elsewhere to end: Python takes 0.3 s to take torch down, and longer on a busy machine
_LEAVER_HERE_S = 15.0  # where its end is seen
_OF_ANOTHER = (ShutDownError, RankFailedError)  # what ends a rank for lack of another one
_SAME_S = 0.2  # within which ranks that run the same program come to the same mistake


class InitArguments(NamedTuple):
    """What init() was called with."""

    comm: MPI.Intracomm | Sequence[int] | None
    versions: Mapping[str, str] | None


class Companion(Protocol):
    """What ends with a process, beside the default runtime."""

    @property
    def failure(self) -> HorovodInternalError | None: ...

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks what has ended this one."""

    def close(self) -> None:
        """End in order; may be called again."""

    def abandon_in_child(self) -> None:
        """Called in a forked child: let go of what only the parent may use."""


class ProcessHooks:
    """Installed once, by the first init(); follow whichever runtime is the default.

    - At the end of the process an open runtime is closed, and MPI after it. After a failure MPI cannot be ended in
      order, so the process ends without it, with a status that makes the launcher end the rest: its own, as of
      sys.exit(3), or 1. Likewise where ranks run without MPI. A stall is different: all ranks live, and where each has
      caught the error the job ends in order.
      Where others go on without this rank, it ends by a signal, and MPI is not ended by those that have gone on.
      A process of multiprocessing closes the runtime, and leaves its end to that.
    - An uncaught exception is sent to every rank before it is printed here. What is wrong with the start mostly
      concerns all ranks, and so does what every rank hears of: rank 0 prints it, and the launcher ends the others
      before they do. What concerns one rank alone, that rank prints a moment later. What another rank has raised in the
      same words at the same line is not printed here. Frames of hvdlite are left out, in threads too. Who fails for
      lack of another rank ends a moment later, so that the launcher finds that rank's end first.
    - A forked child (a DataLoader worker) lets go of the parent's runtime.

    Attributes:
        lock: held by the thread that starts or ends the default runtime.
        peers: the processes that were started together with this one.
        worlds: in which this process is.
        runtime: the default one; None before init() and after shutdown().
        arguments: of the init() that has succeeded last.
        counted_before: in other worlds of this process, when the default runtime began to count.
        companions: what else ends with the process, as long as somebody keeps it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.peers = Peers()
        self.worlds = ProcessWorlds()
        self.runtime: Runtime | None = None
        self.arguments: InitArguments | None = None
        self.counted_before: Mapping[str, int] = {}
        self.companions: weakref.WeakSet[Companion] = weakref.WeakSet()
        self._is_installed = False
        self.in_child = False
        """Whether this process was forked from the one that has called init()."""
        self._failed = False
        self._was_uncaught = False
        self._fails_alone = False
        self._previous_hook = sys.__excepthook__
        self._trims = False
        self._hook_before_trim = sys.__excepthook__

    def trim(self) -> None:
        """Where hvdlite is called before the first start: leave its frames out of an exception that nobody catches."""
        if not self._is_installed and not self._trims:
            self._trims = True
            self._hook_before_trim = sys.excepthook
            sys.excepthook = self._trimmed
            self._trim_threads()

    def _trim_threads(self) -> None:
        threading.excepthook = partial(tracebacks.show_of_thread, previous=threading.excepthook)

    def _trimmed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tracebacks.show(error, trace, self._hook_before_trim, has_been_said=False)

    def install(self) -> None:
        """Before the first start; does nothing later."""
        if not self._is_installed:
            self._is_installed = True
            if not self._trims:
                self._trim_threads()
            self._previous_hook = self._hook_before_trim if sys.excepthook == self._trimmed else sys.excepthook
            sys.excepthook = self._uncaught
            if multiprocessing.parent_process() is None:
                atexit.register(self._at_exit)
            else:
                multiprocessing.util.Finalize(None, self._at_worker_exit, [WorkerError()], exitpriority=0)
            os.register_at_fork(after_in_child=self._forked)

    def started(self, runtime: Runtime, arguments: InitArguments) -> None:
        """init() has succeeded, perhaps after an error that the program has caught."""
        if self.runtime is not None and self.runtime.failure is not None:
            self.runtime.failure.with_traceback(None)  # whose frames refer to all that the world before has had
        self.runtime = runtime
        self.arguments = arguments
        self._failed = False

    def startup_failed(self) -> None:
        """init() raised: other ranks may wait inside MPI for this one, so it must not end MPI in order."""
        self._failed = True

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self.in_child:
            self._failed = self._was_uncaught = True
            for companion in self.companions:
                companion.fail(error)
            # What hvdlite raised every rank knows already.
            if self.runtime is not None and not (is_known_everywhere(error) or isinstance(error, StartupError)):
                if _is_said_elsewhere(self.runtime, error):
                    time.sleep(_RANK_0_FIRST_S)  # the launcher shall name the rank that shows it
                    return
                self.runtime.fail(error)
                self._fails_alone = True
        concerns_all = isinstance(error, StartupError) and error.concerns_all
        is_told = is_known_everywhere(error) or concerns_all
        gives_way = is_told and launched_rank() != 0
        if gives_way:
            time.sleep(_RANK_0_FIRST_S)
        runtime = self.runtime
        has_been_said = runtime is not None and error is runtime.failure and runtime.failure_was_logged
        tracebacks.show(error, trace, self._previous_hook, has_been_said=has_been_said)
        if runtime is None or runtime.closed or self.in_child:
            return
        # The exit status of the job shall be that of the other rank.
        reason = error if isinstance(error, _OF_ANOTHER) else error.__cause__  # as elastic.run says
        if isinstance(reason, ShutDownError):
            runtime.fail(reason)  # the rank that has left waits for the others at its end, in vain
            runtime.allow_time()
            _let_end_first(reason.leaver)
        elif isinstance(reason, RankFailedError) and not gives_way:
            time.sleep(_RANK_0_FIRST_S)  # who has raised may still print it, and an mpirun looks late

    def _at_exit(self) -> None:
        if self.in_child:
            return
        runtime = self.runtime
        for companion in list(self.companions):
            companion.close()
            self._failed |= companion.failure is not None and mpi.is_running()
        patience_s = math.inf
        if runtime is not None:
            runtime.close("its process ended", is_final=True)
            self._failed |= not runtime.can_end_in_order
            if runtime.failure is not None:
                patience_s = runtime.config.collective_timeout_s
        if self._failed and (mpi.is_running() or _is_one_of_several()):
            # MPI_Finalize would wait for ranks that never come; the launcher ends them when it sees this status.
            if runtime is not None and runtime.failure is None:  # what ends this rank all have heard of
                runtime.end_watch()
            elif runtime is not None and not self._was_uncaught and not runtime.failure_was_logged:
                self._say_why()  # others have failed while this rank came to its end
            self._end_without_mpi(1)
        elif self.peers.survivors is not None and self.peers.survivors.has_lost_some:
            self.peers.survivors.close()
            self.peers.say_ended()
            self._end_without_mpi(0)
        else:
            if self.peers.survivors is not None:
                self.peers.survivors.leave()
            if not mpi.finalize(
                patience_s, lambda: runtime is not None and not runtime.can_end_in_order, self._say_finished
            ):
                self._end_without_mpi(self._explain_end(patience_s))
        if runtime is not None:
            runtime.end_watch()

    def _say_why(self) -> None:
        assert self.runtime is not None
        _LOG.warning("rank %d ends, without the others: %s", launched_rank(), self.runtime.failure)

    def _say_finished(self) -> None:
        if self.runtime is not None:
            self.runtime.world.health.say_finished()

    def _explain_end(self, patience_s: float) -> int:
        """Says why MPI cannot end in order after this rank has come to its end; returns the least exit status."""
        failure = self.runtime.failure if self.runtime is not None else None
        if self.runtime is not None and not self.runtime.can_end_in_order:
            self._say_why()
            self.peers.say_failed()
            # MPICH's mpirun knows the status of the first rank alone, and here others fail for lack of this one. Under
            # Open MPI's survivors go on, see `_end_without_mpi`.
            return int(isinstance(failure, ShutDownError) and self.peers.survivors is None)
        _LOG.error(
            "rank %d has ended, but others have not, %.0f s (HVDLITE_COLLECTIVE_TIMEOUT_SECONDS) after this: %s",
            *(launched_rank(), patience_s, failure),
        )
        return 1

    def _end_without_mpi(self, least: int) -> None:
        """Let the process end with its own exit status, or with ``least`` for 0; at once where Python might not end."""
        mpi.unlink_shared_files()
        is_stuck = self.runtime is not None and self.runtime.world.is_stuck
        if self._was_uncaught or is_stuck or (mpi.is_running() and not mpi.ends_with_hvdlite()):
            sys.stdout.flush()
            sys.stderr.flush()
            survivors = self.peers.survivors
            if survivors is not None and (self._fails_alone or survivors.is_left_out):
                # Open MPI 5.0.11's mpirun takes a rank that exits with 1 for two, and ends the others' last one.
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1 if self._was_uncaught else least)
        _native.end_at_exit(least)

    def _at_worker_exit(self, worker_error: WorkerError) -> None:
        """Of a process of multiprocessing, which ends without atexit, and shows errors itself."""
        if self.in_child:
            return
        error = worker_error.get()
        for companion in list(self.companions):
            if error is not None:
                companion.fail(error)
            companion.close()
        if self.runtime is None:
            return
        if error is not None and not is_known_everywhere(error):
            self.runtime.fail(error)
        self.runtime.close("its process ended", is_final=True)
        self.runtime.end_watch()

    def _forked(self) -> None:
        self.in_child = True
        self.lock = threading.RLock()  # a thread of the parent's may have held the other one
        if self.runtime is not None:
            self.runtime.abandon_in_child()
        for companion in list(self.companions):
            companion.abandon_in_child()


def _is_said_elsewhere(runtime: Runtime, error: BaseException) -> bool:
    """Whether another rank has raised the same, which this rank's log has said; rank 0 speaks first."""
    failure = runtime.wait_for_failure(_SAME_S if runtime.rank != 0 and runtime.size > 1 else 0.0)
    if not isinstance(failure, RankFailedError) or not runtime.failure_was_logged or tracebacks.are_full():
        return False
    return str(failure).splitlines()[0].partition(" raised ")[2] == tracebacks.described(error).splitlines()[0]


def _let_end_first(leaver: ProcessAddress | None) -> None:
    """Returns once the launcher has seen that process's end, and so mostly never, since it ends this one then."""
    if leaver is not None and leaver.is_in_sight:
        leaver.wait_for_end(_LEAVER_HERE_S)
        time.sleep(_RANK_0_FIRST_S)
    else:
        time.sleep(_LEAVER_S)


def _is_one_of_several() -> bool:
    process = this_process()
    return process is not None and process.size > 1
