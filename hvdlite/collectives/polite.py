"""How long ranks look for messages of others before they leave them the core."""

from __future__ import annotations

from hvdlite import _native

_LONGEST_US = 200  # a reply over a network comes within this, and so does one from a rank that wakes from a nap
_BUSY_US = 1000  # who gets the core back later than this has offered it to somebody who computes
_COURTESY_US = 50_000  # for so long nobody looks on then: an offer takes milliseconds, the end of a nap does not


def polite_look() -> _native.PoliteLook:
    """One that remembers when the core was busy."""
    return _native.PoliteLook(_LONGEST_US, _BUSY_US, _COURTESY_US)
