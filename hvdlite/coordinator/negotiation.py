"""What is ready on every rank, in which order, and whether the ranks mean the same.

Pure: no MPI, no clock of its own, no shared memory. Every node leader has one `Negotiation` for the ranks of its
subtree; what is complete there goes up as few claims as tell the truth, and the root's turns into responses.

A rank that has joined is ready for everything and contributes nothing. Only the root knows all who have, so a
leader with one below it passes on every claim as it comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hvdlite.coordinator.messages import Claim, Fault, Response
from hvdlite.coordinator.request import Difference, Key, Request, title_of
from hvdlite.rank_list import rank_list

LOOK_S = 0.25  # how often a leader looks who is late, while claims wait


@dataclass
class _Gathering:
    """The claims for one key so far."""

    since_s: float
    missing: int
    in_parts: bool = False  # some claims have gone up already
    claims: dict[Request, list[tuple[int, ...]]] = field(default_factory=dict)

    def ranks(self) -> set[int]:
        """Who has claimed it, of those that have not gone up."""
        return {rank for parts in self.claims.values() for ranks in parts for rank in ranks}


class Negotiation:
    """Collects claims until all of ``ranks`` have claimed a key.

    Args:
        patience_s: after which a leader passes on what it has, complete or not.
    """

    def __init__(self, ranks: Sequence[int], patience_s: float) -> None:
        self._ranks = tuple(ranks)
        self._patience_s = patience_s
        self._gathering: dict[Key, _Gathering] = {}
        self._complete: list[tuple[Key, _Gathering]] = []
        self._next_look_s = 0.0
        self._joined: dict[int, Claim] = {}  # in the order in which they came
        self._new_joins: list[Claim] = []

    def add(self, claim: Claim, sender_ranks: tuple[int, ...], now_s: float) -> None:
        """Count a claim of a sender that speaks for ``sender_ranks``."""
        ranks = claim.ranks if claim.ranks is not None else sender_ranks
        if claim.request.departs:
            self._joined.update((rank, claim) for rank in ranks)
            self._new_joins.append(Claim(claim.request, claim.sequence, ranks))
            return
        key = claim.key
        gathering = self._gathering.get(key)
        if gathering is None:
            gathering = self._gathering[key] = _Gathering(now_s, len(self._ranks))
        gathering.claims.setdefault(claim.request, []).append(ranks)
        gathering.missing -= len(ranks)
        if gathering.missing == 0:
            del self._gathering[key]
            self._complete.append((key, gathering))

    def upward(self, now_s: float = 0.0) -> list[Claim]:
        """What has become complete, as claims to the parent; and what waits too long, as far as it has come.

        Otherwise the root could not tell that a rank waits for others of its own node.
        """
        claims = []
        for (_, sequence), gathering in self._take():
            claims += _as_claims(gathering, sequence, len(gathering.claims) == 1 and not gathering.in_parts)
        if self._joined:
            for (_, sequence), gathering in self._gathering.items():
                claims += _as_claims(gathering, sequence, False)
            self._gathering.clear()
        elif now_s >= self._next_look_s:
            # After a long collective nobody is late: the ranks below could not speak meanwhile either.
            was_away = now_s - self._next_look_s > LOOK_S
            self._next_look_s = now_s + LOOK_S
            for (_, sequence), gathering in self._gathering.items():
                if gathering.claims and now_s - gathering.since_s > self._patience_s and not was_away:
                    claims += _as_claims(gathering, sequence, False)
                    gathering.claims.clear()
                    gathering.in_parts = True
        joins, self._new_joins = self._new_joins, []
        return claims + joins  # what a rank claimed before it joined stays before

    def verdicts(self) -> list[Response | Fault]:
        """What has become complete, judged, in the order in which every rank shall do it."""
        if not self._joined:
            return [_judge(key, gathering.claims) for key, gathering in self._take()]
        for key, gathering in list(self._gathering.items()):
            if gathering.missing > len(self._joined):  # told without going through all ranks
                continue
            if len(self._joined.keys() | gathering.ranks()) == len(self._ranks):
                self._complete.append((key, self._gathering.pop(key)))
        verdicts = [_judge(key, gathering.claims, self._joined.keys()) for key, gathering in self._take()]
        if len(self._joined) == len(self._ranks):
            last, claim = list(self._joined.items())[-1]
            verdicts.append(Response(claim.request, claim.sequence, last))
            self.end_join()
        return verdicts

    def end_join(self) -> None:
        """All ranks had joined, and go on."""
        self._joined.clear()
        self._new_joins.clear()

    def waiting(self) -> list[tuple[Key, str, float]]:
        """(key, what it is for people, since when) of everything incomplete, the oldest first."""
        items = []
        for (name, sequence), gathering in self._gathering.items():
            request = next(iter(gathering.claims))
            label = title_of(request.label, name if sequence < 0 else f"{name}.{sequence}")
            if contents := request.contents:
                label += f" of {contents}"
            items.append(((name, sequence), label, gathering.since_s))
        return sorted(items, key=lambda item: item[2])

    def claimed(self) -> list[Request]:
        """What is not answered, in the order in which it came; nothing where that cannot be taken back."""
        found = [*(gathering for _, gathering in self._complete), *self._gathering.values()]
        if self._joined or any(len(gathering.claims) > 1 for gathering in found):
            return []
        return [next(iter(gathering.claims)) for gathering in found]

    def take_back(self) -> None:
        """All who have claimed something forget it, too."""
        self._gathering.clear()
        self._complete.clear()

    @property
    def is_waiting(self) -> bool:
        return bool(self._gathering)

    @property
    def is_idle(self) -> bool:
        """Whether no rank has claimed anything that is not answered, and none has joined."""
        return not (self._gathering or self._complete or self._joined)

    def _take(self) -> list[tuple[Key, _Gathering]]:
        complete, self._complete = self._complete, []
        return complete


def _as_claims(gathering: _Gathering, sequence: int, of_all: bool) -> list[Claim]:
    if of_all:  # the usual case, which must cost no more where there are more ranks below
        return [Claim(request, sequence) for request in gathering.claims]
    return [Claim(request, sequence, _in_order(parts)) for request, parts in gathering.claims.items()]


def _in_order(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(rank for part in parts for rank in part))


def _judge(key: Key, claims: dict[Request, list[tuple[int, ...]]], joined: Collection[int] = ()) -> Response | Fault:
    if len(claims) == 1 and not joined:  # the usual case, which must cost no more where there are more ranks
        return Response(next(iter(claims)), key[1])
    merged: dict[Request, list[tuple[int, ...]]] = {}
    for request, parts in claims.items():  # where tensors live contradicts nothing
        merged.setdefault(request.settled(), []).extend(parts)
    by_ranks = [(request, _in_order(parts)) for request, parts in merged.items()]
    by_ranks.sort(key=lambda item: item[1])  # the group of the lowest rank first: its text is the reference
    request = by_ranks[0][0]
    for other, ranks in by_ranks[1:]:
        text = _difference(request, other, by_ranks[0][1], ranks)
        if text is not None:
            return Fault(key, text)
    absent = tuple(sorted(set(joined).difference(*(ranks for _, ranks in by_ranks))))
    if absent:
        objection = request.objection(absent)
        if objection is not None:
            who = f"{rank_list(absent)} called join()"
            return Fault(key, f"{request.label} '{request.subject}': {who}{objection}.")
    return Response(request, key[1])


def _difference(a: Request, b: Request, a_ranks: tuple[int, ...], b_ranks: tuple[int, ...]) -> str | None:
    """The first thing in which two requests of one name contradict each other, in a sentence; None where in nothing."""
    if a.label != b.label:
        advice = "Call the same operation under this name on every rank"
        differences = iter([Difference("", "operation", a.label, b.label, advice)])
    else:
        differences = a.differences(b)
    for tensor, what, mine, theirs, advice in differences:
        if mine != theirs:
            return (
                f"{a.label} '{tensor or a.subject}': {what} is {mine} on {rank_list(a_ranks)} but {theirs} on "
                f"{rank_list(b_ranks)}. {advice}."
            )
    return None
