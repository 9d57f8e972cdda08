"""`python -m hvdlite run` by an mpirun: what it runs, and how it ends what it started."""

from __future__ import annotations

import mmap
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from hvdlite.cli import run
from hvdlite.cli.job import Command, Launch
from hvdlite.cli.rank_words import RankWords
from hvdlite.mpi import INTEL_SHARED_FILES, MPICH_SHARED_FILES
from hvdlite.recovery.keeper import Word
from run_lab import OPEN_MPI_5, PROGRAM, TWO_HOSTS, executable, gone


class TestRunning:
    """With a shell script in mpirun's place."""

    def start(self, mpirun: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "hvdlite", "run", "--mpirun", str(mpirun), "-np", "2", *words, "train.py"]
        environ = {**os.environ, **variables}
        return subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,
        )

    def status_of(self, mpirun: Path) -> int:
        with self.start(mpirun) as job:
            job.communicate(timeout=60)
        return job.returncode

    def mpirun(self, tmp_path: Path, script: str) -> Path:
        return executable(
            tmp_path / "mpirun", f'[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit\n{script}'
        )

    def test_prints_what_it_runs(self, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        job = self.start(self.mpirun(tmp_path, f"touch {marker}"), "--dry-run", "--tag-output")
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 0
        assert f"{tmp_path}/mpirun" in errors and f"--tag-output {sys.executable} train.py" in errors
        assert "OMP_NUM_THREADS=" in errors
        assert not marker.exists()

    @pytest.mark.parametrize(
        ("options", "given", "shown"),
        [
            (["--elastic"], {}, "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS=6 "),
            (["--elastic"], {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "20"}, ""),
            ([], {}, ""),
        ],
    )
    def test_elastic_jobs_have_shorter_heartbeats(
        self, tmp_path: Path, options: list[str], given: dict[str, str], shown: str
    ) -> None:
        job = self.start(self.mpirun(tmp_path, "true"), "--dry-run", *options, **given)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 0, errors
        assert (shown or "+ ") in errors and ("HEARTBEAT" in errors) is bool(shown), errors

    @pytest.mark.parametrize("options", [[], ["--elastic"], ["--elastic", "-H", "a:1,b:1"]])
    def test_it_is_said_where_an_elastic_job_keeps_no_commits(self, tmp_path: Path, options: list[str]) -> None:
        job = self.start(
            self.mpirun(tmp_path, "true"),
            *["--dry-run", *options],
            SLURM_JOB_NODELIST="a,b",
            SLURM_TASKS_PER_NODE="1(x2)",
        )
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 0, errors
        assert ("keeps no commit" in errors) is (options == ["--elastic"]), errors

    def test_runs_the_line_that_it_printed(self, tmp_path: Path) -> None:
        job = self.start(
            self.mpirun(
                tmp_path, 'echo "OMP_NUM_THREADS=$OMP_NUM_THREADS"; for word in "$0" "$@"; do echo "$word"; done'
            )
        )
        output, errors = job.communicate(timeout=60)
        printed = shlex.split(errors.splitlines()[-1])
        words = [word for word in printed[1:] if not word.startswith("OMP_NUM_THREADS=")]
        assert output.splitlines()[1:] == words
        assert output.splitlines()[0] in (*printed, f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")

    @pytest.mark.parametrize("status", [0, 1, 7, 137])
    def test_passes_the_exit_status_on(self, tmp_path: Path, status: int) -> None:
        assert self.status_of(self.mpirun(tmp_path, f"exit {status}")) == status

    def test_signal_becomes_a_shells_status(self, tmp_path: Path) -> None:
        assert self.status_of(self.mpirun(tmp_path, "kill -9 $$")) == 137

    def test_a_lost_host_is_a_failure(self, tmp_path: Path) -> None:
        halves = "printf 'PRTE has lost communi' >&2; sleep 0.1; echo 'cation with a remote daemon.' >&2"
        lost = f"echo before; {halves}; exit 0"
        job = self.start(self.mpirun(tmp_path, lost), "-H", "a,b")
        output, errors = job.communicate(timeout=60)
        assert job.returncode == 1
        assert output == "before\n"
        assert "PRTE has lost communication with a remote daemon.\nhvdlite run: failed" in errors

    def test_a_host_that_ssh_does_not_know_is_named(self, tmp_path: Path) -> None:
        job = self.start(self.mpirun(tmp_path, "exit 255"), "-H", "localhost,no-such-host.invalid")
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 1
        assert "hvdlite run: ended: no rank has started" in errors and "no-such-host.invalid: this name" in errors

    @pytest.mark.parametrize("hosts", [[], ["-H", "a,b"]], ids=["one host", "two hosts"])
    @pytest.mark.parametrize("fails", [1, 2])
    def test_what_could_not_listen_is_started_once_more(self, tmp_path: Path, fails: int, hosts: list[str]) -> None:
        tries = tmp_path / "tries"
        path = self.mpirun(tmp_path, f"echo >>{tries}; [ $(wc -l <{tries}) -gt {fails} ] || exit 213; exit 7")
        job = self.start(path, *hosts)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == (7 if fails == 1 else 213)
        assert errors.count("tries once more") == 1
        assert len(tries.read_text()) == 2

    @pytest.mark.parametrize(("word", "meant"), [("--restart=3", "--restarts"), ("--elastik", "--elastic")])
    def test_an_option_that_is_nearly_one_of_ours_is_named_where_mpirun_takes_none(
        self, tmp_path: Path, word: str, meant: str
    ) -> None:
        tries = tmp_path / "tries"
        job = self.start(self.mpirun(tmp_path, f"echo >>{tries}; exit 213"), word)
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 213
        assert f"is {meant} meant?" in errors and "once more" not in errors
        assert len(tries.read_text()) == 1

    def test_a_named_interface_may_be_why_nothing_listens(self, tmp_path: Path) -> None:
        job = self.start(self.mpirun(tmp_path, "exit 213"), "-H", "a,b", "--network-interfaces", "lo")
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 213
        assert "perhaps a host has no interface lo: mpirun's daemon ends there then." in errors

    @pytest.mark.parametrize("hosts", [[], ["-H", "a,b"]], ids=["one host", "two hosts"])
    def test_a_program_of_that_exit_status_is_not(
        self, tmp_path: Path, hosts: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HVDLITE_START_TIMEOUT", "3")
        tries = tmp_path / "tries"
        job = self.start(self.mpirun(tmp_path, f"echo >>{tries}; sleep 1.1; exit 213"), *hosts)
        job.communicate(timeout=60)
        assert job.returncode == 213
        assert len(tries.read_text()) == 1

    @pytest.mark.parametrize(("is_over", "status"), [(False, 1), (True, 0)])
    def test_a_host_lost_on_the_way_to_the_end_is_no_failure(self, is_over: bool, status: int, tmp_path: Path) -> None:
        """They have gone on without it."""
        lost = executable(tmp_path / "mpirun", "echo PRTE has lost communication with a remote daemon. >&2")
        words = RankWords(least=1, silence_s=60.0, grace_s=60.0)
        words.hear(Word.AT_WORK, 1)
        if is_over:
            words.hear(Word.AT_WORK, 0)
        launch = Launch(PROGRAM, 4, TWO_HOSTS, goes_on=True)
        command = Command([str(lost)], {}, [])
        assert run._run_mpirun(OPEN_MPI_5, launch, command, {**os.environ}, words=words) == status

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
    def test_an_interruption_ends_everything(self, tmp_path: Path, number: int, status: int) -> None:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # these tests run under nohup, which children inherit
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        # An orphan in a session of its own, as mpirun's daemons are.
        pids = tmp_path / "pids"
        script = f"setsid sh -c 'sleep 60 & echo $! $$ >{pids}.new; mv {pids}.new {pids}; wait' & echo up; wait"
        job = self.start(self.mpirun(tmp_path, script))
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        while not pids.exists():
            time.sleep(0.01)
        start = time.monotonic()
        job.send_signal(number)
        job.communicate(timeout=30)
        assert job.returncode == status
        assert time.monotonic() - start < 4
        assert gone(pids)

    def test_nohup_is_respected(self, tmp_path: Path) -> None:
        mpirun = self.mpirun(tmp_path, "echo up; sleep 1; echo done")
        command = ["nohup", sys.executable, "-m", "hvdlite", "run", "--mpirun", str(mpirun), "-np", "1", "train.py"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/") as job:
            assert job.stdout is not None
            assert job.stdout.readline() == "up\n"
            job.send_signal(signal.SIGHUP)
            assert job.communicate(timeout=30)[0] == "done\n"
        assert job.returncode == 0

    def test_what_ignores_term_is_killed(self, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        script = f"trap '' TERM INT; echo $$ >{pids}; echo up; while :; do sleep 1; done"
        job = self.start(self.mpirun(tmp_path, script))
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        start = time.monotonic()
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=30)
        assert job.returncode == 130
        assert 4.5 < time.monotonic() - start < 15
        assert gone(pids)

    def test_a_second_interruption_does_not_wait(self, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        job = self.start(
            self.mpirun(tmp_path, f"trap '' TERM INT; echo $$ >{pids}; echo up; while :; do sleep 1; done")
        )
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        start = time.monotonic()
        job.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals at once would be one
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=30)
        assert time.monotonic() - start < 4
        assert gone(pids)


class Gone:
    """A file of another job's, which has ended between two looks."""

    name = path = "mpich_shm_of_another_job"

    def stat(self) -> os.stat_result:
        raise FileNotFoundError


@pytest.mark.parametrize("found", [[Gone()], FileNotFoundError("/dev/shm")], ids=["gone", "no /dev/shm"])
def test_files_in_shared_memory_that_are_not_there_are_no_error(
    found: list[Gone] | OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scandir(path: str) -> list[Gone]:
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(os, "scandir", scandir)
    run._remove_shared_memory(0.0)


@pytest.mark.parametrize("prefix", [MPICH_SHARED_FILES, INTEL_SHARED_FILES])
def test_shared_memory_is_removed_unless_a_process_has_it(prefix: str) -> None:
    started = time.time() - 1.0  # the clock of files is coarse
    with ExitStack() as on_end:
        files = [on_end.enter_context(NamedTemporaryFile(prefix=prefix, dir="/dev/shm", delete=False)) for _ in "ab"]
        for file in files:
            on_end.callback(Path(file.name).unlink, missing_ok=True)
            file.truncate(1)
        of_another_job, left = files
        with mmap.mmap(of_another_job.fileno(), 1):
            run._remove_shared_memory(started)
            assert [Path(file.name).exists() for file in (of_another_job, left)] == [True, False]
