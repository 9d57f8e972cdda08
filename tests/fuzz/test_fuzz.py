"""Every parser takes or refuses what comes from elsewhere: seeds, what once went wrong, what Atheris finds."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import hvdlite
from launching import files_in
from targets import TARGETS, cases
from targets_of_files import directory_in_memory

SECONDS = 2
LONG_SECONDS = 20
HAVE_LONG = 3  # so many targets in each run
PARTS = 2  # of the targets: each imports what they need once, which takes as long as it looks for mistakes
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_once_went_wrong(name: str) -> None:
    target = TARGETS[name]
    for data in [b"", *target.seeds, *cases(name)]:
        target.take(data)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_with_mistakes(name: str) -> None:
    """The same inputs every time: bytes that are changed, left out, doubled, or come from another seed."""
    generator = random.Random(name)
    target = TARGETS[name]
    for _ in range(100):
        data = bytearray(generator.choice(target.seeds))
        for _ in range(generator.randrange(1, 4)):
            at = generator.randrange(len(data) + 1)
            end = min(len(data), at + generator.choice([1, 1, 4, 20]))
            new = [generator.randbytes(end - at), b"", bytes(data[at:end]) * 2, b"\xff" * 8, b"\0" * 4]
            data[at:end] = generator.choice(new)
        target.take(bytes(data))


def test_directories_are_not_taken_for_what_a_job_has_left() -> None:
    """Tests of jobs run at the same time, and a target that gets little of the processors has its own for seconds."""
    with directory_in_memory() as directory:
        assert directory not in files_in([str(Path(directory).parent)])


@pytest.mark.skipif(find_spec("atheris") is None, reason="Atheris is not installed (pip install '.[fuzz]')")
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["in turn", "all"])
@pytest.mark.parametrize("part", range(PARTS))
def test_atheris_finds_nothing(part: int, is_long: bool, tmp_path: Path) -> None:
    own = [*TARGETS][part::PARTS]
    have_long = own if is_long else [name for name in own if name in in_turn()]
    words = [f"{name}:{LONG_SECONDS}" if name in have_long else name for name in own]
    command = [sys.executable, str(HERE / "fuzz.py"), ",".join(words), str(SECONDS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.glob("*/*") if path.is_file()}
    assert done.returncode == 0, f"{done.stderr[-4000:]}\n{found}"


def in_turn() -> list[str]:
    """Targets that have more time: the same in every run of one commit, and others once a line of hvdlite's changes."""
    package = Path(hvdlite.__file__).parent
    lines = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    first = zlib.crc32(lines) % len(TARGETS)
    return ([*TARGETS] * 2)[first : first + HAVE_LONG]
