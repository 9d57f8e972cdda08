"""Steps that take much longer than others, which medians hide: when, which ranks held them up, and in which phase."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from hvdlite.rank_list import rank_list
from hvdlite.timeline.report import COMPUTING, Report, Step

LONG = 2
"""A step is long if it takes more than so many times the median."""

LONG_STEPS_SHOWN = 10
LONG_STEP_HEADER = ("step", "began", "at s", "time ms", "cause")


@dataclass(frozen=True)
class LongStep:
    number: int
    start_s: float
    """By the clock of the trace, as Perfetto shows it."""
    time_of_day: str
    """In the time zone of who reads the report."""
    step_ms: float
    over_ms: float
    """By how much longer it took than the median."""
    ranks: tuple[int, ...]
    """That computed for most of ``over_ms``; none where all of them waited."""
    cause: str


def long_steps(report: Report) -> list[LongStep]:
    """The steps that are long, the longest first."""
    if report.median is None:
        return []
    limit_ms = LONG * report.median.step_ms
    origin_s = report.origin_epoch_s
    found = [_explained(step, report.median, origin_s) for step in report.steps if step.step_ms > limit_ms]
    return sorted(found, key=lambda step: -step.step_ms)


def long_step_cells(step: LongStep) -> list[str]:
    """A row below `LONG_STEP_HEADER`."""
    return [str(step.number), step.time_of_day, f"{step.start_s:.3f}", f"{step.step_ms:.2f}", step.cause]


def _explained(step: Step, median: Step, origin_s: float | None) -> LongStep:
    """Ranks are compared with what they do themselves in other steps, since all may be late at once, as for a file."""
    over_ms = step.step_ms - median.step_ms
    usual = {each.rank: each for each in median.ranks}
    excess = {
        each.rank: {name: getattr(each, field) - getattr(usual[each.rank], field) for field, name in COMPUTING.items()}
        for each in step.ranks
    }
    ranks = tuple(rank for rank, phases in excess.items() if sum(phases.values()) > over_ms / 2)
    if ranks:
        phase = max(COMPUTING.values(), key=lambda name: sum(excess[rank][name] for rank in ranks))
        who = "all ranks" if len(ranks) == len(step.ranks) > 1 else rank_list(ranks)
        cause = f"{who} in {phase}"
    else:
        cause = "all ranks waited for communication"
    assert step.start_s is not None
    time_of_day = "-"
    if origin_s is not None:
        time_of_day = f"{datetime.fromtimestamp(origin_s + step.start_s):%Y-%m-%d %H:%M:%S}"
    return LongStep(step.number, step.start_s, time_of_day, step.step_ms, over_ms, ranks, cause)
