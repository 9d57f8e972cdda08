"""`hvdliterun --restarts`: a job that fails is started again, or in an elastic one its only rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.timeline.trace_file import read_trace
from launching import launch

FAILS_TWICE = """
import pathlib, sys
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
sys.exit(0 if len(tries.read_text()) == 3 else 3)
"""


def test_the_only_rank_is_replaced_before_it_begins(tmp_path: Path) -> None:
    options = ["--elastic", "--restarts", "2"]
    result = launch(1, FAILS_TWICE, str(tmp_path / "tries"), mpi="none", options=options).check()
    assert result.launcher_output.count("ended with exit status 3") == 2


@pytest.mark.parametrize("mpi", ["none", pytest.param("mpirun", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("restarts", "status"), [(1, 3), (2, 0), (5, 0)])
def test_a_job_that_fails_is_started_again(mpi: str, restarts: int, status: int, tmp_path: Path) -> None:
    options = ["--restarts", str(restarts), *(["--mpi"] if mpi == "mpirun" else [])]
    result = launch(1, FAILS_TWICE, str(tmp_path / "tries"), mpi="none", options=options)
    assert result.returncode == status, result
    assert len((tmp_path / "tries").read_text()) == min(restarts, 2) + 1
    assert f"starts the job again (1 of {restarts} times)" in result.launcher_output


KILLED_ONCE = """
import os, pathlib, signal, sys
import torch
import hvdlite.torch as hvd

hvd.init()
own = pathlib.Path(sys.argv[1], f"rank{hvd.rank()}")
is_first = not own.exists()
with own.open("a") as starts:
    starts.write(f"{os.getpid()} ")
hvd.barrier()
if is_first and hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
"""


@pytest.mark.parametrize("mpi", ["none", pytest.param("mpirun", marks=pytest.mark.thorough)])
def test_all_ranks_are_started_again(mpi: str, tmp_path: Path) -> None:
    options = ["--restarts", "3", *(["--mpi"] if mpi == "mpirun" else [])]
    settings = {"HVDLITE_TIMELINE": str(tmp_path / "trace.json")}
    result = launch(2, KILLED_ONCE, str(tmp_path), mpi="none", options=options, env=settings, timeout=120).check()
    starts = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(2)]
    assert [len(pids) for pids in starts] == [2, 2] and len({*starts[0], *starts[1]}) == 4, result
    assert result.launcher_output.count("starts the job again") == 1, result
    assert result.stdout == "sum 2.0\n" * 2
    assert all(read_trace(str(tmp_path / name))["traceEvents"] for name in ("trace.json", "trace.start2.json"))
