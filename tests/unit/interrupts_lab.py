"""Interrupts at places that a test chooses."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any


def interrupted(place: int, functions: Iterable[Callable[..., object]], call: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether Ctrl-C has come, and what ``call`` returns; None where it has.

    Args:
        place: of ``functions``, counted from 0: they call another one, or have called one in C, as far as Python takes
            an interrupt there; -1: none comes.
    """
    interrupt, result = _InterruptAt(place, functions), None
    gc.disable()  # which calls what has no place, and takes no interrupt
    sys.setprofile(interrupt)
    try:
        result = call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return interrupt.has_come, result


class _InterruptAt:
    """To be set by `sys.setprofile`."""

    def __init__(self, place: int, functions: Iterable[Callable[..., object]]) -> None:
        self._left = place
        self._codes = [function.__code__ for function in functions]
        self.has_come = place < 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        at = {"call": frame.f_back, "c_return": frame}.get(event)
        if at is None or at.f_code not in self._codes or self.has_come:
            return
        self._left -= 1
        if self._left < 0:
            self.has_come = True
            raise KeyboardInterrupt
