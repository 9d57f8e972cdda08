"""Every Python program and piece of one that stands on a page runs: here on two ranks, or where it is quoted from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from blocks import ROOT, Block, blocks_of, pages
from launching import Result

Launch = Callable[..., Result]

ALL = [block for page in pages() for block in blocks_of(page) if block.language == "python"]
EXAMPLES = [path.read_text() for path in sorted(ROOT.glob("examples/**/*.py"))]
ELSEWHERE = {
    "docs/integrations.md": "tests/integrations/test_page.py runs them, where the libraries are installed",
    "docs/from-horovod.md": "tests/unit/test_pages.py runs it, as Horovod's and as hvdlite's",
    "docs/gpu.md": "needs a GPU; examples/07_cuda.py has these lines in a whole program",
}
ALONE = ("docs/launching.md",)  # a program that starts ranks

_PLAIN = """
import torch
import hvdlite.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
"""
_MODEL = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
# What the pieces of a page take for granted.
BEFORE = {
    "README.md": _PLAIN
    + """
Net = lambda: torch.nn.Linear(1, 1)
loss = torch.nn.functional.mse_loss
loader = [(x, 3 * x + 1) for x in torch.rand(100, 32, 1)]
""",
    "docs/seeing.md": _PLAIN
    + """
loader = range(101)
train = lambda batch: hvd.allreduce(torch.ones(1), name="gradient")
""",
    "docs/statistics.md": _PLAIN
    + """
train_one_epoch = lambda: hvd.allreduce(torch.ones(1000), name="gradient")
""",
    "docs/tensor_parallel.md": _PLAIN
    + _MODEL
    + """
import functools
torch.manual_seed(0)  # the ranks of a team have the same batch
x = torch.rand(8, 1024)
shapes = {"qkv": (8, 24), "out": (8, 8), "up": (8, 32), "down": (32, 8)}
layer = lambda: torch.nn.ModuleDict({name: torch.nn.Linear(*shape) for name, shape in shapes.items()})
model = torch.nn.ModuleDict(
    {"embedding": torch.nn.Embedding(10, 8), "blocks": torch.nn.ModuleList([layer()]), "head": torch.nn.Linear(8, 10)}
)
""",
}
# What they have come to in the end.
AFTER = {
    "README.md": "assert hvd.size() == 2 and abs(model.weight.item() - 3) < 0.5",
    "docs/elastic.md": "assert state.batch == 100 and (hvd.rank() > 0 or torch.load(FILE)['batch'] == 100)",
    "docs/seeing.md": "hvd.barrier(); assert os.listdir(f'runs/rank{hvd.rank()}')",
    "docs/start.md": "assert abs(model.weight[0, 0].item() - 3) < 0.1",
    "docs/statistics.md": "assert after['submissions'] - before['submissions'] == 1",
    "docs/tensor_parallel.md": "assert y.shape == (8, 1024) and model.blocks[0].up.weight.shape[0] == 16",
}
# Each page has variables of its own; hvdlite starts anew for each.
DRIVER = """
import json, os, sys
import hvdlite.torch as hvd
for page, pieces in json.load(open(sys.argv[1])):
    names = {"__name__": "__main__", "os": os}
    for where, text in pieces:
        exec(compile(text, where, "exec"), names)
        if int(os.environ["HVDLITE_RANK"]) == 0:
            print("done:", where, flush=True)
    hvd.shutdown()
"""


def quoted(block: Block) -> bool:
    """Whether it stands in a program of examples/, which tests/examples runs."""
    return any(textwrap.indent(block.text, " " * depth) in text for text in EXAMPLES for depth in (0, 4, 8))


HERE = [block for block in ALL if block.page not in ELSEWHERE and block.page not in ALONE and not quoted(block)]


def test_on_two_ranks(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_page = {page: [block for block in HERE if block.page == page] for page in sorted({b.page for b in HERE})}
    jobs = []
    for page, blocks in by_page.items():
        pieces = [(f"what {page} takes for granted", BEFORE.get(page, "")), *((str(b), b.text) for b in blocks)]
        jobs.append((page, [*pieces, (f"what {page} has come to", AFTER.get(page, ""))]))
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    monkeypatch.chdir(tmp_path)
    said = launch(2, DRIVER, str(tmp_path / "jobs.json"), mpi="none", timeout=240).check().ranks[0].stdout
    assert [block for block in HERE if f"done: {block}\n" not in said] == []


@pytest.mark.parametrize("block", [block for block in ALL if block.page in ALONE], ids=str)
def test_alone(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(block.text)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    promised = [line.rpartition("# ")[2] for line in block.text.splitlines() if line.startswith("print(")]
    assert promised and done.stdout.splitlines() == promised


def test_lists_have_nothing_that_is_gone() -> None:
    left = {block.page for block in ALL}
    assert {*ELSEWHERE, *ALONE} <= left
    assert {*BEFORE, *AFTER} <= {block.page for block in HERE}
