"""Streams of a process group, as far as torch is asked to work on them; tests without a GPU ask somebody else."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.futures import Future


class Streams:
    """What is asked of torch."""

    def on(self, ordinal: int, stream: int) -> AbstractContextManager[Any]:
        """For a ``with`` block in which torch works on ``stream`` of GPU ``ordinal``, on this thread."""
        made = torch.cuda.ExternalStream(stream, device=torch.device("cuda", ordinal))  # type: ignore[no-untyped-call]
        return torch.cuda.stream(made)

    def future(self, ordinal: int) -> Future[Any]:
        """Whoever waits for it, or for what follows from it, has the current stream wait for its value.

        That is made on what is the current stream when the future is completed; callbacks have streams of their own.
        """
        return Future(devices=[torch.device("cuda", ordinal)])


streams = Streams()
