"""`hvdlite.run` and programs written for Horovod, with real ranks: results, failures, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvdlite
from launching import MARK, processes_with


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the environment of all processes of the job holds; at the end of the test there are none."""
    name, value = MARK, str(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield f"{name}={value}"
    deadline = time.monotonic() + 2
    while (left := processes_with(f"{name}={value}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == {}


def env(mark: str) -> dict[str, str]:
    return dict([mark.split("=", 1)])


def average(value: float) -> tuple[int, int, list[float]]:
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    print(f"rank {hvd.rank()} speaks")
    mean = hvd.allreduce(torch.full((2,), value * (hvd.rank() + 1)), name="mean")
    return hvd.rank(), hvd.size(), mean.tolist()


@pytest.mark.parametrize(
    ("hosts", "options"),
    [(None, []), ("localhost:2", []), ("localhost:2", ["--mpi"])],
    ids=["this machine", "by name", "by MPI"],
)
def test_results(mark: str, capsys: pytest.CaptureFixture[str], hosts: str | None, options: list[str]) -> None:
    assert hvdlite.run(average, (3.0,), num_proc=2, hosts=hosts, env=env(mark), options=options) == [
        (0, 2, [4.5, 4.5]),
        (1, 2, [4.5, 4.5]),
    ]
    output = capsys.readouterr().out
    assert output.count("rank 0 speaks") == output.count("rank 1 speaks") == 1


def test_tensors_come_back(mark: str) -> None:
    import torch

    def make() -> torch.Tensor:
        import hvdlite.torch as hvd

        hvd.init()
        return torch.arange(3) * hvd.rank()

    zeros, ones = hvdlite.run(make, num_proc=2, env=env(mark))
    assert zeros.tolist() == [0, 0, 0] and ones.tolist() == [0, 1, 2]


def test_an_exception_ends_the_job(mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        import torch

        import hvdlite.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("the loss is not a number")
        while True:
            hvd.allreduce_(torch.zeros(10), name="gradient")

    with pytest.raises(ValueError, match="the loss is not a number") as caught:
        hvdlite.run(fails, num_proc=2, env=env(mark))
    assert isinstance(caught.value.__cause__, hvdlite.RankFailedError)
    assert caught.value.__cause__.rank == 1
    assert "in fails" in str(caught.value.__cause__)
    assert "Traceback" not in capsys.readouterr().err  # which has a line of rank 0, that it has heard of it


def test_an_exception_is_raised_or_shown_not_both(mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(texts: tuple[str, str]) -> None:
        from hvdlite.launched import launched_rank

        raise ValueError(texts[launched_rank()])

    with pytest.raises(ValueError, match="alike"):
        hvdlite.run(fails, (("alike", "alike"),), num_proc=2, env=env(mark))
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="(first|second)") as caught:
        hvdlite.run(fails, (("the first", "the second"),), num_proc=2, env=env(mark))
    shown = capsys.readouterr().err
    assert shown.count("Traceback") <= 1  # none where the other rank was ended before it came so far
    assert f"ValueError: {caught.value}" not in shown


def test_an_exception_ends_ranks_that_do_not_communicate(mark: str) -> None:
    def fails() -> None:
        from hvdlite.launched import launched_rank

        if launched_rank() == 0:
            raise ValueError("at once")
        time.sleep(600)

    with pytest.raises(ValueError, match="at once"):
        hvdlite.run(fails, num_proc=2, env=env(mark))


def test_a_killed_rank(mark: str) -> None:
    def dies() -> None:
        import hvdlite

        hvdlite.init()
        if hvdlite.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(hvdlite.RankFailedError, match="rank"):
        hvdlite.run(dies, num_proc=2, env=env(mark))


CALLER = """
import pathlib, signal, sys, time
import hvdlite

def wait(directory):
    import hvdlite
    hvdlite.init()
    pathlib.Path(directory, str(hvdlite.rank())).touch()
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    hvdlite.run(wait, (sys.argv[1],), num_proc=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_caller_is_the_end_of_the_job(tmp_path: Path, mark: str, number: int) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    command = [sys.executable, str(script), str(ranks)]
    with subprocess.Popen(command, env={**os.environ, **env(mark)}, stderr=subprocess.PIPE, text=True) as caller:
        while len(list(ranks.iterdir())) < 2:
            assert caller.poll() is None
            time.sleep(0.01)
        caller.send_signal(number)
        if number == signal.SIGINT:
            assert caller.stderr is not None
            assert caller.wait(30) != 0
            assert "KeyboardInterrupt" in caller.stderr.read()
        else:
            caller.kill()
            deadline = time.monotonic() + 15
            while processes_with(mark) and time.monotonic() < deadline:
                time.sleep(0.05)


HOROVOD = """
import sys
import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import gloo_built, mpi_built
from horovod.torch.mpi_ops import allreduce_async_, synchronize

hvd.init()
assert hvd.mpi_built() and hvd.mpi_threads_supported() and not gloo_built()
assert hvd.mpi_enabled() == (sys.argv[2] == "by MPI")
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(hvd.rank() + step))).mean().backward()
    optimizer.step()
weights = hvd.allgather(model.weight.detach(), name="weights")
assert torch.equal(weights[0], weights[1])
total = torch.ones(3)
assert synchronize(allreduce_async_(total, op=hvd.Sum)).tolist() == [2.0] * 3
try:
    hvd.allreduce(torch.ones(1 + hvd.rank()), name="uneven")
except HorovodInternalError:
    print(f"{sys.argv[1]} of {hvd.size()}", flush=True)
"""


def start(*words: str, mark: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m hvdlite`` with ``words`` to its end."""
    command = [sys.executable, "-m", "hvdlite", *words]
    environ = {**os.environ, **env(mark)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("way", "options"), [("without MPI", []), pytest.param("by MPI", ["--mpi"], marks=pytest.mark.thorough)]
)
def test_an_unedited_program_for_horovod(tmp_path: Path, mark: str, way: str, options: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOROVOD)
    program = [sys.executable, "-m", "hvdlite", "horovod", str(script), "ready", way]
    assert start("run", "-np", "2", *options, *program, mark=mark).stdout.count("ready of 2") == 2


def test_an_unedited_test_file_for_horovod(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        "import horovod.torch as hvd\ndef test_it():\n    hvd.init()\n"
        "    assert hvd.allgather_object(hvd.rank()) == [0, 1]\n"
    )
    program = [sys.executable, "-m", "hvdlite", "horovod", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    assert start("run", "-np", "2", *program, mark=mark).stdout.count("1 passed") == 2


FROM_HOROVOD = """
import horovod

def function(word):
    import horovod.torch as hvd
    hvd.init()
    return f"{word} {hvd.rank()} {horovod.__version__}"

if __name__ == "__main__":
    print(horovod.run(function, args=("rank",), num_proc=2, use_mpi=True))
"""


def test_horovod_run(tmp_path: Path, mark: str) -> None:
    script = tmp_path / "driver.py"
    script.write_text(FROM_HOROVOD)
    said = start("horovod", str(script), mark=mark).stdout
    assert "['rank 0 0.28" in said and "'rank 1 0.28" in said
