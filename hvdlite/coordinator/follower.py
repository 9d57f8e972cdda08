"""A rank that leads no node: what it has to say goes to its node leader, and the log comes from there."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.messages import Decoder, Encoder, Message, PlanMessage, Written
from hvdlite.coordinator.plan_member import Wish
from hvdlite.counters import Traffic

FULL_STREAM_S = 1e-3
"""How long to wait before another try at a byte stream that took no more."""


class Follower:
    """Its end of the byte streams in the control page; a `Leader` has the same methods."""

    def __init__(self, page: ControlPage, capacity: int) -> None:
        self._page = page
        self._claims = Encoder(capacity)
        self._log = Decoder()

    def say(self, message: Message) -> None:
        """Tell the leader."""
        self._claims.send(message)

    def turn(self, now_s: float) -> tuple[bool, Iterable[Message]]:
        """Move what was said into the stream; whether more may follow soon, and what has come down since the last call.

        The messages must be exhausted before the next call.
        """
        if self._claims.outbox:
            self._page.send_to_leader(self._claims.outbox)
        data = self._page.read_log()
        return (True, self._log.feed(data)) if data else (False, ())

    def obeyed(self, message: PlanMessage) -> None:
        """This rank does what ``message`` of the log says, which is no GO."""

    def changed(self, wish: Wish, done: int, period: int) -> None:
        """All ranks have changed their plan; see `hvdlite.coordinator.plan_leader.PlanLeader.changed`."""

    def all_are_back(self) -> None:
        """The ranks that were absent take part again."""

    @property
    def patience_s(self) -> float:
        """How long to sleep if nobody rings."""
        return FULL_STREAM_S if self._claims.outbox else math.inf

    @property
    def written(self) -> Written:
        return self._claims.written

    @property
    def traffic(self) -> Traffic:
        """With other nodes."""
        return Traffic()
