"""What may be tuned while a job runs, and which values are worth a try."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from hvdlite.collectives.thresholds import limits_of
from hvdlite.config import Tunable

_BUCKET_FACTORS = (1 / 16, 1 / 4, 1, 4, 16)  # of the default; factors of 2 mostly differ by less than the noise
_MESSAGE_FACTORS = (1 / 4, 1, 4, 16)


@dataclass(frozen=True)
class Space:
    """All that could be chosen for one job.

    Attributes:
        nodes: of the job.
        most_rails: ranks that the smallest node has.
        bucket_sizes: bytes of every bucket, by bucket_bytes.
    """

    default: Tunable
    nodes: int
    most_rails: int
    bucket_sizes: Callable[[int], tuple[int, ...]]

    def ladders(self) -> dict[str, tuple[int, ...]]:
        """The values of each setting from little to much, the default's among them; what matters most comes first."""

        def scaled(value: int, factors: tuple[float, ...]) -> tuple[int, ...]:
            return tuple(sorted({max(1, int(value * factor)) if factor != 1 else value for factor in factors}))

        found = {"bucket_bytes": scaled(self.default.bucket_bytes, _BUCKET_FACTORS)}
        if self.nodes > 1:
            rails = {1, max(1, self.most_rails // 2), 0, self.default.rails}
            found["rails"] = tuple(sorted(rails, key=lambda count: count or self.most_rails + 1))
            found["segment_bytes"] = scaled(self.default.segment_bytes, _MESSAGE_FACTORS)
            found["small_bytes"] = scaled(self.default.small_bytes, _MESSAGE_FACTORS)
        return found

    def effect(self, settings: Tunable) -> Hashable:
        """What settings come to: those with equal effects need no comparison."""
        sizes = self.bucket_sizes(settings.bucket_bytes)
        if self.nodes == 1:
            return sizes
        rails = min(settings.rails or self.most_rails, self.most_rails)
        shares = tuple(size if size <= settings.small_bytes else size // rails for size in sizes)
        limits = limits_of(settings.small_bytes, self.nodes)
        return sizes, rails, settings.segment_bytes, tuple(limits.algorithm(share) for share in shares), shares
