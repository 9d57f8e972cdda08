"""Which frames of an error people see, and in which order."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import StringIO
from types import TracebackType

import pytest

from hvdlite import tracebacks
from hvdlite.errors import MismatchError
from hvdlite.launched import launched_rank


def raised(run: Callable[[], object]) -> BaseException:
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def inside(code: str, **names: object) -> Callable[[], object]:
    """A function of hvdlite's, as far as its file tells."""
    namespace = dict(names)
    file = launched_rank.__code__.co_filename
    exec(compile(f"def ours():\n    {code}", file, "exec"), namespace)
    return namespace["ours"]  # type: ignore[return-value]


def mine() -> None:
    raise KeyError("of the program")


def files(trace: TracebackType | None) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(trace)]


def shown(error: BaseException, capsys: pytest.CaptureFixture[str], *, has_been_said: bool = False) -> list[str]:
    tracebacks.show(error, error.__traceback__, sys.__excepthook__, has_been_said=has_been_said)
    return capsys.readouterr().err.splitlines()


def test_our_frames_between_those_of_a_program_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised(inside("call()", call=mine))
    assert files(tracebacks.without_our_frames(error.__traceback__)) == ["raised", "mine"]
    lines = shown(error, capsys)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'of the program'"
    assert not any("in ours" in line for line in lines)


def test_it_is_printed_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that write to the same place at the same time do not mix their lines."""
    written: list[str] = []

    class Recorder(StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Recorder())
    error = raised(mine)
    tracebacks.show(error, error.__traceback__, sys.__excepthook__, has_been_said=False)
    (text,) = filter(None, written)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("\nKeyError: 'of the program'\n")


def test_frames_of_our_context_managers_are_left_out() -> None:
    manager = contextmanager(inside("raise kind('the text')\n    yield", kind=MismatchError))  # type: ignore[arg-type]
    error = raised(inside("with manager(): pass", manager=manager))
    assert files(tracebacks.without_our_frames(error.__traceback__)) == ["raised"]


def test_frames_of_what_dataclasses_make_for_us_are_left_out() -> None:
    @dataclass
    class Ours:
        __module__ = launched_rank.__module__
        number: int

        def __post_init__(self) -> None:
            inside("raise kind('the text')", kind=MismatchError)()

    error = raised(lambda: Ours(1))
    assert "__init__" in files(error.__traceback__)
    assert "__init__" not in files(tracebacks.without_our_frames(error.__traceback__))


def test_the_message_of_our_own_errors_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (MismatchError, ValueError):
        lines = shown(raised(inside("raise kind('shape is (1,) on rank 0')", kind=kind)), capsys)
        assert lines[0].endswith(f"{kind.__name__}: shape is (1,) on rank 0")
        assert lines[1].startswith("Raised here")
        assert not any("in ours" in line or line.startswith("Traceback") for line in lines)


def test_a_message_that_was_logged_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(raised(inside("raise kind('the text')", kind=MismatchError)), capsys, has_been_said=True)
    assert lines[0].startswith("MismatchError, as said above; this rank was here")
    assert not any("the text" in line for line in lines)


def test_a_mistake_of_ours_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(raised(inside("assert False, 'a bug'")), capsys)
    assert any("in ours" in line for line in lines)
    assert lines[-1] == "AssertionError: a bug"


def test_an_interrupt_while_hvdlite_waits_is_placed_in_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    error = raised(inside("raise KeyboardInterrupt"))
    assert tracebacks.described(error).splitlines()[0].endswith(", in raised)")
    lines = shown(error, capsys)
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "KeyboardInterrupt")
    assert not any("in ours" in line for line in lines)


def test_all_frames_where_they_are_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_FULL_TRACEBACKS", "1")
    lines = shown(raised(inside("raise kind('the text')", kind=MismatchError)), capsys)
    assert any("in ours" in line for line in lines)
    assert lines[-1].endswith("MismatchError: the text")


def test_another_hook_gets_the_trimmed_traceback() -> None:
    error = raised(inside("call()", call=mine))
    got = []
    tracebacks.show(error, error.__traceback__, lambda *args: got.append(args), has_been_said=False)
    ((kind, same, trace),) = got
    assert (kind, same, files(trace)) == (KeyError, error, ["raised", "mine"])


def ended(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch, previous: tracebacks.ThreadHook) -> None:
    """A thread by ``run``."""
    monkeypatch.setattr(threading, "excepthook", partial(tracebacks.show_of_thread, previous=previous))
    thread = threading.Thread(target=run, name="the thread")
    thread.start()
    thread.join()


def test_of_a_thread_the_frames_of_the_program_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_program() -> None:
        inside("raise kind('the text')", kind=MismatchError)()

    ended(of_the_program, monkeypatch, threading.__excepthook__)
    first, message, place, *frames = capsys.readouterr().err.splitlines()
    assert first == "Exception in thread the thread:"
    assert message.endswith("MismatchError: the text") and place.startswith("Raised here")
    assert [line for line in frames if line.startswith("  File")] == [frames[0]]
    assert frames[0].endswith("in of_the_program")


def test_of_a_thread_of_ours_all_frames_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(inside("raise kind('the text')", kind=MismatchError), monkeypatch, threading.__excepthook__)
    assert any("in ours" in line for line in capsys.readouterr().err.splitlines())


def test_another_hook_of_threads_gets_the_trimmed_traceback_and_what_is_no_error_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[threading.ExceptHookArgs] = []
    ended(inside("call()", call=mine), monkeypatch, got.append)
    ended(sys.exit, monkeypatch, got.append)
    error, end = got
    assert (error.exc_type, files(error.exc_traceback)) == (KeyError, ["mine"])
    assert error.thread is not None and error.thread.name == "the thread"
    assert end.exc_type is SystemExit


def test_what_other_ranks_are_told_names_the_place_first() -> None:
    first, *rest = tracebacks.described(raised(mine)).splitlines()
    assert first.startswith("KeyError: 'of the program' (") and first.endswith(", in mine)")
    assert rest[0] == "Traceback (most recent call last):"
    assert sum("of the program" in line for line in [first, *rest]) == 2  # the message, and the line of the program


@pytest.mark.parametrize("call", [partial(json.loads, "{"), partial(os.makedirs, os.devnull)])
def test_the_place_of_an_error_in_a_library_is_the_line_of_the_program(call: Callable[[], object]) -> None:
    def of_program() -> None:
        call()

    assert tracebacks.described(raised(of_program)).splitlines()[0].endswith(", in of_program)")
    ours = inside("assert False, 'a bug'")
    assert tracebacks.described(raised(ours)).splitlines()[0].endswith(", in ours)")
