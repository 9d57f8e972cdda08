"""Which of two backends for GPUs is taken for which sizes, by what was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlite.collectives.base import DONE
from hvdlite.collectives.select_device import _LIMIT_BYTES, _Contest
from hvdlite.errors import RankFailedError
from hvdlite.memory.views import Buffer


@pytest.mark.parametrize(
    ("small", "large", "limit"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([2.0, 1.0], [1.0, 2.0], None),
        ([1.0, 2.0], [2.0, 1.0], _LIMIT_BYTES),
        ([2.0, 1.0], [2.0, 1.0], 0),
        ([1.0, 1.0], [1.0, 1.0], None),
    ],
)
def test_the_second_is_taken_where_it_is_faster_for_what_is_large(
    monkeypatch: pytest.MonkeyPatch, small: list[float], large: list[float], limit: int | None
) -> None:
    monkeypatch.setattr(_Contest, "_times", lambda *_: [small, large])
    nobody: Any = None
    contest = _Contest(nobody, nobody, Buffer.of_numpy(np.zeros(1, np.float32)), {0: 0}, lambda: None)
    assert contest.limit_bytes([nobody, nobody], [0], "this way and that") == limit


def test_a_rank_that_fails_while_backends_are_compared_keeps_nobody() -> None:
    """The stream waits for it, and the world, which is still building them, lets nobody go."""

    def check() -> None:
        raise RankFailedError(1, "rank 1 is gone")

    woken: list[bool] = []
    backend: Any = SimpleNamespace(allreduce=lambda buf, label: DONE, wake=lambda: woken.append(True))
    memory: Any = SimpleNamespace(moment=lambda: SimpleNamespace(is_reached=False))
    everybody: Any = None
    contest = _Contest(everybody, memory, Buffer.of_numpy(np.zeros(1, np.float32)), {0: 0}, check)
    with pytest.raises(RankFailedError, match="rank 1 is gone"):
        contest.limit_bytes([backend, backend], [0], "this way and that")
    assert woken == [True]
