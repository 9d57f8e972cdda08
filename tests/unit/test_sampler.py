"""hvd.sampler: which samples each rank gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.errors import NotInitializedError

MEMBERS = hvd.ProcessSet([1, 3])


def be(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """This rank from now on; 1 and 3 are process set 1."""
    monkeypatch.setattr(MEMBERS, "process_set_id", 1)
    members = {1: SimpleNamespace(rank=MEMBERS.ranks.index(rank), size=2)} if rank in MEMBERS.ranks else {}
    groups = {0: SimpleNamespace(rank=rank, size=size), **members}
    numbers = {tuple(range(size)): 0, (1, 3): 1}
    runtime = SimpleNamespace(group=groups[0], groups=groups, group_number=lambda ranks: numbers.get(tuple(ranks)))
    monkeypatch.setattr(hvdlite, "runtime", lambda: runtime)
    monkeypatch.setattr(hvdlite, "rank", lambda: rank)
    monkeypatch.setattr(hvdlite, "size", lambda: size)


def parts(monkeypatch: pytest.MonkeyPatch, size: int, ranks: Any = None, epoch: int = 0, **options: Any) -> Any:
    result = []
    for rank in range(size) if ranks is None else ranks:
        be(monkeypatch, rank, size)
        sampler = hvd.sampler(range(10), **options)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
    return result


def test_ranks_share_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts(monkeypatch, 2, shuffle=False) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert parts(monkeypatch, 3, shuffle=False) == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    assert parts(monkeypatch, 3, shuffle=False, drop_last=True) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_orders_differ_by_seed_and_epoch_and_not_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [parts(monkeypatch, 2, epoch=epoch, seed=seed) for epoch, seed in [(0, 0), (1, 0), (0, 2), (0, 0)]]
    assert all(Counter(chain(*order)) == Counter(range(10)) for order in orders)
    assert orders[0] == orders[3] and orders[0] != orders[1] != orders[2] != orders[0]


def test_a_process_set_shares_among_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = parts(monkeypatch, 4, MEMBERS.ranks, shuffle=False, process_set=MEMBERS)
    assert shared == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    be(monkeypatch, 0, 4)
    with pytest.raises(ValueError, match="rank 0 is not a member"):
        hvd.sampler(range(10), process_set=MEMBERS)


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Endless(), "hvd.sampler: Endless is an IterableDataset, which nobody can index: have its __iter__ yield"),
        (torch.utils.data.DataLoader(range(3)), "a DataLoader was passed; pass its dataset"),  # type: ignore[arg-type]
        (iter([1]), "list_iterator has no __len__"),
    ],
)
def test_datasets_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch, dataset: Any, words: str) -> None:
    be(monkeypatch, 0, 2)
    with pytest.raises(ValueError, match=words):
        hvd.sampler(dataset)


def test_before_init() -> None:
    with pytest.raises(NotInitializedError):
        hvd.sampler(range(4))
