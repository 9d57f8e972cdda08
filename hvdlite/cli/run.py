"""`python -m hvdlite run`: starts the ranks of one machine itself, those of several by the mpirun that is installed."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from hvdlite import environment
from hvdlite.cli import elastic, kept_job, lost_frames, mpirun, ranks
from hvdlite.cli.allocation import Allocation, find_allocation
from hvdlite.cli.arguments import QUESTIONS, USAGE, Arguments, misspelt_options, parse
from hvdlite.cli.children import Stops, how_ended, shell_status
from hvdlite.cli.discovery import IsOver, hosts_of, slots_of
from hvdlite.cli.exit_codes import ExitCodes, culprit, is_telling, stands_out
from hvdlite.cli.job import (
    Command,
    Host,
    Launch,
    check_directory,
    has_input,
    is_read_from_stdin,
    is_this_machine,
    open_standard_descriptors,
    why_no_program,
)
from hvdlite.cli.keepers import Keepers, OnWord
from hvdlite.cli.launcher_watch import Expected, Words
from hvdlite.cli.mpirun import Mpi, Mpirun
from hvdlite.cli.rank_notices import RankNotices
from hvdlite.cli.rank_words import RankWords
from hvdlite.cli.reader import ends_with_reader
from hvdlite.cli.say import finish, say, show
from hvdlite.cli.supervise import Ending, supervise
from hvdlite.config import CALL_KEY, DOCTOR, KEEPER, NOTICES, START, TO_SAVE, WORKER, Config, has_setting
from hvdlite.counted import counted
from hvdlite.doctor import before_mpi
from hvdlite.errors import ConfigError, StartupError
from hvdlite.mpi import INTEL_SHARED_FILES, MPICH_SHARED_FILES
from hvdlite.version import __version__

# What Open MPI's mpirun says when a host is lost. Its exit status may be 0 all the same.
_LOST_HOST = (
    "lost communication with a remote daemon",
    "A critical communication path was lost",
    "MPI_ERRORS_ARE_FATAL",
)
# Exit status of Open MPI 5's prterun, and of its daemons, that could not start a thread: bad luck on busy hosts; the
# next try does. Also of a prterun that does not take its options.
_NO_LISTENER = 213
_NO_SPACE_BYTES = 1 << 16  # left on a disk: some file systems keep a rest
_START_S = 1.0  # less than a rank needs to come to an end of its own
_DAEMONS_SHARE = 1 / 3  # of the time for the start: on other hosts mpirun's daemons have begun by then, or failed


_NOT_KEPT = (
    "--elastic keeps no commit on these hosts, which only the scheduler's launcher is known to reach: a rank that dies "
    "ends the job. Where ssh reaches them, name them: -H a:2,b:2"
)
_NO_PROGRAM = (
    "{} takes its program from the input, which only rank 0 has, and under some mpiruns never the end of it: write the "
    "program to a file, or pass it by python -c"
)
_ELASTIC_RESTARTS = 10
# Of elastic jobs, to which it does little harm if a host is given up that would have come back.
_SHORT_HEARTBEATS = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "6"}
_SHARE_CORES = "{} ranks are more than that: they share cores"

# Under sh, which knows the rank by then; $1 is the directory, $2 how many digits a rank's number has. What is started
# again, by --elastic or --restarts, leaves there what was said before.
_INTO_FILES = """\
d=$1/rank.$(printf %0"$2"d "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$HVDLITE_RANK}}") && mkdir -p "$d" && shift 2 && \
if [ "$HVDLITE_WORKER$HVDLITE_KEEPER$HVDLITE_START" ]; then exec "$@" >>"$d/stdout" 2>>"$d/stderr"; \
else exec "$@" >"$d/stdout" 2>"$d/stderr"; fi\
"""


@ends_with_reader
def main(argv: Sequence[str] | None = None, announce: bool = True) -> int:
    """Run ``argv``, the words after ``python -m hvdlite run``, by default this process's; returns the exit status.

    That is 1 of a job that has succeeded, but whose output is not all there.

    Args:
        announce: whether to print the command.
    """
    open_standard_descriptors()
    status = _main(sys.argv[1:] if argv is None else argv, announce)
    return status if finish() else status or 1


@contextmanager
def _shortage_told(directory: str) -> Iterator[None]:
    """Say at the end where ``directory``, if there is one, cannot take what ranks say: their last words are not there
    then."""
    yield
    with suppress(OSError):  # it was never made
        if directory and _is_full(directory):
            say(f"the disk of {directory} is full: output of ranks may be lost")


def _is_full(directory: str) -> bool:
    """Raises OSError."""
    disk = os.statvfs(directory)
    free_bytes = disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
    return disk.f_blocks > 0 and free_bytes < _NO_SPACE_BYTES  # some file systems do not say


def _main(argv: Sequence[str], announce: bool) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        check_directory()
        arguments = parse(argv)
        if arguments.switches & QUESTIONS:
            return _answer(arguments.switches)
        if arguments.discovery and not arguments.hosts:
            found = hosts_of(arguments.discovery, arguments.slots_per_host)
            if not found:
                raise ConfigError(f"--host-discovery-script {arguments.discovery} has printed no host to begin with")
            if arguments.ranks is None or not all(map(is_this_machine, found)):
                arguments.hosts = found
        settings = arguments.effects.settings
        environ = {**_outside(environment.variables()), **settings}
        if arguments.is_elastic and not has_setting("heartbeat_timeout_s", environ):
            settings |= _SHORT_HEARTBEATS
            environ |= _SHORT_HEARTBEATS
        launch = replace(launch_of(arguments, environ), outlives_ranks=arguments.is_elastic)
        if arguments.is_elastic and launch.scheduled_hosts > 1:
            launch = replace(launch, notes=(*launch.notes, _NOT_KEPT))
        elif arguments.is_elastic:
            launch = replace(launch, goes_on=True)
        if "doctor" in arguments.switches and launch.host_count > 1:
            environ |= before_mpi.invitation([host.address for host in launch.hosts])
        chosen = _mpirun(arguments, launch)
        if is_read_from_stdin(launch.program) and (launch.ranks > 1 or chosen is not None):
            raise ConfigError(_NO_PROGRAM.format(" ".join(launch.program[:2])))
        if chosen is not None:
            mpirun.check_directory(launch)
        command = ranks.build(launch, environ) if chosen is None else mpirun.build(chosen, launch, environ)
        for note in arguments.effects.notes:
            say(note)
        if announce:
            show(_description(chosen, launch, command.notes))
            show(_shell_line({**settings, **command.environment}, command.argv))
        environ |= command.environment
        if "verbose" in arguments.switches:
            shown = [
                name
                for name in sorted(environ)
                if name.startswith(("HVDLITE_", "HOROVOD_")) and name not in (CALL_KEY, DOCTOR)
            ]
            show("\n".join(f"  {name}={environ[name]}" for name in shown))
        if "dry-run" in arguments.switches:
            return 0
        with _shortage_told(arguments.output):
            return _run(chosen, launch, command, arguments, environ)
    except StartupError as error:
        say(str(error))
        return 2
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        say(f"{error.strerror}: raise the limit (ulimit -n) of the shell that starts it")
        return 2


def _run(
    chosen: Mpirun | None, launch: Launch, command: Command, arguments: Arguments, environ: Mapping[str, str]
) -> int:
    """The exit status of the job."""
    config = Config.from_env(environ)
    if arguments.is_elastic:
        if chosen is None:
            return elastic.run_elastic(command.argv, launch.ranks, environ, _elasticity(arguments, launch), config)
        if launch.scheduled_hosts == 1:
            return _run_kept(chosen, launch, arguments, environ, config)

    def once(start: int) -> int:
        told = environ if start == 1 else {**environ, START: str(start)}
        if chosen is None:
            return ranks.run_ranks(command.argv, launch.ranks, told, config.failure_grace_s)
        return _run_mpirun(chosen, launch, command if start == 1 else mpirun.build(chosen, launch, told), told)

    return _run_again(once, arguments.restarts or 0)


def _answer(switches: Container[str]) -> int:
    if "help" in switches or "h" in switches:
        print(USAGE, end="")
    elif "version" in switches:
        print(f"hvdlite {__version__}")
    else:
        from hvdlite.cli import check_build  # which imports all of hvdlite

        print(check_build.report())
    return 0


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what a rank that calls hvdliterun has been told of the job that it is in."""
    told = (WORKER, KEEPER, START, NOTICES, TO_SAVE)
    return {name: value for name, value in environ.items() if name not in told}


