"""What programs find in Horovod's `mpi_ops` and `optimizer` beside what is public.

Of its private names these are `_basics`, which tests read, and `_DistributedOptimizer`, by which libraries annotate.
"""

from __future__ import annotations

import hvdlite
import hvdlite.torch as hvd
from hvdlite.compat.common import (
    check_installed_version,
    get_average_backwards_compatibility_fun,
    gpu_available,
    num_rank_is_power_2,
)

__all__ = [
    "_DistributedOptimizer",
    "_basics",
    "check_installed_version",
    "get_average_backwards_compatibility_fun",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "num_rank_is_power_2",
]


class HorovodBasics:
    """What runs in this process."""

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return hvdlite.runtime().process_sets()


_basics = HorovodBasics()
_DistributedOptimizer = hvd.DistributedOptimizer
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(hvd)
