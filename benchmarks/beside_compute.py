"""What communication adds to compute: times over those of the compute alone, what is wanted of them, what misses it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from measure import estimate, median_ratio, show, table

Row = dict[str, Any]

LEAST_ROUNDS = 3
LONG_S = 0.5  # a call that takes longer is its own warm-up


def rounds_within(seconds: float, most: int, seconds_per_round: float) -> int:
    """As many as fit into ``seconds``, of at most ``most``."""
    return min(most, max(LEAST_ROUNDS, int(seconds / seconds_per_round)))


def compare(
    times: Mapping[str, np.ndarray], alone: str, own: str, unfused: Collection[str], limit: float, case: Row
) -> list[Row]:
    """A row of a report for each way.

    Args:
        times: seconds by round, of each way.
        alone: the way that only computes.
        own: the way of which something is wanted: at most ``limit`` times as long as ``alone``, and no longer than the
            fastest of ``unfused``.
        case: what all of them do.
    """
    rows = []
    for way, seconds in times.items():
        over = estimate(median_ratio, seconds, times[alone])
        row = {**case, "way": way, "median_ms": float(np.median(seconds)) * 1e3, "over_alone": over}
        if way == own:
            best = min(unfused & times.keys(), key=lambda each: float(np.median(times[each])))
            row |= {
                "alone": alone,
                "limit": limit,
                "best_unfused": best,
                "over_unfused": estimate(median_ratio, seconds, times[best]),
            }
        rows.append(row)
    return rows


def report(rows: Sequence[Row], case: Sequence[str]) -> str:
    """A table of `compare`'s rows, and below it a line for each miss.

    Args:
        case: the keys of what each row is about.
    """
    lines = []
    for row in rows:
        cells = [", ".join(str(row[key]) for key in case), row["way"], f"{row['median_ms']:.2f}"]
        wanted = f"<= {row['limit']:g}" if "limit" in row else ""
        lines.append([*cells, show(row["over_alone"], 3), wanted])
    header = [", ".join(case), "way", "median ms", "over compute alone", "wanted"]
    missed = [line for row in rows if "limit" in row for line in misses(row, case)]
    verdict = ["Missed:", *missed] if missed else ["No target is missed."]
    return "\n".join([table(header, lines), "", *verdict])


def misses(row: Row, case: Sequence[str]) -> list[str]:
    """What is wanted of ``row`` and is not so; whether that may be noise."""
    what = ", ".join(str(row[key]) for key in case)
    found = []
    for found_ratio, limit, over in (
        (row["over_alone"], row["limit"], row["alone"]),
        (row["over_unfused"], 1.0, row["best_unfused"]),
    ):
        if found_ratio["value"] > limit:
            doubt = "" if found_ratio["low"] > limit else ", within its interval"
            found.append(f"  {what}: {show(found_ratio, 3)} times {over}, wanted <= {limit:g}{doubt}")
    return found
