"""What a coordinator has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """See docs/statistics.md."""

    submissions: int = 0
    cycles: int = 0
    responses: int = 0
    faults: int = 0
    batches: int = 0
    counted: int = 0
