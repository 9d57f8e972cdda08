"""`_basics` of Horovod's modules: of its private names the one that tests read."""

from __future__ import annotations

import hvdlite

__all__ = ["_basics"]


class HorovodBasics:
    """What runs in this process."""

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return hvdlite.runtime().process_sets()


_basics = HorovodBasics()
