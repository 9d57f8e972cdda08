"""What was measured beside what is wanted of it: figures, and targets that are made of some."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Estimate = dict[str, float]
"""A median and its interval of 95 % confidence, as reports have them."""


@dataclass(frozen=True)
class Figure:
    """What was measured, and its ``interval`` of 95 % confidence; ``limit`` None: nothing is wanted of it."""

    label: str
    value: float
    interval: tuple[float, float] | None = None
    limit: float | None = None
    at_most: bool = True

    @property
    def is_met(self) -> bool:
        return self.limit is None or (self.value <= self.limit if self.at_most else self.value >= self.limit)

    @property
    def wanted(self) -> str:
        return "" if self.limit is None else f"{'<=' if self.at_most else '>='} {self.limit:g}"

    @property
    def measured(self) -> str:
        interval = "" if self.interval is None else f" ({self.interval[0]:.3g}, {self.interval[1]:.3g})"
        return f"{self.value:.3g}{interval}"


@dataclass(frozen=True)
class Target:
    """One promise, kept if all ``figures`` are as wanted; without figures nothing was measured."""

    what: str
    figures: tuple[Figure, ...]

    @property
    def verdict(self) -> str:
        return "not measured" if not self.figures else "yes" if all(each.is_met for each in self.figures) else "NO"


def lines(found: Iterable[Target]) -> list[list[str]]:
    """The targets as rows of a table, with a line for each figure."""
    rows = []
    for target in found:
        rows.append([target.what, "", "", target.verdict])
        for each in target.figures:
            met = "" if each.limit is None or each.is_met else "NO"
            rows.append([f"  {each.label}", each.measured, each.wanted, met])
    return rows


def figure(label: str, measured: float | Estimate, limit: float | None = None, *, at_most: bool = True) -> Figure:
    if isinstance(measured, dict):
        return Figure(label, measured["value"], (measured["low"], measured["high"]), limit, at_most)
    return Figure(label, measured, None, limit, at_most)


def inverse(found: Estimate) -> Estimate:
    return {"value": 1 / found["value"], "low": 1 / found["high"], "high": 1 / found["low"]}
