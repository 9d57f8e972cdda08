"""The programs of docs/integrations.md run as they stand there, and arrive."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from launching import launch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
PROGRAMS = {
    re.search(r"from hvdlite\.(?:integrations\.)?(\w+) import", text)[1]: text  # type: ignore[index]
    for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
}


@pytest.mark.parametrize(
    ("library", "ranks", "answer"),
    [
        ("lightning", 2, r"y = 3\.00 x \+ 1\.00\n"),
        ("lightning", 1, r"y = 3\.00 x \+ 1\.00\n"),
        ("transformers", 2, r"loss [01]\.\d\d\n"),  # ln(32) = 3.5 knows nothing
        ("accelerate", 2, r"y = 3\.00 x \+ 1\.00\n"),
    ],
)
def test_a_program_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, ranks: int, answer: str
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'hvdlite[lightning,transformers]'")
    monkeypatch.chdir(tmp_path)
    first, *others = launch(ranks, PROGRAMS[library], timeout=240).check().ranks
    assert re.search(answer, first.stdout), first
    assert not any(other.stdout for other in others)


def test_the_program_for_ray(tmp_path: Path, ray_environ: dict[str, str]) -> None:
    script = tmp_path / "on_ray.py"
    script.write_text(PROGRAMS["ray"])
    done = subprocess.run([sys.executable, script], env=ray_environ, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("y = 3.00 x + 1.00\n"), done


def test_every_program_of_the_page_is_tested() -> None:
    assert sorted(PROGRAMS) == ["accelerate", "lightning", "ray", "transformers"]
