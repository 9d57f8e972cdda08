"""Where the time of each training step went, from a trace.

How the numbers are defined:

- A step lasts from the end of one ``optimizer.step()`` (a span 'step' in the lane optimizer) to the end of the next on
  the same rank; of the first one the beginning is unknown, so it is left out. Steps of other ranks belong to the step
  of the lowest rank that ends nearest.
- Communication: the time in which any lane of the coordinator is busy, negotiation excluded, and in which split layers
  exchange rows through windows.
- Exposed communication: the time in which the main thread waits (lane wait), or is busy with exchanges of split layers
  (lanes meeting and window).
- Tensor parallel: the part of it that is due to split layers. On GPUs only the meeting of the threads counts.
- Compute: the rest of the step, in which the main thread does not wait.
- Hidden share: 1 - exposed / communication, not below 0: a rank can wait longer than communication lasts, for a slower
  rank.
- Slowest rank: the one that waits least, since the others wait for it. It is behind by what the others wait longer.
- Phases of a rank's step, which add up to it: exposed communication; backward, from the first gradient to the last, and
  under DistributedDataParallel from its first bucket; the step of the optimizer, or of the wrapped one; and the rest,
  which is forward, data and the beginning of backward.

All are means over ranks, except the slowest one and what is told by rank. A bucket's time is the time in which a
coordinator lane works on it, its bytes the most that any lane handled; both are totals over the trace, means over the
ranks that took part. algbw = bytes / time, as nccl-tests define it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.recorder import COMMUNICATION_LANES, EXPOSED_LANES, Lane

STEP_NAME = "step"
SPLIT_LAYERS = "'tensor_parallel"
"""How the names of operations begin by which split layers exchange rows."""
BUCKETS_SHOWN = 10
COMPUTING = {
    "backward_ms": "backward",
    "optimizer_ms": "the optimizer's step",
    "rest_ms": "forward, its data or other code of the program",
}
"""The phases of a `RankStep` in which a rank computes, and what they are called."""

_COMMUNICATION = frozenset(lane.value for lane in COMMUNICATION_LANES)
_EXPOSED = frozenset(lane.value for lane in EXPOSED_LANES)


@dataclass(frozen=True)
class RankStep:
    """What one rank did in a step; times in ms. The first four add up to the step."""

    rank: int
    backward_ms: float
    exposed_ms: float
    optimizer_ms: float
    rest_ms: float
    communication_ms: float

    @property
    def step_ms(self) -> float:
        return self.backward_ms + self.exposed_ms + self.optimizer_ms + self.rest_ms


@dataclass(frozen=True)
class Step:
    """One training step; times in ms."""

    number: int
    start_s: float | None
    """By the clock of the trace, of the rank that began first; None of medians."""
    step_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    tensor_parallel_ms: float
    """The part of ``exposed_ms`` that is due to split layers."""
    hidden_share: float | None
    """None where nothing was communicated."""
    slowest_rank: int | None
    """None for a single rank."""
    behind_ms: float | None
    ranks: tuple[RankStep, ...]
    """Those that took part, in order."""


@dataclass(frozen=True)
class Bucket:
    """What was communicated under one name in the whole trace."""

    name: str
    total_ms: float
    nbytes: int
    algbw_gbps: float
    """10^9 bytes per second."""
    parameters: tuple[str, ...]
    """Whose gradients were in it, where it is one of DistributedOptimizer's."""


@dataclass(frozen=True)
class Report:
    ranks: int
    origin_epoch_s: float | None
    """The time of day that is 0 in the trace, in seconds since 1970, as the lowest rank told it; None if none did."""
    dropped: int
    steps: tuple[Step, ...]
    median: Step | None
    """Medians over the steps, each figure by itself; its slowest rank is the one that was slowest most often."""
    buckets: tuple[Bucket, ...]


