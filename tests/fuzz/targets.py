"""Every parser of bytes that come from elsewhere, as a function of bytes: it returns where it took them or refused them
in its own words, and raises where it did neither.

A target has seeds, valid inputs that show a fuzzer the way in. Inputs that once made a target raise are files of
cases/<target>.
"""

from __future__ import annotations

from pathlib import Path

import targets_of_files
import targets_of_launch
import targets_of_ranks

CASES = Path(__file__).resolve().parent / "cases"
TARGETS = {**targets_of_ranks.TARGETS, **targets_of_launch.TARGETS, **targets_of_files.TARGETS}


def cases(name: str) -> list[bytes]:
    """What once made target ``name`` raise."""
    return [path.read_bytes() for path in sorted(CASES.glob(f"{name}/*"))]