def _mpirun(arguments: Arguments, launch: Launch) -> Mpirun | None:
    """The mpirun that starts the ranks; None: none does, as they are on this machine and nothing asks for one.

    Raises:
        StartupError: it is not there.
    """
    asked_for = arguments.effects.forces_mpi or arguments.options
    if arguments.mpirun:
        return mpirun.identify(arguments.mpirun)
    return mpirun.find_mpirun() if asked_for or not launch.is_local else None


def _elasticity(arguments: Arguments, launch: Launch) -> elastic.Elasticity:
    """Raises:
    ConfigError: --min-np is more than there are, or may be.
    """
    least = 1 if arguments.least is None else arguments.least
    if arguments.most is not None and arguments.most < least:
        raise ConfigError(f"--min-np {least} is more than --max-np {arguments.most}")
    if least > launch.ranks:
        raise ConfigError(f"--min-np {least} is more than -np {launch.ranks}")
    if arguments.most is not None and arguments.most < launch.ranks:
        raise ConfigError(f"--max-np {arguments.most} is less than -np {launch.ranks}")
    restarts = _ELASTIC_RESTARTS if arguments.restarts is None else arguments.restarts
    look = partial(slots_of, arguments.discovery, arguments.slots_per_host) if arguments.discovery else None
    return elastic.Elasticity(least, restarts, arguments.most, look)


