"""What a reader meets who follows one step through the code: calls, functions, files, and changes of file.

    hvdliterun -np 2 benchmarks/walk.py            # --list prints every call; --json=FILE writes the counts

One node, one bucket, an order that has been frozen: what rank 0 calls inside hvdlite from `backward()` to the end of
`zero_grad()`, on all its threads, in steady state. The median of many steps, as what a wait does depends on timing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.version import __version__

PACKAGE = str(Path(hvd.__file__).resolve().parents[1])
WARM_UP_STEPS = 40
STEPS = 101
PAUSE_S = 5e-3


def calls_during(work: Callable[[], None]) -> list[CodeType]:
    """Every call of a function of hvdlite while ``work()`` runs, in order, on any thread."""
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code)

    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else sys.setprofile(note)
    try:
        work()
    finally:
        threading.setprofile_all_threads(None) if sys.version_info >= (3, 12) else sys.setprofile(None)
    return calls


def counts(calls: list[CodeType]) -> dict[str, int]:
    files = [code.co_filename for code in calls]
    return {
        "calls": len(calls),
        "functions": len({(code.co_filename, code.co_firstlineno) for code in calls}),
        "files": len(set(files)),
        "changes of file": sum(a != b for a, b in itertools.pairwise(files)),
    }


def train_step() -> Callable[[], None]:
    """A step of a model whose gradients fill one bucket: large ones, and small ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    x = torch.randn(8, 128)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the calls of one step")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    step = train_step()
    walks = []
    for number in range(WARM_UP_STEPS + STEPS):
        hvd.barrier()  # which is not part of it: rank 0 begins last, so that it never waits for the others
        time.sleep(PAUSE_S * (hvd.rank() == 0))
        calls = calls_during(step)
        if number >= WARM_UP_STEPS:
            walks.append(calls)
    assert hvd.statistics()["plans"] > 0, "the order has not been frozen"
    if hvd.rank() == 0:
        found = [counts(calls) for calls in walks]
        result = {name: int(median(walk[name] for walk in found)) for name in found[0]}
        typical = next(calls for calls, walk in zip(walks, found, strict=True) if walk["calls"] == result["calls"])
        if options.list:
            for code in typical:
                print(f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_name}")
        print(", ".join(f"{count} {name}" for name, count in result.items()))
        if options.json:
            options.json.write_text(json.dumps({"hvdlite": __version__, "ranks": hvd.size(), **result}) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
