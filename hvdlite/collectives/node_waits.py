"""What a wait for the other ranks of a node has come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite import _native
from hvdlite.errors import CollectiveError
from hvdlite.naps import wait_for_verdict

VERDICT_S = 2.0  # for ranks of the node that wait for other nodes, and say why they are late


class WaitedIn(Protocol):
    """Where a rank waits for others."""

    def late(self) -> list[int]:
        """Those of the node for which the last wait was in vain."""


class NodeWaits:
    """Waits of one rank.

    Args:
        ranks: of the node.
        timeout_s: the longest.
        check: raises once the world has failed; called after a wait was aborted.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float, check: Callable[[], None]) -> None:
        self.timeout_s = timeout_s
        self._ranks = ranks
        self._check = check

    def expect_ok(self, status: int, operation: str, label: str, waited_in: WaitedIn) -> None:
        """Return if ``status``, of a wait in ``waited_in``, is that all have come. Of all kinds it means the same.

        Raises:
            CollectiveError: it is not; speaks of ``operation`` and ``label``.
        """
        if status == _native.Barrier.OK:
            return
        activity = f"{operation} '{label}'" if label else operation
        if status == _native.Barrier.ABORTED:
            self._check()
            raise CollectiveError(f"{activity}: the job was aborted while this rank waited for its node")
        assert status == _native.Barrier.TIMEOUT, status
        wait_for_verdict(self._check, VERDICT_S)
        late = [self._ranks[local_rank] for local_rank in waited_in.late()]
        raise CollectiveError(
            f"{activity}: of ranks {list(self._ranks)} on this node, {late} did not come within "
            f"{self.timeout_s:g} s; if they are only slow, raise HVDLITE_COLLECTIVE_TIMEOUT_SECONDS"
        )
