"""The search for settings that make steps faster: settings out, step times in. Pure: no clock, no torch, no MPI.

It is deterministic, so ranks that are told the same times decide alike. Two parts:

1. One setting after the other, along its ladder of values as long as steps become faster. What is found is a guess:
   each value was measured once, and a machine that was busy meanwhile misleads.
2. The guess against the defaults, in turns, with all samples that are left. It is taken only if its steps are clearly
   faster; so noise, however much there is, costs time in the first part and not a worse choice at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence

from numpy import median  # torch has imported it, and the module statistics takes 3 ms

from hvdlite.config import Tunable

_WORTH_IT = 0.99  # of the time before: what gains less is left as it is
_FEWEST_TURNS, _MOST_TURNS = 2, 4  # of each side, in the comparison at the end
_CLEARLY = 2.33  # standard deviations; noise alone gets there once in 100 times


class Search:
    """Which settings to measure next, and in the end which to keep.

    Args:
        default: where it starts, and what stays unless something is clearly faster.
        ladders: by the name of a setting its values, from little to much, with that of ``default`` among them.
        effect: of what has equal effects only one is measured.
        warmup: samples at the start that do not count.
        samples: most samples in all, each of some steps with the same settings.

    Attributes:
        settings: to measure now; once it is `over`, the choice.
        over: whether it has decided.
        outcome: what it has decided and why, in a few words.
    """

    def __init__(
        self,
        default: Tunable,
        ladders: Mapping[str, Sequence[int]],
        effect: Callable[[Tunable], Hashable],
        *,
        warmup: int,
        samples: int,
    ) -> None:
        self.settings = default
        self.over = False
        self.outcome = "the defaults stay"
        self._default = default
        self._ladders = ladders
        self._effect = effect
        self._warmup = warmup
        self._left = samples
        self._best_time = math.inf  # median of the best so far
        self._verdict = ""
        self._course = self._run()
        self._go_on(None)

    def record(self, times: Sequence[float]) -> str:
        """Take the times of the steps of one sample; says in a few words what came of them."""
        assert not self.over
        self._left -= 1
        self._go_on(times)
        return self._verdict

    def _go_on(self, times: Sequence[float] | None) -> None:
        try:
            self.settings = next(self._course) if times is None else self._course.send(times)
        except StopIteration as end:
            self.settings = end.value
            self.over = True

    def _run(self) -> Generator[Tunable, Sequence[float], Tunable]:
        """Yields what to measure, is sent the times, returns the choice."""
        if not self._has_alternatives():
            self.outcome = "nothing to choose from: with these gradients all values come to the same"
            return self._default
        if self._left < self._warmup + 2 + 2 * _FEWEST_TURNS:
            self.outcome = f"nothing is tuned: too few samples ({self._left})"
            return self._default
        for _ in range(self._warmup):
            yield self._default
            self._verdict = "warm-up"
        self._best_time = median((yield self._default))
        self._verdict = "defaults"
        best = self._default
        for name, ladder in self._ladders.items():
            best = yield from self._climb(best, name, ladder)
        if best == self._default:
            return best
        return best if (yield from self._wins(best)) else self._default

    def _climb(self, start: Tunable, name: str, ladder: Sequence[int]) -> Generator[Tunable, Sequence[float], Tunable]:
        """Try both neighbours of ``start`` on the ladder of ``name``, and go on beyond the faster one."""
        at = ladder.index(getattr(start, name))
        best, beyond = start, list[Tunable]()
        for values in (ladder[at + 1 :], ladder[:at][::-1]):
            way = self._distinct(start, [start._replace(**{name: value}) for value in values])
            if way and (yield from self._is_faster(way[0])):
                best, beyond = way[0], way[1:]
        for candidate in beyond:
            if not (yield from self._is_faster(candidate)):
                break
            best = candidate
        return best

    def _is_faster(self, candidate: Tunable) -> Generator[Tunable, Sequence[float], bool]:
        """Than the best so far; False as well where all samples that are left are for the comparison."""
        if self._left <= 2 * _FEWEST_TURNS:
            return False
        time = median((yield candidate))
        if time >= _WORTH_IT * self._best_time:
            self._verdict = "not faster"
            return False
        self._verdict = "faster"
        self._best_time = time
        return True

    def _wins(self, best: Tunable) -> Generator[Tunable, Sequence[float], bool]:
        """The second part. In every turn ``best`` must be faster: load that comes and goes slowly fools the test."""
        old: list[float] = []
        new: list[float] = []
        for _ in range(min(self._left // 2, _MOST_TURNS)):
            old_times = yield self._default
            self._verdict = "comparison: defaults"
            new_times = yield best
            self._verdict = "comparison: the fastest"
            if median(new_times) >= median(old_times):
                return False
            old += old_times
            new += new_times
        if not is_clearly_faster(new, old):
            return False
        self.outcome = f"steps are {1 - median(new) / median(old):.0%} shorter than with the defaults"
        return True

    def _distinct(self, start: Tunable, candidates: Iterable[Tunable]) -> list[Tunable]:
        """Those that come to something else than ``start`` and one another."""
        seen, found = {self._effect(start)}, []
        for candidate in candidates:
            effect = self._effect(candidate)
            if effect not in seen:
                seen.add(effect)
                found.append(candidate)
        return found

    def _has_alternatives(self) -> bool:
        start = self._default
        return any(
            self._distinct(start, [start._replace(**{name: value}) for value in ladder])
            for name, ladder in self._ladders.items()
        )


def is_clearly_faster(new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether steps that take ``new`` are faster than steps that take ``old``, by more than chance explains.

    The rank test of Mann and Whitney (1947, doi:10.1214/aoms/1177730491): of all pairs of a new and an old step the new
    one must be faster in clearly more than half. It makes no assumption about how step times are distributed.
    """
    if median(new) >= _WORTH_IT * median(old):
        return False
    pairs = len(new) * len(old)
    wins = sum((a < b) + (a == b) / 2 for a in new for b in old)
    deviation = math.sqrt(pairs * (len(new) + len(old) + 1) / 12)
    return wins - pairs / 2 >= _CLEARLY * deviation
