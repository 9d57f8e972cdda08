"""`python -m hvdlite run`: a thin front to the mpirun that is installed. It prints the exact command that it runs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdlite.cli.launchers import Host, Job, Launcher, Mpi, build, find_launcher, identify, parse_hosts, read_hostfile
from hvdlite.cli.supervise import supervise
from hvdlite.config import Config
from hvdlite.errors import ConfigError, StartupError

USAGE = """\
usage: python -m hvdlite run -np N [options] [any option of mpirun] program [arguments]

  -np N, -n N                 number of ranks; by default all slots of the hosts
  -H, --host a:2,b:2          hosts and their slots; by default this machine
  --hostfile FILE             the same, a host a line: "a slots=2" or "a:2"
  --network-interfaces SPEC   interfaces to use, as NCCL_SOCKET_IFNAME: eth0,eth1 or ^docker or =eth0
                              (default: HVDLITE_NETWORK_INTERFACES, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)
  --mpirun PATH               the mpirun to use; by default the one beside this Python, then the one in PATH
  --dry-run                   print the command and stop
  --                          what follows is the program

A program that ends in .py is run by this Python. Everything else goes to mpirun as it is; the exit status is mpirun's.
"""

# mpirun's options that take no argument, and those that take two; all others take one. Of Open MPI 4, 5 and MPICH.
_FLAGS = frozenset(
    """
    allow-run-as-root bind-to-core bind-to-socket bycore bynode byslot continuous debug debug-daemons debug-daemons-file
    debug-devel d disable-auto-cleanup disable-hostname-propagation disable-recovery disable-x display-allocation
    display-devel-map display-map display-topo do-not-launch do-not-resolve enable-recovery enable-x envall envnone
    genvall genvnone get-stack-traces hybrid-hosts info leave-session-attached l merge-stderr-to-stdout no-app-prefix
    nolocal nooversubscribe noprefix oversubscribe pernode pmi-port preload-binary s prepend-rank print-all-exitcodes
    profile quiet q report-bindings report-child-jobs-separately report-state-on-timeout set-cwd-to-session-dir set-sid
    show-progress skip-launch-node tag-output timestamp-output tv use-hwthread-cpus v verbose V version xml
    """.split()
)
_PAIRS = frozenset("mca gmca prtemca pmixmca gpmixmca omca gomca env genv append-env prepend-env".split())

# What Open MPI says when it lost a host, after which its mpirun may still exit with 0: for it that is no failure.
_LOST_HOST = (
    "lost communication with a remote daemon",
    "A critical communication path was lost",
    "MPI_ERRORS_ARE_FATAL",
)


@dataclass
class _Arguments:
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    interfaces: str = ""
    mpirun: str = ""
    dry_run: bool = False
    options: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``argv``, the words after ``python -m hvdlite run``, by default this process's; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        arguments = parse(argv)
        launcher = identify(arguments.mpirun) if arguments.mpirun else find_launcher()
        job = _job(arguments)
        command = build(launcher, job, os.environ)
    except StartupError as error:
        print(f"hvdlite run: {error}", file=sys.stderr)
        return 2
    print(_description(launcher, job, command.notes), file=sys.stderr)
    print(_shell_line(command.environment, command.argv), file=sys.stderr, flush=True)
    if arguments.dry_run:
        return 0
    started = time.time()
    many = launcher.mpi is Mpi.OPEN_MPI and job.host_count > 1
    outcome = supervise(command.argv, {**os.environ, **command.environment}, _LOST_HOST if many else ())
    if outcome.status != 0:
        _remove_shared_memory(started)
    if outcome.found and outcome.status == 0:
        print(f"hvdlite run: failed: mpirun's exit status is 0, but it said {outcome.found!r} above", file=sys.stderr)
        return 1
    return outcome.status


def _remove_shared_memory(started: float) -> None:
    """Remove what ranks that were killed could not: MPICH's files in /dev/shm, some MB of memory each."""
    new = [
        entry.path
        for entry in os.scandir("/dev/shm")
        if entry.name.startswith("mpich_shm_")
        and entry.stat().st_uid == os.geteuid()
        and entry.stat().st_ctime >= started
    ]
    mapped = "".join(_maps(pid) for pid in os.listdir("/proc") if pid.isdigit()) if new else ""
    for path in new:
        if path not in mapped:  # else it belongs to another job that started meanwhile
            Path(path).unlink(missing_ok=True)


def _maps(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it ended meanwhile, or is not ours
        return ""


def parse(argv: Sequence[str]) -> _Arguments:
    """Tell our options, mpirun's options and the program apart.

    Raises:
        ConfigError: an option lacks its argument or makes no sense; there is no program.
    """
    arguments = _Arguments()
    words = list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        option, joined, value = word.partition("=")
        name = option.lstrip("-")
        if name == "dry-run":
            arguments.dry_run = True
        elif name in ("np", "n", "H", "host", "hosts", "hostfile", "machinefile", "f", "network-interfaces", "mpirun"):
            if not joined:
                if not words:
                    raise ConfigError(f"{word} needs an argument")
                value = words.pop(0)
            _take(arguments, name, option, value)
        else:
            arguments.options.append(word)
            for _ in range(0 if joined else _arity(name, words)):
                arguments.options.append(words.pop(0))
    arguments.program = words
    if not words:
        raise ConfigError("no program to run; see python -m hvdlite run --help")
    return arguments


def _take(arguments: _Arguments, name: str, option: str, value: str) -> None:
    if name in ("np", "n"):
        if not value.isdigit() or int(value) == 0:
            raise ConfigError(f"{option} {value}: must be a number of ranks above 0")
        arguments.ranks = int(value)
    elif name in ("H", "host", "hosts"):
        arguments.hosts = parse_hosts(value)
    elif name in ("hostfile", "machinefile", "f"):
        arguments.hosts = read_hostfile(value)
    elif name == "network-interfaces":
        arguments.interfaces = value
    else:
        arguments.mpirun = value


def _arity(name: str, words: Sequence[str]) -> int:
    """How many of ``words`` belong to mpirun's option ``name``."""
    if name in _FLAGS:
        return 0
    if name in _PAIRS:
        return min(2, len(words))
    # An option that is unknown here may be a flag; then what follows is another option, or the program.
    return 0 if not words or words[0].startswith("-") or words[0].endswith(".py") else 1


def _job(arguments: _Arguments) -> Job:
    ranks = arguments.ranks or sum(host.slots for host in arguments.hosts)
    if not ranks:
        raise ConfigError("how many ranks? Say -np N, or give hosts with their slots: -H a:2,b:2")
    program = arguments.program
    if program[0].endswith(".py"):
        program = [sys.executable, *program]
    elif not shutil.which(program[0]):
        raise ConfigError(
            f"{program[0]!r} is neither a .py file nor a program in PATH (an option of mpirun that takes one? "
            "Write it as --option=value, and -- before the program)"
        )
    interfaces = arguments.interfaces or Config.from_env(os.environ).network_interfaces
    scheduled = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    return Job(tuple(program), ranks, arguments.hosts, interfaces, tuple(arguments.options), scheduled)


def _description(launcher: Launcher, job: Job, notes: Sequence[str]) -> str:
    where = f"{job.host_count} hosts" if job.host_count > 1 else job.hosts[0].name if job.hosts else "this machine"
    ranks = "1 rank" if job.ranks == 1 else f"{job.ranks} ranks"
    return "\n".join([f"hvdlite run: {launcher}, {ranks} on {where}", *(f"  {note}" for note in notes)])


def _shell_line(environment: dict[str, str], argv: Sequence[str]) -> str:
    return " ".join(["+", *(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(argv)])