def _run_again(once: Callable[[int], int], restarts: int) -> int:
    """The exit status of ``once(1)``; while it fails uninterrupted ``once(2)`` follows, up to ``restarts`` times."""
    with Stops() as stops:
        for number in range(1, restarts + 1):
            status = once(number)
            if status == 0 or stops:
                return status
            say(f"starts the job again ({number} of {restarts} times)")
        return once(restarts + 1)


def _run_kept(chosen: Mpirun, launch: Launch, arguments: Arguments, environ: Mapping[str, str], config: Config) -> int:
    """The exit status of ranks that are started anew from their last commit, see `hvdlite.cli.kept_job`."""
    elasticity = _elasticity(arguments, launch)
    most = arguments.most or (1 << 30 if arguments.discovery else launch.ranks)
    patience = (config.elastic_timeout_s, config.heartbeat_timeout_s, config.failure_grace_s)
    leaves_time = mpirun.leaves_survivors(chosen, launch)
    limits = kept_job.Limits(elasticity.least, most, elasticity.restarts, *patience, leaves_time)
    here = (Host("localhost", launch.ranks),)
    hosts = launch.hosts or here
    if (missing := launch.ranks - sum(host.slots for host in hosts)) > 0:  # they share cores
        hosts = (replace(hosts[0], slots=hosts[0].slots + missing), *hosts[1:])
    variables = dict(environ)

    def look(is_over: IsOver) -> Sequence[Host]:
        return hosts_of(arguments.discovery, arguments.slots_per_host, is_over) if arguments.discovery else hosts

    def make(on_word: OnWord) -> Keepers:
        is_local = launch.is_local and not arguments.discovery
        patience_s = 2 * config.heartbeat_timeout_s  # what ranks survive keepers survive as well
        start_s = config.start_timeout_s / 2
        needs_directory = mpirun.needs_directory(chosen, launch)
        keepers = Keepers(
            launch, environ, patience_s, on_word, is_local=is_local, start_s=start_s, needs_directory=needs_directory
        )
        variables.update(keepers.environment)
        return keepers

    def generation(on: Sequence[Host], spared: Callable[[], list[int]], words: RankWords, to_save: str) -> int:
        count = sum(host.slots for host in on)
        environ = variables | {START: str(words.start)} | ({TO_SAVE: to_save} if to_save else {})
        now = replace(launch, hosts=() if tuple(on) == here else tuple(on), ranks=count)
        command = mpirun.build(chosen, now, environ)
        return _run_mpirun(chosen, now, command, {**environ, **command.environment}, spared, words)

    return kept_job.KeptJob(look, generation, make, limits).run()


