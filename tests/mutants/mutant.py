"""A line that is wrong on purpose, and the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """``line`` of ``path``, which is there once, becomes ``wrong``.

    Attributes:
        tests: files below tests/ and options of pytest, before them the number of ranks for those under mpirun.
    """

    path: str
    line: str
    wrong: str
    tests: str
