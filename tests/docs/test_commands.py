"""Every command that stands on a page runs as printed, or there is a reason here why it cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blocks import ROOT, Block, blocks_of, pages
from hvdlite.autotune.log import _COLUMNS

# Fences without a word are commands too; "layers" is read by tests/unit/test_layers.py, diagrams by test_site.py.
ALL = [block for page in pages() for block in blocks_of(page) if block.language in ("", "sh", "console")]
TEXTS = [block for page in pages() for block in blocks_of(page) if block.language == "text"]

_INSTALLS = "installs, for minutes; tests/newcomer.py runs it in a clean clone"
# By page, and how the block begins.
NOT_HERE = {
    ("README.md", "python3 examples/quickstart.py"): _INSTALLS,
    ("README.md", "python3 -m venv mine"): _INSTALLS,
    ("README.md", "python3 tests/run.py"): "these are its tests",
    ("docs/start.md", "python3 examples/quickstart.py"): _INSTALLS,
    ("docs/start.md", "python3 -m venv mine"): _INSTALLS,
    ("docs/launching.md", "mpirun -np 4 --host a:2,b:2"): "there are no hosts a and b; tests/hosts launches on several",
    ("docs/launching.md", "#!/bin/bash\n#SBATCH"): "tests/slurm runs deploy/slurm.sbatch, which is the same and more",
    ("docs/launching.md", "docker "): "needs Docker",
    ("docs/launching.md", "apptainer "): "needs Apptainer",
    ("docs/gpu.md", "OUT=results bash tests/gpu/run.sh"): "needs a GPU; tests/examples/test_gpu_run.py runs it on none",
}
OTHER_HOSTS = re.compile(r"hvdliterun (?=.*-H \w+:\d)")
# The program that a page's commands call train.py: the first one of a page.
_OWN = ("docs/elastic.md", "docs/torch-distributed.md")
TRAIN = {"README.md": "docs/from-horovod.md", **{page: page for page in _OWN}}


def key(block: Block) -> tuple[str, str] | None:
    """That of `NOT_HERE` which says why ``block`` does not run here."""
    return next((k for k in NOT_HERE if block.page == k[0] and block.text.startswith(k[1])), None)


def different(blocks: list[Block]) -> list[Block]:
    """Without those whose commands another page has as well."""
    return list({(TRAIN.get(block.page), block.text): block for block in blocks}.values())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that looks like a checkout after the quickstart."""
    for name in ("examples", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.parametrize("block", different([block for block in ALL if key(block) is None]), ids=str)
def test_runs(block: Block, place: Path) -> None:
    page = TRAIN.get(block.page, "docs/start.md")
    program = next(other for other in blocks_of(ROOT / page) if other.language == "python")
    (place / "train.py").write_text(program.text)
    commands = OTHER_HOSTS.sub("hvdliterun --dry-run ", block.commands)  # up to the start of ranks there
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=place,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,  # with what other suites leave of the processors
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if block.language == "console":  # in whatever order ranks speak
        assert sorted(done.stdout.splitlines()) == sorted(block.output)


@pytest.mark.parametrize("block", [block for block in ALL if key(block) is not None], ids=str)
def test_is_shell(block: Block) -> None:
    """What cannot run is read by bash, and names programs of this repository that exist."""
    subprocess.run(["bash", "-n", "-c", block.commands], check=True, timeout=10)
    for path in re.findall(r"\b(?:examples|tests|benchmarks)/[\w/]+\.\w+", block.commands):
        assert (ROOT / path).exists(), path


def test_reasons_are_of_blocks_that_exist() -> None:
    assert {key(block) for block in ALL} - {None} == NOT_HERE.keys()


def test_text_is_what_hvdlite_writes() -> None:
    (columns,) = TEXTS
    assert columns.text.strip() == ",".join(_COLUMNS)
