"""Pictures of reports; benchmarks/plots.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install hvdlite[benchmarks]")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from plots import apart, draw_all  # noqa: E402 (the lines above make it importable)


def test_labels_are_moved_as_little_as_it_takes() -> None:
    assert apart([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert apart([0.52, 0.1, 0.5, 0.51], 0.1) == pytest.approx([0.61, 0.1, 0.41, 0.51])
    assert apart([0.3, 0.45, 0.46], 0.1) == pytest.approx([0.3, 0.405, 0.505])
    assert apart([0.32, 0.45, 0.46], 0.1) == pytest.approx([0.31, 0.41, 0.51])
    assert apart([], 0.1) == []


def test_every_kind_of_report_is_drawn(tmp_path: Path) -> None:
    """The reports of the last measurement, and what is drawn of them, both in small files."""
    for path in (BENCHMARKS / "results").glob("*.json"):
        report = json.loads(path.read_text())
        (tmp_path / path.name).write_text(json.dumps(report))
    drawn = draw_all(tmp_path)
    assert [path.name for path in drawn] == ["allreduce.png", "train_step.png", "scale_model.png"]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 10_000 < path.stat().st_size < 150_000


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert draw_all(tmp_path) == []
