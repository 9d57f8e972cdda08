"""The grid of a job: tensor parallelism within its rows, data parallelism within its columns."""

from __future__ import annotations

from typing import NamedTuple

import hvdlite
from hvdlite.tensor_parallel.methods import Methods
from hvdlite.tensor_parallel.team import Team
from hvdlite.torch.process_set import ProcessSet, add_process_set, global_process_set


class Grid(NamedTuple):
    """This rank's row and column.

    Attributes:
        tp: the ranks that hold the other parts of this rank's layers.
        dp: the ranks that hold the same parts, and see other batches: ``DistributedOptimizer(process_set=grid.dp)``.
    """

    tp: Team
    dp: ProcessSet


def init(tp_size: int, method: Methods = "auto") -> Grid:
    """Divide the ranks of the job into teams of ``tp_size``; all ranks call it, after hvd.init().

    Teams take the ranks of a node one after the other, so they lie within nodes where ``tp_size`` divides the ranks of
    each. Ranks with the same place in their teams are a column.

    Args:
        method: see `Team`.

    Raises:
        ValueError: ``tp_size`` does not divide the ranks of the job.
        NotInitializedError: hvdlite does not run.
    """
    size = hvdlite.size()
    if tp_size < 1 or size % tp_size:
        raise ValueError(f"tp_size is {tp_size}, which does not divide the {size} ranks of this job")
    by_node = [rank for node in hvdlite.runtime().topology.nodes for rank in node]
    teams = [sorted(by_node[start : start + tp_size]) for start in range(0, size, tp_size)]
    rows = [_process_set_of(ranks) for ranks in teams]
    columns = [_process_set_of(list(ranks)) for ranks in zip(*teams, strict=True)]
    own_row = next(row for row in rows if row.included())
    return Grid(Team(own_row, method), next(column for column in columns if column.included()))


def _process_set_of(ranks: list[int]) -> ProcessSet:
    """The registered set of ``ranks``, new if there was none."""
    if len(ranks) == hvdlite.size():
        return global_process_set
    process_set = ProcessSet(ranks)
    process_set.process_set_id = hvdlite.runtime().group_number(process_set.ranks)
    return process_set if process_set.is_registered() else add_process_set(process_set)
