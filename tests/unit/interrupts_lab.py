"""Interrupts at places that a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType


class InterruptAt:
    """Ctrl-C where Python takes it, at one place of ``functions``: they call another one, or have called one in C.

    To be set by `sys.setprofile`.
    """

    def __init__(self, place: int, *functions: Callable[..., object]) -> None:
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
