"""Where the ranks of a team make sure that all of them mean the same.

Before the result of an exchange is used, every rank has seen a card of every other one, which says which exchange this
is, and of what. So ranks that contradict one another, or one that cannot take part, are an error with names on every
rank, not a hang or a wrong sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NoReturn

from hvdlite.errors import MismatchError, UsageError
from hvdlite.rank_list import rank_list

CARD_BYTES = 512
_OBJECTION = "!"


class Meeting(ABC):
    """Of ``ranks``, of which this one is number ``rank``; all of them come for the same purposes, in order."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self._met = 0

    @abstractmethod
    def _exchange_cards(self, card: bytes) -> list[bytes]:
        """Everybody's card, in the order of ranks."""

    def meet(self, purpose: Hashable) -> None:
        """Wait for all ranks.

        Raises:
            MismatchError: ranks have come for different exchanges; the same text on every rank.
            UsageError: a rank cannot take part, see `refuse`; the same text on every rank.
        """
        card = self._next_card(_encoded(purpose))
        cards = self._exchange_cards(card)
        if cards.count(card) != self.size:
            raise disagreement(cards, self.ranks)

    def tell(self, topic: str, text: str) -> list[str]:
        """What every rank tells of ``topic``, in the order of ranks: one line of it, and together up to `CARD_BYTES`.

        Raises:
            MismatchError, UsageError: as `meet`.
        """
        cards = self._exchange_cards(self._next_card(f"{topic}\n{text}".encode()))
        told = [card.rstrip(b"\0").decode().split("\n") for card in cards]
        if any(len(card) != 2 or card[0] != told[0][0] for card in told):
            raise disagreement(cards, self.ranks)
        return [card[1] for card in told]

    def refuse(self, why: str) -> NoReturn:
        """Tell the other ranks, which come for an exchange, that this one cannot take part; raise on all of them."""
        cards = self._exchange_cards(self._next_card((_OBJECTION + why).encode()))
        raise disagreement(cards, self.ranks)

    def _next_card(self, purpose: bytes) -> bytes:
        self._met += 1
        return (b"%d %b" % (self._met, purpose))[:CARD_BYTES].ljust(CARD_BYTES, b"\0")


class LoneMeeting(Meeting):
    """Of one rank."""

    def _exchange_cards(self, card: bytes) -> list[bytes]:
        return [card]


@lru_cache(maxsize=1024)
def _encoded(purpose: Hashable) -> bytes:
    return str(purpose).encode()


def purpose_of(card: bytes) -> tuple[str, str]:
    """The number of the exchange, and what it is of."""
    number, _, purpose = card.rstrip(b"\0").decode(errors="replace").partition("\n")[0].partition(" ")
    return number, purpose


def disagreement(cards: Sequence[bytes], ranks: Sequence[int]) -> MismatchError | UsageError:
    """What ``cards``, which are not all alike, or object, say of ``ranks``."""
    meant: dict[tuple[str, str], list[int]] = {}
    for rank, card in zip(ranks, cards, strict=True):
        meant.setdefault(purpose_of(card), []).append(rank)
    objections = [
        f"{rank_list(who)}: {purpose.removeprefix(_OBJECTION)}"
        for (_, purpose), who in meant.items()
        if purpose.startswith(_OBJECTION)
    ]
    if objections:
        return UsageError("; ".join(objections))
    said = "; ".join(f"{rank_list(who)}, exchange {number}: {purpose}" for (number, purpose), who in meant.items())
    return MismatchError(
        f"tensor parallelism, ranks {list(ranks)}: the ranks contradict one another ({said}). Make the same calls in "
        "the same order on every rank, with the same shapes and dtypes"
    )
