"""Tracebacks for people: the frames of their own program, and the message of an error of hvdlite first.

HVDLITE_FULL_TRACEBACKS=1 shows all frames, as Python does.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from hvdlite.config import FULL_TRACEBACKS, other_variable
from hvdlite.errors import HorovodInternalError, NumericsError, StartupError

_OURS = str(Path(__file__).parent) + "/"
_STANDARD_LIBRARY = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = {"site-packages", "dist-packages"}

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
ThreadHook = Callable[[threading.ExceptHookArgs], object]


def are_full() -> bool:
    """Whether the user wants every frame."""
    return other_variable(FULL_TRACEBACKS) not in ("", "0")


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without the frames of hvdlite, nor those of torch and contextlib that only lead to its end in hvdlite.

    None where nothing else is in it.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if frames and _is_ours(frames[-1].tb_frame):
        while frames and (_is_ours(frames[-1].tb_frame) or _leads_to_ours(frames[-1].tb_frame)):
            frames.pop()
    kept = None
    for frame in reversed(frames):
        if not _is_ours(frame.tb_frame):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def stacklevel() -> int:
    """For `warnings.warn` by who calls this: of the line of the program that has led there, by hvdlite and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and (_is_ours(frame) or _leads_to_ours(frame)):
        frame, level = frame.f_back, level + 1
    return level


def is_of_a_library(file: str) -> bool:
    """Whether a frame of ``file`` is not of the program itself."""
    return file.startswith(_STANDARD_LIBRARY) or not _INSTALLED.isdisjoint(file.split(os.sep))


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_OURS) or (file == "<string>" and _package(frame) == "hvdlite")  # as of our dataclasses


def _leads_to_ours(frame: FrameType) -> bool:
    return _package(frame) in ("contextlib", "torch")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _ends_in_ours(trace: TracebackType | None) -> bool:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_ours(trace.tb_frame)


def _is_on_purpose(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether hvdlite has raised ``error``, whose message then says all."""
    if isinstance(error, (HorovodInternalError, NumericsError, StartupError)):
        return True
    return isinstance(error, (ValueError, NotImplementedError)) and _ends_in_ours(trace)


def _shown(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """What of ``trace`` people need: all, where it ends in hvdlite by a mistake of hvdlite's.

    KeyboardInterrupt is none, and the like: it ends in hvdlite where a program waits for other ranks.
    """
    is_error = isinstance(error, Exception)
    if are_full() or (is_error and _ends_in_ours(trace) and not _is_on_purpose(error, trace)):
        return trace
    return without_our_frames(trace)


def described(error: BaseException) -> str:
    """Type, message and place on the first line, then the traceback.

    The place is the program's line, below which there may be many of torch's; of a mistake of hvdlite's it is ours.
    """
    lines = traceback.format_exception_only(error)
    trace = _shown(error, error.__traceback__)
    frames = "".join(traceback.format_exception(type(error), error, trace))
    summary = "".join(lines)
    first, *more = summary.strip().splitlines()
    places = traceback.extract_tb(trace)
    if places:
        of_program = [] if _ends_in_ours(trace) else [at for at in places if not is_of_a_library(at.filename)]
        at = (of_program or places)[-1]
        first += f" ({at.filename}, line {at.lineno}, in {at.name})"
    return "\n".join([first, *more, frames.removesuffix(summary).rstrip()]).rstrip()


def show(error: BaseException, trace: TracebackType | None, previous: Hook, *, has_been_said: bool) -> None:
    """Print an uncaught ``error``, in one piece: ranks that write to the same place would mix their lines otherwise.

    Args:
        previous: the hook of uncaught exceptions that was there before ours; another one than Python's shows them.
        has_been_said: the message has come as a line of the log already.
    """
    own = _shown(error, trace)
    if previous is not sys.__excepthook__:
        previous(type(error), error.with_traceback(own), own)
        return
    _print(_lines(error, trace, own, has_been_said=has_been_said))


def show_of_thread(ended: threading.ExceptHookArgs, previous: ThreadHook) -> None:
    """The same of an error that has ``ended`` a thread; all frames of one of hvdlite's own threads."""
    error = ended.exc_value
    if error is None or isinstance(error, SystemExit):
        previous(ended)
        return
    trace = ended.exc_traceback
    while not are_full() and trace is not None and _package(trace.tb_frame) == "threading":
        trace = trace.tb_next
    own = _shown(error, trace) or ended.exc_traceback
    if previous is not threading.__excepthook__:
        previous(threading.ExceptHookArgs((type(error), error.with_traceback(own), own, ended.thread)))
        return
    name = threading.get_ident() if ended.thread is None else ended.thread.name
    _print([f"Exception in thread {name}:\n", *_lines(error, trace, own, has_been_said=False)])


def _lines(
    error: BaseException, trace: TracebackType | None, own: TracebackType | None, *, has_been_said: bool
) -> list[str]:
    if are_full() or not _is_on_purpose(error, trace):
        return traceback.format_exception(type(error), error, own)
    lines = [] if has_been_said else traceback.format_exception_only(error)
    if own:
        place = f"{type(error).__name__}, as said above; this rank was here" if has_been_said else "Raised here"
        lines += [f"{place} (HVDLITE_FULL_TRACEBACKS=1 shows all frames):\n", *traceback.format_tb(own)]
    return lines


def _print(lines: list[str]) -> None:
    print("".join(lines), end="", file=sys.stderr, flush=True)