def _run_mpirun(
    chosen: Mpirun,
    launch: Launch,
    command: Command,
    environ: Mapping[str, str],
    spared: Callable[[], list[int]] = list,
    words: Words | None = None,
) -> int:
    started = time.time()
    many = chosen.mpi is Mpi.OPEN_MPI and launch.uses_network
    codes = None if chosen.mpi is Mpi.OPEN_MPI else ExitCodes()
    ssh_port = next((int(port) for option, port in pairwise(launch.ssh) if option == "-p"), 22)
    config = Config.from_env(environ)
    with ExitStack() as on_end:
        if words is None and mpirun.ends_together(launch):
            words = on_end.enter_context(closing(RankNotices(config.failure_grace_s)))
            environ = {**environ, **words.environment}
        stays_connected = chosen.mpi is not Mpi.OPEN_MPI  # whose daemons leave ssh
        expected = Expected(
            launch.hosts, launch.is_local, config.start_timeout_s, ssh_port, words, stays_connected=stays_connected
        )

        def run() -> Ending:
            watch_for = _LOST_HOST if many else ()
            stdout_filter = bytes if codes is None else codes.take_from
            return supervise(command.argv, environ, expected, watch_for, stdout_filter, spared)

        ending = run()
        start_s = config.start_timeout_s * _DAEMONS_SHARE if many else _START_S
        is_at_the_start = not ending.was_stopped and time.time() - started < start_s
        if chosen.mpi is Mpi.OPEN_MPI and ending.status == _NO_LISTENER and is_at_the_start:
            unknown = misspelt_options(launch.options)
            for text in unknown:
                say(text)
            if not unknown:
                say(
                    f"mpirun has started nothing (exit status {_NO_LISTENER}): for a reason that it gives above, as an "
                    "option that it does not take, or since it could not begin to listen; tries once more"
                )
                ending = run()
            if ending.status == _NO_LISTENER and "prte_if_include" in command.argv:
                say(
                    f"perhaps a host has no interface {launch.interfaces}: mpirun's daemon ends there then. Where "
                    "hosts call theirs differently name all, as in --network-interfaces eth0,ens5"
                )
    if ending.status != 0 or ending.lost:
        _remove_shared_memory(started)
    if ending.lost:
        say(f"ended: {ending.lost}")
    elif ending.status != 0 and not launch.outlives_ranks and not ending.was_stopped:
        others = [host.address for host in launch.hosts if not is_this_machine(host)]
        for text in lost_frames.complaints(others):
            say(text)
    elif ending.found and ending.status == 0 and not expected.is_over:
        say(f"failed: mpirun's exit status is 0, but it said {ending.found!r} above")
        return 1
    if codes is not None and ending.status != 0 and not ending.was_stopped:
        return _status_of(codes, launch, ending, words.failed if isinstance(words, RankNotices) else None)
    return ending.status


def _status_of(ends: ExitCodes, launch: Launch, ending: Ending, failed: int | None) -> int:
    """Of the job, from those of its ranks, of which a guilty one is named.

    Args:
        failed: the rank after whose failure others have said that they end; None where nobody has.
    """
    began_here = launch.is_local or (ends.first_host != "" and is_this_machine(Host(ends.first_host, 1)))
    missed = ends.place_of(failed, launch)
    first_end = ends.place_of(ending.first_end if began_here else None, launch)
    place = culprit(ends.codes, first_end, missed)
    if place is None:
        return ending.status
    code = ends.codes[place]
    if is_telling(code) or (not ending.lost and any(stands_out(place, ends.codes, at) for at in (first_end, missed))):
        say(f"{ends.name(place, launch)} {how_ended(code)}")
    elif missed is not None and ends.codes[missed] == 0 and not ending.lost:  # os._exit(0), or mpirun has not heard how
        say(f"{ends.name(missed, launch)} ended before its time, and the others for lack of it")
    elif ends.were_killed_at_first_host and not ending.lost:
        say(f"a rank on {ends.first_host} {how_ended(code)}")
    elif ending.lost:  # the ranks were killed for that
        return ending.status
    return shell_status(code)


