"""A report in one sentence: what communication costs, and who is late."""

from __future__ import annotations

import statistics
from collections import Counter

from hvdlite.timeline.report import RankStep, Report

_LATE_SHARE = 0.05  # of a step; less is noise
_PHASES = {
    "backward_ms": "backward",
    "optimizer_ms": "the optimizer's step",
    "rest_ms": "forward or its data",
}


def verdict(report: Report) -> str:
    """One sentence, with medians over the steps.

    What the rank that waits least waits is the cost of communication. What others wait longer is the price of the rank
    that they wait for; it is named if it is late by a twentieth of a step, with the phase in which it takes longer.
    """
    if report.median is None:
        return "There is no complete step in this trace, so nothing can be said about it."
    step_ms = report.median.step_ms
    least = statistics.median(min(each.exposed_ms for each in step.ranks) for step in report.steps)
    cost = f"Communication costs {_share(least, step_ms)} of a step ({least:.2f} of {step_ms:.2f} ms)"
    late = [step for step in report.steps if step.behind_ms is not None and step.behind_ms > _LATE_SHARE * step.step_ms]
    if not late:
        return f"{cost}{'; no rank is late' if report.ranks > 1 else ''}."
    rank, count = Counter(step.slowest_rank for step in late).most_common(1)[0]
    own = [step for step in late if step.slowest_rank == rank]
    by_ms = statistics.median(step.behind_ms or 0.0 for step in own)
    excess = {
        name: statistics.median(_excess(step.ranks, rank, field) for step in own) for field, name in _PHASES.items()
    }
    phase = max(excess, key=lambda name: excess[name])
    often = _share(count, len(report.steps))
    return f"{cost}; rank {rank} is late in {often} of the steps, by {by_ms:.2f} ms, in {phase}."


def _excess(ranks: tuple[RankStep, ...], rank: int | None, field: str) -> float:
    """How much longer ``rank`` takes than the others."""
    own = [getattr(each, field) for each in ranks if each.rank == rank]
    others = [getattr(each, field) for each in ranks if each.rank != rank]
    return statistics.fmean(own) - statistics.fmean(others)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
