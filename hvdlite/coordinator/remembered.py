"""What was made for what repeats: bounded, since who has more does not repeat himself."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from hvdlite.coordinator.messages import KNOWN_REQUESTS

T = TypeVar("T")


class Remembered(dict[Hashable, T]):
    """What was made for each key."""

    def remember(self, key: Hashable, made: T) -> T:
        """``made`` for ``key``."""
        if len(self) >= KNOWN_REQUESTS:
            self.clear()
        self[key] = made
        return made
