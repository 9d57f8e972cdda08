"""Each mutant of tests/mutants changes a line that is there, and once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mutants"))

from every import MUTANTS
from mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted({mutant.path for mutant in MUTANTS}))
def test_lines_are_there_once(path: str) -> None:
    text = (ROOT / path).read_text()
    own: list[Mutant] = [mutant for mutant in MUTANTS if mutant.path == path]
    assert [mutant.line for mutant in own if text.count(mutant.line) != 1 or mutant.line == mutant.wrong] == []
