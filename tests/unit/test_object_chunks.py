"""How objects above 2 GiB are cut, with tensors that have a size but no memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from fake_world import Universe
from hvdlite.torch import functions

GIB = 1 << 30
SIZES = [1, GIB - 1, GIB, GIB + 1, 2 * GIB, 5 * GIB + 7]


class Wire:
    """Takes the place of the operations; remembers where in its payload each began, and how long it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[tuple[int, int]] = []
        monkeypatch.setattr(functions, "broadcast_", self.broadcast)

    def broadcast(self, tensor: torch.Tensor, *_: Any) -> None:
        if tensor.is_meta:  # and no header
            self.pieces.append((int(tensor.storage_offset()), tensor.numel()))


def check_tiles(pieces: list[tuple[int, int]], total: int, longest: int) -> None:
    """They follow one another from 0 to ``total``, and none is longer than it may be."""
    end = 0
    for begin, length in pieces:
        assert begin == end
        assert 0 < length <= longest
        end += length
    assert end == total


def payload_of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(universe: Universe, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    universe.start(2)
    wire = Wire(monkeypatch)
    functions._broadcast_bytes(payload_of(size), None, 0, "n", hvd.global_process_set)
    check_tiles(wire.pieces, size, GIB)
    assert len(wire.pieces) == math.ceil(size / GIB)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("others", [[], [3 * GIB, 1], [GIB // 4] * 63])
def test_allgather(monkeypatch: pytest.MonkeyPatch, size: int, others: list[int]) -> None:
    """Every rank's part is whole, and no operation's result is longer than 1 GiB."""
    sizes = [size, *others]
    pieces: list[tuple[int, int]] = []
    results: list[int] = []

    def gather(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        """What all ranks would: each sends as much of its own as this one, until it has no more."""
        limit = GIB // len(sizes)
        begin = len(results) * limit
        results.append(sum(min(max(other - begin, 0), limit) for other in sizes))
        if tensor.numel():
            pieces.append((int(tensor.storage_offset()), tensor.numel()))
        return payload_of(results[-1])

    monkeypatch.setattr(functions, "allgather", gather)
    gathered = functions._allgather_bytes(payload_of(size), sizes, "n", hvd.global_process_set)
    assert [piece.numel() for piece in gathered] == sizes
    check_tiles(pieces, size, GIB)
    assert sum(results) == sum(sizes)
    assert max(results) <= GIB
