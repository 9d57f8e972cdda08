"""hvd.elastic.ElasticSampler without other processes: who gets which indices, before and after some were processed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.errors import NotInitializedError

World = Callable[[int, int], None]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """``world(rank, size)``: be that rank from now on."""

    def be(rank: int, size: int) -> None:
        monkeypatch.setattr(hvdlite, "rank", lambda: rank)
        monkeypatch.setattr(hvdlite, "size", lambda: size)
        monkeypatch.setattr(hvdlite, "is_initialized", lambda: True)

    return be


def samplers(world: World, length: int, size: int, **arguments: Any) -> list[hvd.elastic.ElasticSampler]:
    result = []
    for rank in range(size):
        world(rank, size)
        result.append(hvd.elastic.ElasticSampler(range(length), **arguments))
    return result


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("length", "size"), [(12, 1), (12, 3), (13, 3), (2, 5), (1, 4), (0, 2)])
def test_ranks_share_all_indices_evenly(world: World, length: int, size: int, shuffle: bool) -> None:
    parts = [list(sampler) for sampler in samplers(world, length, size, shuffle=shuffle)]
    share = -(-length // size)
    assert [len(part) for part in parts] == [share] * size
    flat = [part[i] for i in range(share) for part in parts]
    assert sorted(flat[:length]) == list(range(length))
    assert flat[length:] == (flat[:length] * size)[: share * size - length]
    assert [len(sampler) for sampler in samplers(world, length, size)] == [share] * size


def test_order(world: World) -> None:
    world(0, 1)
    assert list(hvd.elastic.ElasticSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]
    sampler = hvd.elastic.ElasticSampler(range(50), seed=3)
    first = list(sampler)
    assert first != sorted(first)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(hvd.elastic.ElasticSampler(range(50), seed=4)) == second  # seed and epoch are added, as in torch


def test_what_was_recorded_is_left_out(world: World) -> None:
    world(1, 2)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == [1, 3, 5, 7, 9]
    sampler.record_batch(0, 2)
    sampler.record_batch(2, 2)  # the last batch is a short one
    assert sampler.state_dict() == {"epoch": 0, "processed_indices": {1, 3, 9}}
    assert sampler.processed_num == 3
    assert list(sampler) == [1, 3, 5, 7, 9]  # until it is reset
    sampler.record_indices([0, 2])
    sampler.reset()
    assert sampler.remaining_indices == [4, 5, 6, 7, 8]
    assert list(sampler) == [5, 7, 4]
    assert (len(sampler), sampler.total_size) == (3, 6)
    sampler.record_batch(0, 2)
    assert sampler.processed_indices == {0, 1, 2, 3, 5, 7, 9}
    sampler.set_epoch(1)
    assert list(sampler) == [1, 3, 5, 7, 9]


def test_indices_may_be_tensors(world: World) -> None:
    world(0, 1)
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    for _ in range(2):
        sampler.record_indices(torch.tensor([1, 5]))
    assert sampler.processed_num == 2
    sampler.reset()
    assert list(sampler) == [0, 2, 3, 4, 6, 7]


def test_what_was_recorded_before_is_not_gone_through_again(world: World) -> None:
    world(0, 1)

    class Counting(set[int]):
        gone_through = 0

        def update(self, *others: Iterable[int]) -> None:
            for indices in map(list, others):
                self.gone_through += len(indices)
                super().update(indices)

    sampler = hvd.elastic.ElasticSampler(range(100), shuffle=False)
    sampler.processed_indices = processed = Counting()
    for number in range(50):
        sampler.record_batch(number, 2)
    assert (processed.gone_through, sampler.processed_num) == (100, 100)
    assert sorted(sampler.take_untold()) == list(range(100))


def test_batches_are_counted_in_the_pass_that_goes_on(world: World) -> None:
    world(0, 1)
    sampler = hvd.elastic.ElasticSampler(range(8), seed=2)
    order = list(sampler)
    sampler.record_batch(0, 2)
    state = sampler.state_dict()
    sampler.record_batch(1, 2)
    sampler.load_state_dict(state)  # shares the other six anew, from the next pass on
    sampler.record_batch(1, 2)
    assert sampler.processed_indices == set(order[:4])
    sampler.record_batch(2, 2)
    assert sampler.processed_indices == set(order[:6])
    rest = list(sampler)
    assert sorted(rest) == sorted(order[2:])
    sampler.load_state_dict(state)
    sampler.record_batch(0, 6)
    assert sampler.processed_num == 8


def test_a_new_epoch_counts_from_its_beginning(world: World) -> None:
    world(0, 1)
    sampler = hvd.elastic.ElasticSampler(range(8), seed=2)
    sampler.record_batch(0, 8)
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    sampler.record_batch(0, 2)
    assert sampler.processed_indices == set(list(sampler)[:2])


def test_an_epoch_that_was_processed(world: World) -> None:
    world(2, 3)
    sampler = hvd.elastic.ElasticSampler(range(4))
    sampler.record_indices(range(4))
    sampler.reset()
    assert (list(sampler), len(sampler)) == ([], 0)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (3, 3)])
def test_another_number_of_ranks_goes_on_with_the_rest(world: World, before: int, after: int) -> None:
    processed: set[int] = set()
    for rank, sampler in enumerate(samplers(world, 23, before, seed=1)):
        world(rank, before)
        sampler.set_epoch(2)
        sampler.record_batch(0, 3)
        processed |= sampler.state_dict()["processed_indices"]
    assert len(processed) == 3 * before
    state = {"epoch": 2, "processed_indices": processed}
    rest: set[int] = set()
    for rank, sampler in enumerate(samplers(world, 23, after, seed=1)):
        world(rank, after)
        sampler.load_state_dict(state)
        rest.update(sampler)
    assert rest == set(range(23)) - processed


def test_a_state_dict_is_a_copy(world: World) -> None:
    world(0, 1)
    sampler = hvd.elastic.ElasticSampler(range(5))
    state = sampler.state_dict()
    sampler.record_indices([1])
    assert state["processed_indices"] == set()
    sampler.load_state_dict(state)
    sampler.record_indices([2])
    assert state["processed_indices"] == set()


def test_in_a_loader(world: World) -> None:
    world(1, 2)
    dataset = torch.utils.data.TensorDataset(torch.arange(10))
    loader = torch.utils.data.DataLoader(dataset, 2, sampler=hvd.elastic.ElasticSampler(dataset, shuffle=False))
    assert [batch.tolist() for (batch,) in loader] == [[1, 3], [5, 7], [9]]


def test_before_init() -> None:
    with pytest.raises(NotInitializedError):
        hvd.elastic.ElasticSampler(range(3))
