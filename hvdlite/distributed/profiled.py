"""The range of a call in what torch's profilers show."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import _record_function_with_args_enter
from torch.futures import Future


class Profiled:
    """From here on until `end`: an asynchronous range with the shapes of ``inputs``, as those of Gloo.

    Args:
        inputs: tensors, and lists of such.
    """

    def __init__(self, title: str, inputs: Iterable[Any]) -> None:
        self._thread = threading.get_ident()
        self._end: Future[None] = Future()
        entered = _record_function_with_args_enter(title, *_tensors(inputs))
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(entered, self._end)

    def end(self) -> None:
        """It is over."""
        if self._thread != threading.get_ident():
            self._end.set_result(None)
        else:  # torch calls a range asynchronous that another thread ends
            ender = threading.Thread(target=self._end.set_result, args=(None,))
            ender.start()
            ender.join()


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in given:
        if isinstance(each, torch.Tensor):
            yield each
        else:
            yield from _tensors(each)