class BusyTime:
    """The union of spans, in ns."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before = [0]  # busy time before each start
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._before[-1] += max(end - self._ends[-1], 0)
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
                self._before.append(self._before[-1] + end - start)

    @property
    def total(self) -> int:
        return self._before[-1]

    def within(self, start: int, end: int) -> int:
        return self._until(end) - self._until(start)

    def pieces(self, start: int, end: int) -> Iterable[tuple[int, int]]:
        """Its spans between ``start`` and ``end``, ascending, cut off there."""
        first = bisect_right(self._ends, start)
        for low, high in zip(self._starts[first:], self._ends[first:], strict=True):
            if low >= end:
                return
            yield max(low, start), min(high, end)

    def _until(self, time: int) -> int:
        index = bisect_right(self._starts, time)
        if index == 0:
            return 0
        return self._before[index] - max(self._ends[index - 1] - time, 0)


@dataclass
class _RankTrace:
    """The spans of one rank."""

    step_ends: list[int]
    waiting: BusyTime
    splitting: BusyTime
    communicating: BusyTime
    backward: BusyTime
    optimizing: BusyTime

    def during(self, rank: int, period: tuple[int, int]) -> RankStep:
        exposed, communication, backward, optimizer = (
            busy.within(*period) / 1e6 for busy in (self.waiting, self.communicating, self.backward, self.optimizing)
        )
        rest = max((period[1] - period[0]) / 1e6 - exposed - backward - optimizer, 0.0)
        return RankStep(rank, backward, exposed, optimizer, rest, communication)


def build_report(trace: Mapping[str, Any]) -> Report:
    """Compute the report from a parsed trace."""
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    splits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    communication: dict[int, list[tuple[int, int]]] = defaultdict(list)
    step_ends: dict[int, list[int]] = defaultdict(list)
    phases: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    named: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    parameters: dict[str, dict[str, None]] = defaultdict(dict)
    handled: dict[tuple[int, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    origins_us: dict[int, int] = {}
    ranks = set()
    dropped = 0
    for event in trace["traceEvents"]:
        rank = event["pid"]
        ranks.add(rank)
        if event["ph"] == "i":
            dropped += event.get("args", {}).get("dropped", 0)
        if event["ph"] == "M" and event["name"] == "process_name":
            origins_us[rank] = event["args"]["start_time_since_epoch_in_micros"]
        if event["ph"] != "X":
            continue
        lane, name = event["cat"], event["name"]
        start = round(event["ts"] * 1000)
        span = (start, start + round(event["dur"] * 1000))
        if lane in _EXPOSED:
            waits[rank].append(span)
            if lane != Lane.WAIT.value or SPLIT_LAYERS in name:
                splits[rank].append(span)
        if lane in (Lane.OPTIMIZER.value, Lane.BACKWARD.value):
            phases[rank, lane].append(span)
            if name == STEP_NAME:
                step_ends[rank].append(span[1])
        elif lane == Lane.PARAMETER.value:
            parameters[event["args"]["bucket"]][name] = None
        elif lane in _COMMUNICATION:
            communication[rank].append(span)
            named[rank, name].append(span)
            handled[rank, name][lane] += event["args"].get("bytes", 0)
    traces = {
        rank: _RankTrace(
            sorted(step_ends[rank]),
            BusyTime(waits[rank]),
            BusyTime(splits[rank]),
            BusyTime(communication[rank]),
            *(_outside(phases[rank, lane.value], waits[rank]) for lane in (Lane.BACKWARD, Lane.OPTIMIZER)),
        )
        for rank in sorted(ranks)
    }
    steps = tuple(_steps(traces))
    return Report(
        ranks=len(ranks),
        origin_epoch_s=origins_us[min(origins_us)] / 1e6 if origins_us else None,
        dropped=dropped,
        steps=steps,
        median=_median(steps) if steps else None,
        buckets=tuple(_buckets(named, handled, parameters)[:BUCKETS_SHOWN]),
    )


def _outside(spans: Sequence[tuple[int, int]], others: Iterable[tuple[int, int]]) -> BusyTime:
    """The time in ``spans`` in which nothing of ``others`` is under way."""
    busy = BusyTime(others)
    pieces = []
    for start, end in spans:
        for low, high in busy.pieces(start, end):
            pieces.append((start, low))
            start = high
        pieces.append((start, end))
    return BusyTime(pieces)


def _steps(traces: Mapping[int, _RankTrace]) -> Iterable[Step]:
    leading = next((trace for trace in traces.values() if trace.step_ends), None)
    if leading is None:
        return
    for number in range(1, len(leading.step_ends)):
        begin, end = leading.step_ends[number - 1 : number + 1]
        periods = {}
        for rank, trace in traces.items():
            period = _nearest_period(trace.step_ends, end)
            # A rank whose step is missing (its events were dropped, or it had ended) has no part in this one.
            if period is not None and abs(period[1] - end) <= (end - begin) / 2:
                periods[rank] = period
        yield _step(number, traces, periods)


def _nearest_period(ends: Sequence[int], end: int) -> tuple[int, int] | None:
    """The step that ends nearest to ``end``, if its beginning is known."""
    after = bisect_right(ends, end)
    index = min((i for i in (after - 1, after) if 0 <= i < len(ends)), key=lambda i: abs(ends[i] - end), default=0)
    return None if index == 0 else (ends[index - 1], ends[index])


def _step(number: int, traces: Mapping[int, _RankTrace], periods: Mapping[int, tuple[int, int]]) -> Step:
    ranks = tuple(traces[rank].during(rank, period) for rank, period in periods.items())
    step_ms = statistics.fmean(end - begin for begin, end in periods.values()) / 1e6
    communication_ms = statistics.fmean(each.communication_ms for each in ranks)
    exposed_ms = statistics.fmean(each.exposed_ms for each in ranks)
    splits_ms = (traces[rank].splitting.within(*period) / 1e6 for rank, period in periods.items())
    slowest = behind_ms = None
    if len(ranks) > 1:
        least = min(ranks, key=lambda each: each.exposed_ms)
        slowest = least.rank
        behind_ms = statistics.fmean(each.exposed_ms for each in ranks if each is not least) - least.exposed_ms
    return Step(
        number=number,
        start_s=min(begin for begin, _ in periods.values()) / 1e9,
        step_ms=step_ms,
        compute_ms=step_ms - exposed_ms,
        communication_ms=communication_ms,
        exposed_ms=exposed_ms,
        tensor_parallel_ms=statistics.fmean(splits_ms),
        hidden_share=max(1 - exposed_ms / communication_ms, 0.0) if communication_ms else None,
        slowest_rank=slowest,
        behind_ms=behind_ms,
        ranks=ranks,
    )


def _median(steps: Sequence[Step]) -> Step:
    hidden = [step.hidden_share for step in steps if step.hidden_share is not None]
    behind = [step.behind_ms for step in steps if step.behind_ms is not None]
    slowest = [step.slowest_rank for step in steps if step.slowest_rank is not None]
    return Step(
        number=len(steps),
        start_s=None,
        step_ms=statistics.median(step.step_ms for step in steps),
        compute_ms=statistics.median(step.compute_ms for step in steps),
        communication_ms=statistics.median(step.communication_ms for step in steps),
        exposed_ms=statistics.median(step.exposed_ms for step in steps),
        tensor_parallel_ms=statistics.median(step.tensor_parallel_ms for step in steps),
        hidden_share=statistics.median(hidden) if hidden else None,
        slowest_rank=statistics.mode(slowest) if slowest else None,
        behind_ms=statistics.median(behind) if behind else None,
        ranks=tuple(_median_of_rank(rank, steps) for rank in sorted({each.rank for s in steps for each in s.ranks})),
    )


def _median_of_rank(rank: int, steps: Sequence[Step]) -> RankStep:
    own = [each for step in steps for each in step.ranks if each.rank == rank]
    return RankStep(
        rank,
        statistics.median(each.backward_ms for each in own),
        statistics.median(each.exposed_ms for each in own),
        statistics.median(each.optimizer_ms for each in own),
        statistics.median(each.rest_ms for each in own),
        statistics.median(each.communication_ms for each in own),
    )


def _buckets(
    named: Mapping[tuple[int, str], Sequence[tuple[int, int]]],
    handled: Mapping[tuple[int, str], Mapping[str, int]],
    parameters: Mapping[str, Iterable[str]],
) -> list[Bucket]:
    """All buckets, the costliest first."""
    times: dict[str, list[int]] = defaultdict(list)
    sizes: dict[str, list[int]] = defaultdict(list)
    for (rank, name), spans in named.items():
        times[name].append(BusyTime(spans).total)
        # Lanes see different parts of a bucket: the whole of it when packing, a shard in the ring.
        sizes[name].append(max(handled[rank, name].values()))
    buckets = []
    for name, rank_times in times.items():
        total_ns, nbytes = statistics.fmean(rank_times), statistics.fmean(sizes[name])
        buckets.append(
            Bucket(
                name,
                total_ns / 1e6,
                round(nbytes),
                nbytes / total_ns if total_ns else 0.0,
                tuple(parameters.get(name, ())),
            )
        )
    return sorted(buckets, key=lambda bucket: -bucket.total_ms)
