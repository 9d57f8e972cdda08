"""`hvdlite.run`: call a function on several ranks from a program or a notebook."""

from __future__ import annotations

import codecs
import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from hvdlite import environment, launched
from hvdlite.config import Config
from hvdlite.errors import ConfigError, RankFailedError, StartupError, is_known_everywhere
from hvdlite.links.interfaces import select
from hvdlite.naps import Patience
from hvdlite.remote_call import CallServer, Outcome, pack

_DRAIN_S = 5.0  # how long output may come after the job has ended; a process that a rank left behind holds the pipe


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    options: Sequence[str] = (),
    executable: str | None = None,
    verbose: bool = False,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks that hvdliterun starts, and wait for all of them.

    What the ranks print appears in this process's ``sys.stdout`` and ``sys.stderr``. All ranks have ended when this
    returns, raises, or is interrupted.

    Args:
        func: travels by cloudpickle, so it may be defined in a notebook; it calls ``hvd.init()`` itself.
        num_proc: number of ranks; by default all slots of ``hosts``.
        hosts: as in ``hvdliterun -H``: "a:2,b:2"; by default this machine.
        env: variables to add to the ranks' environment.
        options: more for hvdliterun, or for mpirun, as ["--timeline-filename", "trace.json"]; ["--mpi"] where ``func``
            uses MPI itself.
        executable: the ranks' Python; by default this one.
        verbose: print the command.

    Returns:
        What ``func`` returned, in order of rank.

    Raises:
        StartupError: the ranks did not start; says why.
        RankFailedError: a rank ended without a result, or raised what cannot be sent.
        Exception: whatever ``func`` raised on the rank that failed first; its ``__cause__`` is a RankFailedError with
            the rank and its traceback.
    """
    from hvdlite.cli import run as front
    from hvdlite.cli.arguments import parse

    process = launched.this_process()
    if process is not None and process.size > 1:
        name = process.launcher.name
        raise StartupError(
            f"hvdlite.run starts ranks, but this process is one already, started by {name}: call the function itself, "
            f"or start this program without {name}"
        )
    variables = dict(env or {})
    environ = {**environment.variables(), **variables}
    words = [*(["-np", str(num_proc)] if num_proc is not None else []), *(["-H", hosts] if hosts else []), *options]
    # Parsed here too, so that a mistake is an exception.
    arguments = parse([*words, "--", sys.executable])
    if arguments.is_elastic:
        raise ConfigError(
            "hvdlite.run returns what each rank returns, so no rank can be replaced: leave out --elastic, --min-np and "
            "--host-discovery-script, or start a program by `hvdliterun --elastic` (docs/elastic.md)"
        )
    if arguments.restarts:
        raise ConfigError(
            "hvdlite.run raises what the function raises, and starts nothing again: leave out --restarts, and call it "
            "once more where it raises"
        )
    launch = front.launch_of(arguments, environ)
    config = Config.from_env({**environ, **arguments.effects.settings})
    addresses = [] if launch.is_local else [a for interface in select(launch.interfaces) for a in interface.addresses]
    server = CallServer(pack(func, args, kwargs or {}, variables), addresses)
    program = [executable or sys.executable, "-c", _python("remote_call", "main()")]
    command = [sys.executable, "-c", _python("launch", "_front()"), str(os.getpid()), str(int(verbose)), *words, "--"]
    try:
        status = _run([*command, *program], {**environ, **server.environment}, server, launch.ranks, config)
    finally:
        outcomes = server.close()
    return _results(outcomes, launch.ranks, status, server.seen())


def _python(module: str, call: str) -> str:
    """A program that calls a function of this package, with hvdlite as its `horovod` if this process has that."""
    root = str(Path(__file__).resolve().parents[1])
    lines = ["import sys", f"sys.path.append({root!r})"]
    if "hvdlite.compat.horovod" in sys.modules:
        lines.append("import hvdlite.compat.horovod")
    return "; ".join([*lines, f"from hvdlite import {module}", f"{module}.{call}"])


def _run(command: Sequence[str], environ: Mapping[str, str], server: CallServer, ranks: int, config: Config) -> int:
    """Run ``command`` to its end, and pass its output on; returns its exit status.

    The command is a process of its own: after a failure `supervise` ends every descendant of its process, and the
    caller may have others. The session is its own as well: Ctrl-C reaches the caller only, which ends the job in order.
    """
    child = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    # Through this process: in a notebook sys.stdout is the cell's output, and file descriptor 1 is not.
    pumps = [
        threading.Thread(target=_pump, args=streams, daemon=True)
        for streams in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
    ]
    over = threading.Event()
    watch = threading.Thread(target=_end_after_failure, args=(child, server, over, config.failure_grace_s), daemon=True)
    for thread in (*pumps, watch):
        thread.start()
    try:
        if not Patience(config.start_timeout_s).wait_for(lambda most_s: _has_ended(child, most_s)):
            missing = sorted(set(range(ranks)) - server.seen())
            if missing:
                raise StartupError(
                    f"hvdlite.run: {_ranks(missing)} did not start within {config.start_timeout_s:g} s; if the start "
                    "is only slow, raise HVDLITE_START_TIMEOUT (seconds)"
                )
        return child.wait()
    finally:
        if child.returncode is None:
            child.terminate()
            child.wait()
        over.set()
        for pump in pumps:
            pump.join(_DRAIN_S)


def _has_ended(child: subprocess.Popen[bytes], most_s: float) -> bool:
    """Within ``most_s``."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(most_s)
    return child.returncode is not None


