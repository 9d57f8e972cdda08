"""A report in a sentence or two: what communication costs, who is late, and what the longest steps cost."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from hvdlite.counted import counted
from hvdlite.rank_list import rank_list
from hvdlite.timeline.long_steps import LONG, long_steps
from hvdlite.timeline.report import COMPUTING, Report, Step

_LATE_SHARE = 0.05  # of a step; less is noise
_MOSTLY = 2 / 3  # of the steps in which any rank is late; of two ranks each is late in half of them by chance


def verdict(report: Report) -> str:
    """A sentence with medians over the steps, and one about the steps that medians hide.

    What the rank that waits least waits is the cost of communication. What others wait longer is the price of the rank
    that they wait for; if it is late by a twentieth of a step that is said, with the phase in which it takes longer.
    Ranks are named if they are the minority that is mostly late, as those of a slow host; where batches differ in
    length, say, all are in turn.
    """
    if report.median is None:
        return "There is no complete step in this trace, so nothing can be said about it."
    return " ".join(filter(None, (_usual(report, report.median), _unusual(report))))


def _usual(report: Report, median: Step) -> str:
    step_ms = median.step_ms
    least = statistics.median(min(each.exposed_ms for each in step.ranks) for step in report.steps)
    cost = f"Communication costs {_share(least, step_ms)} of a step ({least:.2f} of {step_ms:.2f} ms)"
    late = [step for step in report.steps if step.behind_ms is not None and step.behind_ms > _LATE_SHARE * step.step_ms]
    if not late:
        return f"{cost}{'; no rank is late' if report.ranks > 1 else ''}."
    named = _mostly_late(late)
    who = "ranks are late in turn,"
    if len(named) <= report.ranks / 2:
        who = f"{rank_list(named)} {'is' if len(named) == 1 else 'are'} late"
        late = [step for step in late if step.slowest_rank in named]
    by_ms = statistics.median(step.behind_ms or 0.0 for step in late)
    excess = {name: statistics.median(_excess(step, field) for step in late) for field, name in COMPUTING.items()}
    phase = max(excess, key=lambda name: excess[name])
    return f"{cost}; {who} in {_share(len(late), len(report.steps))} of the steps, by {by_ms:.2f} ms, in {phase}."


def _unusual(report: Report) -> str:
    found = long_steps(report)
    if not found:
        return ""
    cost = _share(sum(step.over_ms for step in found), sum(step.step_ms for step in report.steps))
    longest = found[0]
    return (
        f"{len(found)} of {counted(len(report.steps), 'step')} took more than {LONG} times the median, which cost "
        f"{cost} of the time; the longest, step {longest.number} at {longest.start_s:.3f} s, took "
        f"{longest.step_ms:.2f} ms: {longest.cause}."
    )


def _mostly_late(late: Sequence[Step]) -> list[int]:
    """The fewest ranks that are most of the late ones."""
    named: list[int] = []
    count = 0
    for rank, times in Counter(step.slowest_rank for step in late if step.slowest_rank is not None).most_common():
        named.append(rank)
        count += times
        if count >= _MOSTLY * len(late):
            break
    return sorted(named)


def _excess(step: Step, field: str) -> float:
    """How much longer the slowest rank takes than the others."""
    own = [getattr(each, field) for each in step.ranks if each.rank == step.slowest_rank]
    others = [getattr(each, field) for each in step.ranks if each.rank != step.slowest_rank]
    return statistics.fmean(own) - statistics.fmean(others)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
