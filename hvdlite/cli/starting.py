"""Whether ranks wait in their start for one that has ended: then nobody can come any more.

That is hvd.init(), or init_process_group() of torch.distributed where it meets as hvd.init() does.
"""

from __future__ import annotations

import math
import time

from hvdlite.start.start_watch import GONE_S, THROUGH, called


class Starting:
    """The ranks of one start.

    Attributes:
        have_come: some have come to their start.
        are_through: some are.
    """

    def __init__(self) -> None:
        self.have_come = self.are_through = False
        self._gone = ""  # who has ended before
        self._gone_s = math.inf  # since when others wait for it

    def come(self) -> None:
        """A rank has come to its start."""
        self.have_come = True
        self._compare()

    def end(self, rank: int) -> None:
        """``rank`` has ended, which may be `UNSEEN`."""
        self._gone = self._gone or called(rank)
        self._compare()

    def _compare(self) -> None:
        # Who ends without a start is no failure where nobody comes to it.
        if self.have_come and self._gone:
            self._gone_s = min(self._gone_s, time.monotonic())

    @property
    def is_under_way(self) -> bool:
        """Whether some wait for others."""
        return self.have_come and not self.are_through

    @property
    def lost(self) -> str:
        """Why these ranks do not get through; empty where they may."""
        if not self.are_through and time.monotonic() > self._gone_s + GONE_S:
            return f"{self._gone} has ended before it was through {THROUGH}"
        return ""