def _end_after_failure(
    child: subprocess.Popen[bytes], server: CallServer, over: threading.Event, grace_s: float
) -> None:
    """mpirun ends the other ranks, but MPICH's only where the rank that failed had started MPI."""
    server.failed.wait()
    if not over.wait(grace_s):
        child.terminate()


def _pump(source: IO[bytes], sink: IO[str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with source:
        while piece := os.read(source.fileno(), 1 << 16):
            # A sink that is closed, or None, must not stop the reading: the ranks would wait for room in the pipe.
            with contextlib.suppress(Exception):
                sink.write(decoder.decode(piece))
                sink.flush()


def _results(outcomes: Sequence[Outcome], ranks: int, status: int, seen: set[int]) -> list[Any]:
    failed = [(outcome.rank, *outcome.failure()) for outcome in outcomes if not outcome.returned]
    if failed:
        # What hvdlite raised on the others is the consequence of what one rank raised.
        rank, error, text = min(failed, key=lambda failure: is_known_everywhere(failure[1]))
        told = RankFailedError(rank, f"rank {rank} raised:\n{text.rstrip()}")
        for other, other_error, other_text in failed:
            if other_text != text and not is_known_everywhere(other_error):
                print(f"rank {other} raised:\n{other_text.rstrip()}", file=sys.stderr)
        if error is None:
            raise told
        raise error from told
    returned = {outcome.rank: outcome for outcome in outcomes}
    missing = sorted(set(range(ranks)) - returned.keys())
    if missing and not seen:
        raise StartupError(
            f"hvdlite.run: no rank started; hvdliterun ended with exit status {status}, and stderr has what it said"
        )
    if missing:
        raise RankFailedError(
            missing[0],
            f"{_ranks(missing)} ended without a result: killed, out of memory, or crashed in native code (hvdliterun's "
            f"exit status is {status}); stderr has what was said",
        )
    if status != 0:
        warnings.warn(
            f"hvdlite.run: all ranks returned, but hvdliterun ended with exit status {status}; stderr has what was "
            "said",
            RuntimeWarning,
            stacklevel=3,
        )
    return [returned[rank].result() for rank in range(ranks)]


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _front() -> NoReturn:
    """The process between `run` and the ranks: `python -m hvdlite run` that ends with its parent."""
    from hvdlite.cli import run as front
    from hvdlite.cli.children import end_with_parent

    parent, verbose, *words = sys.argv[1:]
    end_with_parent()
    if os.getppid() != int(parent):  # the parent ended before that line
        sys.exit(1)
    sys.exit(front.main(words, announce=verbose == "1"))
