"""ElasticSampler: shares a dataset among the ranks, and what is left of it when an epoch is taken up again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch

import hvdlite


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares the indices of ``dataset`` among the ranks, without those that were processed in this epoch already.

    Record what was processed, and give the sampler to a `TorchState`, whose commits tell all ranks what each has
    recorded, so that nothing is lost with a rank::

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler)
        for number, batch in enumerate(loader):
            ...
            state.sampler.record_batch(number, batch_size)
            state.commit()
        sampler.set_epoch(epoch + 1)

    Every rank gets equally many; the first indices come twice where their number does not divide.

    Args:
        dataset: of a known length.
        shuffle: whether each epoch has an order of its own, the same on every rank.
        seed: of that order; the same on every rank.

    Raises:
        NotInitializedError: hvdlite does not run; call hvd.init() first.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.rank, self.num_replicas = hvdlite.rank(), hvdlite.size()
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``: in another order, with nothing processed. At the end of the one before, not at a restart."""
        self.epoch = epoch
        self.processed_indices: set[int] = set()
        self._untold: list[int] = []
        self.reset()
        self.indices = self._share

    @property
    def processed_num(self) -> int:
        """How many samples of the epoch this rank knows to be processed."""
        return len(self.processed_indices)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Batch ``batch_idx``, counted from 0, was processed: of the pass that this rank's loader began last.

        A `reset` meanwhile changes the next pass. Before the first one of an epoch, that one is meant.
        """
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Iterable[int]) -> None:
        """These indices of the dataset were processed. They are left out from the next `reset` on."""
        recorded = [int(index) for index in indices]  # a loader's are tensors, of which no two are equal in a set
        self._untold += recorded
        self.processed_indices.update(recorded)

    def take_untold(self) -> list[int]:
        """What was processed here, and other ranks have not been told of: by `State.commit`, which tells them."""
        untold, self._untold = self._untold, []
        return untold

    def hear(self, indices: Iterable[int]) -> None:
        """Other ranks have processed these."""
        self.processed_indices.update(indices)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what this rank knows to be processed."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, and share what is left; it must be the same on every rank."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self._untold = []
        self.reset()

    def reset(self) -> None:
        """Share what is left among the ranks there are now, from the next pass on."""
        if hvdlite.is_initialized():  # or else as before, for who saves a checkpoint after the end
            self.rank, self.num_replicas = hvdlite.rank(), hvdlite.size()
        self.remaining_indices = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self._share = list(islice(cycle(order), self.rank, self.total_size, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        self.indices = self._share
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
