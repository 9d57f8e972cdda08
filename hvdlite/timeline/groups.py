"""Which ranks of a trace train together: who is late can be told only of ranks that wait for one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hvdlite.recorder import Lane

ALONE = "none"
"""In place of the process set of a step: the rank is no member of its optimizer's."""


def groups_of_ranks(trace: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Ranks whose optimizers share a process set, or are linked by ranks that step in several; who has no step is in
    none.
    """
    members: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == Lane.OPTIMIZER.value:
            process_set = event["args"].get("process set", "")
            members[process_set, event["pid"] if process_set == ALONE else None].add(event["pid"])
    groups: list[set[int]] = []
    for ranks in members.values():
        joined = ranks.union(*(group for group in groups if group & ranks))
        groups = [group for group in groups if not group & ranks] + [joined]
    return sorted(tuple(sorted(group)) for group in groups)


def restricted(trace: Mapping[str, Any], ranks: tuple[int, ...]) -> dict[str, Any]:
    """The trace of these ranks alone."""
    return {**trace, "traceEvents": [event for event in trace["traceEvents"] if event["pid"] in ranks]}
