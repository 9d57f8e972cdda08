"""`python -m hvdlite run`: what it understands, and ranks that it starts itself."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run_lab
from hvdlite.cli import run
from hvdlite.cli.arguments import parse
from hvdlite.cli.job import Host, is_read_from_stdin, is_this_machine, parse_hosts, read_hostfile
from hvdlite.errors import ConfigError
from hvdlite.version import __version__
from run_lab import executable, gone, says

machine = run_lab.machine

OPTIONS_TO_SSH = ("-oProxyCommand=x", "a,-x:2", "u@-oX", "$(x)")


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
        ("words", "expected"),
        [
            ("python", True),
            ("/usr/bin/python3.12 -W ignore -Xdev -X importtime -u - 3", True),
            ("python -u train.py -", False),
            ("python -W ignore train.py", False),
            ("python -Wonce", True),
            ("python -uc pass", False),
            ("python -m train", False),
            ("python --version", False),
            ("sh", False),
        ],
    )
    def test_which_programs_are_read_from_stdin(self, words: str, expected: bool) -> None:
        assert is_read_from_stdin(words.split()) == expected

    @pytest.mark.parametrize("text", ["gpu:1,east:3,localhost:2", "127.0.0.1:2,east:3,gpu.lab:1", "gpu:2,gpu:1,east:3"])
    def test_this_machine_by_several_names_is_one_host(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: "gpu")
        here, east = parse_hosts(text)
        assert (here.slots, east) == (3, Host("east", 3))
        assert {*parse_hosts(",".join(reversed(text.split(","))))} == {here, east}

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
            ("-np2 train.py", "-H a:2,b:2 (-np2 is for mpirun)"),
            ("--json -np 2 train.py", "--json is for what --doctor says"),
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
            ("-np 2 python3 -u -", "write the program to a file"),
            ("-np 1 --mpi python3", "write the program to a file"),
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

    def test_a_program_that_is_here_otherwise(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What would run it is named; what is no program may be the argument of an option of mpirun's."""
        monkeypatch.chdir(tmp_path)
        executable(tmp_path / "steps", "")
        (tmp_path / "train.py").touch()
        for words, why in (
            ("steps", "'steps' is not in PATH; write ./steps for the one that is here"),
            ("./train", "'./train' is not there; write ./train.py"),
            (".", "'.' is a directory; name a program"),
            ("--odd-option x train", r"write train.py \(an option of mpirun that takes one\?"),
        ):
            with pytest.raises(ConfigError, match=f"{why}($| )"):
                run.launch_of(parse(["-np", "2", *words.split()]), {})
        (tmp_path / "steps").chmod(0o644)
        with pytest.raises(ConfigError, match="may not be executed; write what runs it before it"):
            run.launch_of(parse(["-np", "2", "./steps"]), {})

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

    def test_a_disk_that_is_full_is_named_where_ranks_could_not_say_it(self, tmp_path: Path) -> None:
        front = (
            "import sys; from hvdlite.cli import run; run._NO_SPACE_BYTES = 1 << 80; sys.exit(run.main(sys.argv[1:]))"
        )
        words = [
            sys.executable,
            "-c",
            front,
            "-np",
            "2",
            "--output-filename",
            str(tmp_path / "said"),
            "sh",
            "-c",
            "exit 1",
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr.endswith(
            f"\nhvdlite run: the disk of {tmp_path / 'said'} is full: output of ranks may be lost\n"
        )

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


@pytest.mark.parametrize("words", [[], ["--elastic"]])
def test_a_signal_while_ranks_are_started(words: list[str]) -> None:
    """No more of them are, as of the million for which a slip of the pen has asked."""
    program = """
import os, signal, sys
from hvdlite.cli import ranks, run

def start(argv, rank, *others, start=ranks.start):
    print(rank, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return start(argv, rank, *others)

ranks.start = start
sys.exit(run.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, *words, "-np", "3", "sleep", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "0\n"), done


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
