"""Jobs under a real Slurm of one node: deploy/slurm.sbatch, and srun with each MPI and without."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, refusal
from launching import python_of

SBATCH = Path(__file__).resolve().parents[2] / "deploy" / "slurm.sbatch"
SCRIPT = """
import sys, time
import numpy as np
import hvdlite
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import allreduce_async

hvdlite.init()
array = np.ones(1000, dtype=np.float32) * (hvdlite.rank() + 1)
view = TensorView.of_numpy(array)
allreduce_async(hvdlite.runtime().group, [view], [view]).wait()
mpi = "mpi4py.MPI" in sys.modules
sys.stdout.write(f"rank {hvdlite.rank()} of {hvdlite.size()}: {array.sum():g}, {'over' if mpi else 'without'} MPI\\n")
sys.stdout.flush()
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


def lines(how: str) -> list[str]:
    return [f"rank {rank} of 2: 3000, {how} MPI" for rank in range(2)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    reason = refusal()
    if reason:
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


class Job:
    """deploy/slurm.sbatch with ``words``, submitted in ``directory``."""

    def __init__(self, slurm: Cluster, directory: Path, *words: str) -> None:
        self._slurm = slurm
        options = ["--parsable", "--ntasks-per-node=2", str(SBATCH)]
        done = slurm.run("sbatch", *options, *words, cwd=directory, env={"VENV": sys.prefix})
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()
        self.output = directory / f"hvdlite-{self.number}.out"

    def state(self) -> str:
        """Slurm's word, and the exit status as ``status:signal``."""
        told = self._slurm.run("scontrol", "show", "job", self.number, "--oneliner").stdout
        words = dict(word.split("=", 1) for word in told.split() if "=" in word)
        return f"{words['JobState']} {words['ExitCode']}"

    def wait(self, limit_s: float = 60) -> str:
        """The last `state`."""
        deadline = time.monotonic() + limit_s
        while (state := self.state()).startswith(("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")):
            assert time.monotonic() < deadline, (state, self.text())
            time.sleep(0.1)
        return state

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


def test_the_batch_script(slurm: Cluster, script: str, tmp_path: Path) -> None:
    """Both as users wait for them: submitted together, run one after the other."""
    alone, over_mpi = Job(slurm, tmp_path, script), Job(slurm, tmp_path, "--mpi", script)
    for job, how in ((alone, "without"), (over_mpi, "over")):
        assert job.wait() == "COMPLETED 0:0", job.text()
        assert sorted(line for line in job.text().splitlines() if line.startswith("rank ")) == lines(how), job.text()
        assert "Slurm has given 2 ranks on 1 host" in job.text()


def test_a_job_that_slurm_ends_leaves_nothing(slurm: Cluster, script: str, tmp_path: Path) -> None:
    """TERM to the batch script alone is what --signal asks for."""
    job = Job(slurm, tmp_path, script, "600")
    while job.text().count("rank ") < 2:
        assert job.state().startswith(("PENDING", "RUNNING")), job.text()
        time.sleep(0.1)
    assert slurm.run("scancel", "--batch", "--signal=TERM", job.number).returncode == 0
    assert job.wait() == "FAILED 143:0", job.text()
    assert script not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(("mpi", "kind"), [("openmpi", "pmix"), ("mpich", "pmi2")])
def test_srun_with_an_mpi(slurm: Cluster, script: str, mpi: str, kind: str) -> None:
    python = python_of(mpi)
    if kind == "pmix" and "library" in slurm.run("srun", "--mpi=pmix", "true").stderr:
        pytest.skip("this Slurm finds no PMIx (Debian, Ubuntu: apt install libpmix-dev)")
    done = slurm.run("srun", "-n2", f"--mpi={kind}", python, script)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, lines("over")), done.stderr


def test_srun_without_an_mpi_is_explained(slurm: Cluster, script: str) -> None:
    done = slurm.run("srun", "-n2", "--mpi=none", sys.executable, script)
    assert done.returncode == 1
    assert "srun started 2 processes, but each is alone" in done.stderr
    assert "hvdliterun -np 2 python train.py" in done.stderr
