"""hvd.sampler: each rank's part of a dataset."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def sampler(
    dataset: Sized,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    process_set: ProcessSet = global_process_set,
) -> DistributedSampler[Any]:
    """torch's DistributedSampler for this rank: every rank gets its part of ``dataset``, and all get equally many::

        sampler = hvd.sampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)  # without it every epoch has the order of the first
            for x, y in loader:
                ...

    `hvd.elastic.ElasticSampler` shares a dataset likewise, and remembers what was processed, so that `hvd.elastic.run`
    can take up an epoch in its middle. Parts that are not equal need `hvd.join`.

    Args:
        dataset: has a length and is indexed; of the same length on every rank.
        shuffle: whether samples come in an order by ``seed`` and epoch, the same on every rank.
        seed: the same on every rank.
        drop_last: where the length does not divide, leave out the last samples; otherwise the first come twice.
        process_set: whose ranks share it; this rank is one of them.

    Raises:
        ValueError: ``dataset`` is an IterableDataset or has no length; this rank is not in ``process_set``.
        NotInitializedError: hvdlite does not run; call hvd.init() first.
    """
    group = check_process_set(process_set).group()
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"hvd.sampler: {type(dataset).__name__} is an IterableDataset, which nobody can index: have its __iter__ "
            "yield this rank's part, as in itertools.islice(rows, hvd.rank(), None, hvd.size()), pass it to the "
            "DataLoader without a sampler, and call hvd.join() after the last batch, since parts may differ in length"
        )
    if isinstance(dataset, DataLoader):
        raise ValueError("hvd.sampler: a DataLoader was passed; pass its dataset, and the sampler to the DataLoader")
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"hvd.sampler: {type(dataset).__name__} has no __len__, so it cannot be shared; give it one, or "
            "share its samples yourself"
        )
    return DistributedSampler(cast("Dataset[Any]", dataset), group.size, group.rank, shuffle, seed, drop_last)
