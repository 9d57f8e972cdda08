"""The collectives of torch.distributed, each on tensors whose result is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Group = dist.ProcessGroup

# Their names from torch 2.13 on, and before.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Exercise:
    """One collective on tensors of its own; float32.

    Attributes:
        source: what this rank puts in; in place it is the result too.
        call: does it once, over a group of all ranks.
        result: (numel,) where it ends up; None: nowhere on this rank.
        expected: the same, if each rank's source is its rank + 1.
        is_written: this rank's result, if there is one, is not there before.
    """

    source: torch.Tensor
    call: Callable[[Group], object]
    result: torch.Tensor | None
    expected: torch.Tensor | None
    is_written: bool = True

    def check(self, group: Group) -> None:
        """Leaves zeros in the source, so that sums of sums stay what they are.

        Raises:
            AssertionError: the result is wrong.
        """
        self.source.fill_(dist.get_rank() + 1)
        self.call(group)
        if self.result is not None:
            torch.testing.assert_close(self.result, self.expected, rtol=0, atol=0)
        self.source.zero_()

    def copy(self) -> Callable[[], object]:
        """What writes as much as this rank has to write, once, from memory of its own."""
        if self.result is None or not self.is_written:
            return lambda: None
        result, other = self.result, torch.zeros_like(self.result)
        return lambda: result.copy_(other)


def _total() -> int:
    ranks = dist.get_world_size()
    return ranks * (ranks + 1) // 2


def _shares(numel: int) -> torch.Tensor:
    """What each rank's share of as many elements as its part of ``numel`` makes, one after the other."""
    ranks = dist.get_world_size()
    return torch.arange(1.0, ranks + 1).repeat_interleave(numel // ranks)


def all_reduce(numel: int) -> Exercise:
    tensor = torch.empty(numel)
    expected = torch.full((numel,), float(_total()))
    return Exercise(tensor, lambda group: dist.all_reduce(tensor, group=group), tensor, expected)


def reduce(numel: int) -> Exercise:
    tensor = torch.empty(numel)
    is_root = dist.get_rank() == 0  # what others' tensors hold afterwards is not said
    expected = torch.full((numel,), float(_total())) if is_root else None
    return Exercise(tensor, lambda group: dist.reduce(tensor, 0, group=group), tensor if is_root else None, expected)


def broadcast(numel: int) -> Exercise:
    tensor, is_written = torch.empty(numel), dist.get_rank() != 0
    return Exercise(tensor, lambda group: dist.broadcast(tensor, 0, group=group), tensor, torch.ones(numel), is_written)


def all_gather(numel: int) -> Exercise:
    source, result = torch.empty(numel // dist.get_world_size()), torch.empty(numel)
    return Exercise(source, lambda group: _gather_single(result, source, group=group), result, _shares(numel))


def reduce_scatter(numel: int) -> Exercise:
    source, result = torch.empty(numel), torch.empty(numel // dist.get_world_size())
    expected = torch.full_like(result, float(_total()))
    return Exercise(source, lambda group: _scatter_single(result, source, group=group), result, expected)


def all_to_all(numel: int) -> Exercise:
    source, result = torch.empty(numel), torch.empty(numel)
    return Exercise(source, lambda group: dist.all_to_all_single(result, source, group=group), result, _shares(numel))


def gather(numel: int) -> Exercise:
    source = torch.empty(numel // dist.get_world_size())
    if dist.get_rank():
        return Exercise(source, lambda group: dist.gather(source, dst=0, group=group), None, None)
    result = torch.empty(numel)
    parts = [*result.view(dist.get_world_size(), -1)]
    return Exercise(source, lambda group: dist.gather(source, parts, 0, group=group), result, _shares(numel))


def scatter(numel: int) -> Exercise:
    source, result = torch.empty(numel), torch.empty(numel // dist.get_world_size())
    parts = None if dist.get_rank() else [*source.view(dist.get_world_size(), -1)]
    return Exercise(source, lambda group: dist.scatter(result, parts, 0, group=group), result, torch.ones_like(result))


def send_and_receive(numel: int) -> Exercise:
    """To the next rank, from the one before, as a pipeline does."""
    source, result = torch.empty(numel), torch.empty(numel)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before = (rank - 1) % ranks

    def call(group: Group) -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, source, (rank + 1) % ranks, group),
                dist.P2POp(dist.irecv, result, before, group),
            ]
        )
        for work in works:
            work.wait()

    return Exercise(source, call, result, torch.full((numel,), before + 1.0))


COLLECTIVES: dict[str, Callable[[int], Exercise]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
    "send and receive": send_and_receive,
}