def _remove_shared_memory(started: float) -> None:
    """Remove what ranks that were killed could not: MPICH's files in /dev/shm, some MB of memory each, and Intel's."""
    new = []
    with suppress(OSError):  # there is no /dev/shm
        for entry in os.scandir("/dev/shm"):
            with suppress(FileNotFoundError):  # it has gone meanwhile
                if (
                    entry.name.startswith((MPICH_SHARED_FILES, INTEL_SHARED_FILES))
                    and entry.stat().st_uid == os.geteuid()
                    and entry.stat().st_ctime >= started
                ):
                    new.append(entry.path)
    mapped = "".join(_maps(pid) for pid in os.listdir("/proc") if pid.isdigit()) if new else ""
    for path in new:
        if path not in mapped:  # a mapped file belongs to another job that started meanwhile
            Path(path).unlink(missing_ok=True)


def _maps(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # the process has ended, or belongs to another user
        return ""


def launch_of(arguments: Arguments, environ: Mapping[str, str]) -> Launch:
    """The launch that ``arguments`` ask for.

    Raises:
        ConfigError: the number of ranks is missing, or the program is not here.
    """
    allocation = None if arguments.hosts else find_allocation(environ)
    slots = sum(host.slots for host in arguments.hosts) if allocation is None else allocation.slots
    count = arguments.ranks
    if count is None and slots:
        count = max(arguments.least or 1, min(slots, arguments.most or slots))
    if count is None:
        of_mpirun = f" ({' '.join(arguments.options)} is for mpirun)" if arguments.options else ""
        raise ConfigError(f"how many ranks? Say -np N, or give hosts with their slots: -H a:2,b:2{of_mpirun}")
    program = arguments.program
    if program[0].endswith(".py"):
        program = [sys.executable, *program]
    elif not shutil.which(program[0]):
        hint = "an option of mpirun that takes one? Write it as --option=value, and -- before the program"
        raise ConfigError(f"{program[0]!r} {why_no_program(program[0])}{f' ({hint})' if arguments.options else ''}")
    if arguments.output:
        program = ["sh", "-c", _INTO_FILES, "sh", arguments.output, str(len(str(count - 1))), *program]
    interfaces = arguments.interfaces or Config.from_env(environ).network_interfaces
    ssh = tuple(word for pair in arguments.effects.ssh.items() for word in pair)
    options = tuple(arguments.options)
    launch = Launch(tuple(program), count, arguments.hosts, interfaces, options, ssh, has_input=has_input())
    if allocation is not None:
        return _scheduled(launch, allocation)
    if arguments.hosts and count > slots:  # for horovodrun an error, for mpirun too unless it is told otherwise
        have = counted(slots, "slot")
        return replace(launch, notes=(f"the hosts have {have}; {_SHARE_CORES.format(count)}",))
    return launch


def _scheduled(launch: Launch, allocation: Allocation) -> Launch:
    """``launch`` on the hosts of ``allocation``."""
    hosts = allocation.first(launch.ranks)
    given = f"{counted(allocation.slots, 'rank')} on {counted(len(allocation.hosts), 'host')}"
    notes = [f"{allocation.scheduler} has given {given}"]
    if launch.ranks > allocation.slots:
        notes.append(_SHARE_CORES.format(launch.ranks))
    alone = all(map(is_this_machine, hosts))
    if allocation.scheduler == "LSF" and not alone and shutil.which("jsrun"):
        jsrun = f"jsrun -n {launch.ranks} -a 1 -c CORES python train.py"
        notes.append(f"where mpirun does not reach them, jsrun does: {jsrun}")
    launch = replace(launch, notes=tuple(notes))
    if alone or not allocation.knows_mpirun:
        return replace(launch, hosts=hosts)
    return replace(launch, scheduled_hosts=len(hosts), is_elsewhere=True)


def _description(chosen: Mpirun | None, launch: Launch, notes: Sequence[str]) -> str:
    starter = "without MPI" if chosen is None else str(chosen)
    alone = launch.hosts[0].name if launch.hosts else "this machine"
    where = f"{launch.host_count} hosts" if launch.host_count > 1 else alone
    many = counted(launch.ranks, "rank")
    return "\n".join([f"hvdlite run: {starter}, {many} on {where}", *(f"  {note}" for note in (*launch.notes, *notes))])


def _shell_line(variables: dict[str, str], argv: Sequence[str]) -> str:
    return " ".join(["+", *(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(argv)])
