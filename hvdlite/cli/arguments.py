"""What the words after ``python -m hvdlite run`` mean: our options, horovodrun's, mpirun's, and the program."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdlite.cli import horovodrun
from hvdlite.cli.job import Host, parse_hosts, read_hostfile, united
from hvdlite.errors import ConfigError

USAGE = """\
usage: python -m hvdlite run -np N [options] [any option of mpirun] program [arguments]

The ranks of one machine start without MPI; several hosts, --mpi, --mpirun and every option of mpirun's take mpirun.
  -np N, -n N, --num-proc N   number of ranks; by default all slots of the hosts
  -H, --host a:2,b:2          hosts and their slots; by default those of Slurm, LSF, PBS or an MPIJob, or this machine
  --hostfile FILE             the same, a host a line: "a slots=2" or "a:2"
  --network-interfaces SPEC   interfaces to use, as NCCL_SOCKET_IFNAME: eth0,eth1 or ^docker or =eth0
                              (default: HVDLITE_NETWORK_INTERFACES, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)
  --ssh-port, -p N; --ssh-identity-file, -i FILE     for the ssh by which mpirun reaches hosts
  --output-filename DIR       each rank's output into DIR/rank.N/stdout and DIR/rank.N/stderr, and not here
  --mpi                       start the ranks of one machine by mpirun too, for programs that use MPI themselves
  --mpirun PATH               the mpirun to use; by default the one beside this Python, then the one in PATH
  --elastic                   the others go on when ranks die, or all begin anew from the last commit (docs/elastic.md)
  --min-np N, --max-np N      the same, and how many ranks there are at least (1), and at most
  --host-discovery-script S   the same; S prints hosts and their slots, a host a line: a:4
  --restarts K                start the whole job again if it fails, up to K times; with --elastic, its ranks (10)
  --dry-run; --verbose        print the command and stop; print the settings that the ranks see as well
  --doctor [--json]           examine the hosts and the network between them, and stop
  --check-build; --version    print what this hvdlite has, or its version, and stop
  --; -m MODULE               what follows is the program; it is a module, as of python -m

horovodrun's options (--fusion-threshold-mb --timeline-filename --no-stall-check --config-file ...) make hvdlite's
settings; others get a sentence. A program that ends in .py is run by this Python. The exit status is that of the rank
that failed first, or mpirun's.
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

QUESTIONS = frozenset({"help", "h", "check-build", "cb", "version"})
_SWITCHES = frozenset({"dry-run", "verbose", "doctor", "json", "elastic"}) | QUESTIONS
_WITH_ARGUMENT = frozenset(
    """
    np n num-proc H host hosts hostfile machinefile f network-interfaces network-interface mpirun output-filename
    config-file min-np min-num-proc max-np max-num-proc restarts host-discovery-script slots-per-host
    """.split()
)


@dataclass
class Arguments:
    """What `parse` has understood."""

    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    interfaces: str = ""
    mpirun: str = ""
    output: str = ""
    least: int | None = None
    most: int | None = None
    discovery: str = ""
    slots_per_host: int = 1
    restarts: int | None = None
    switches: set[str] = field(default_factory=set)  # those given of _SWITCHES
    options: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=list)
    effects: horovodrun.Effects = field(default_factory=horovodrun.Effects)

    @property
    def is_elastic(self) -> bool:
        is_bounded = self.least is not None or self.most is not None
        return "elastic" in self.switches or is_bounded or bool(self.discovery)


def parse(argv: Sequence[str]) -> Arguments:
    """Tell our options, horovodrun's, mpirun's and the program apart.

    Raises:
        ConfigError: an option lacks its argument or makes no sense; there is no program.
    """
    arguments = Arguments()
    given = horovodrun.Effects()
    words = list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        if word == "-m":
            if not words or words[0].startswith("-"):
                raise ConfigError("-m needs a module; options stand before -m, and the module's arguments after it")
            words = [sys.executable, word, *words]
            break
        option, joined, value = word.partition("=")
        name = option.lstrip("-")
        of_horovodrun = horovodrun.BY_NAME.get(name)
        arity = of_horovodrun.arity if of_horovodrun is not None else 1 if name in _WITH_ARGUMENT else 0
        if not joined and arity > 0:
            if len(words) < arity:
                raise ConfigError(f"{word} needs {'an argument' if arity == 1 else f'{arity} arguments'}")
            value, words = " ".join(words[:arity]), words[arity:]
        if joined and arity == 0 and (name in _SWITCHES or of_horovodrun is not None):
            raise ConfigError(f"{word}: {option} takes no argument")
        if name in _SWITCHES:
            arguments.switches.add(name)
        elif name in _WITH_ARGUMENT:
            _take(arguments, name, option, value)
        elif of_horovodrun is not None:
            given.add(of_horovodrun, value)
        else:
            arguments.options.append(word)
            for _ in range(0 if joined else _arity(name, words)):
                arguments.options.append(words.pop(0))
    if "doctor" in arguments.switches:
        as_json = ["--json"] if "json" in arguments.switches else []
        words = [sys.executable, "-m", "hvdlite", "doctor", *as_json, *words]
    elif "json" in arguments.switches:
        raise ConfigError("--json is for what --doctor says; an option of the program stands behind the program")
    arguments.program = words
    if not words and not arguments.switches & QUESTIONS:
        raise ConfigError("no program to run; see python -m hvdlite run --help")
    arguments.options += given.mpirun
    # What is given here wins over what stands in a --config-file.
    arguments.effects.settings.update(given.settings)
    arguments.effects.ssh.update(given.ssh)
    arguments.effects.notes += given.notes
    arguments.effects.forces_mpi |= given.forces_mpi
    return arguments


def _take(arguments: Arguments, name: str, option: str, value: str) -> None:
    if not value:  # of -H "" all ranks would be here, and --output-filename "" is this directory
        raise ConfigError(f"{option} needs an argument, and this one is empty: is a variable of the shell not set?")
    if name in ("np", "n", "num-proc"):
        arguments.ranks = _count(option, value)
    elif name in ("H", "host", "hosts"):
        arguments.hosts = united((*arguments.hosts, *parse_hosts(value)))  # may be repeated, as mpirun's
    elif name in ("hostfile", "machinefile", "f"):
        arguments.hosts = read_hostfile(value)
    elif name == "network-interfaces":
        arguments.interfaces = value
    elif name == "network-interface":  # may be repeated
        arguments.interfaces = ",".join(filter(None, [arguments.interfaces, value]))
    elif name in ("min-np", "min-num-proc"):
        arguments.least = _count(option, value)
    elif name in ("max-np", "max-num-proc"):
        arguments.most = _count(option, value)
    elif name == "slots-per-host":
        arguments.slots_per_host = _count(option, value)
    elif name == "host-discovery-script":
        arguments.discovery = os.path.abspath(value)
    elif name == "restarts":
        arguments.restarts = _count(option, value, least=0)
    elif name == "output-filename":
        arguments.output = os.path.abspath(value)
    elif name == "config-file":
        arguments.effects = horovodrun.read_config_file(value)
    else:
        arguments.mpirun = value


def _count(option: str, value: str, least: int = 1) -> int:
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < least:
        raise ConfigError(f"{option} {value}: must be a number{' of ranks above 0' if least else ', 0 or more'}")
    return int(value)


def _arity(name: str, words: Sequence[str]) -> int:
    """How many of ``words`` belong to mpirun's option ``name``."""
    if name in _FLAGS:
        return 0
    if name in _PAIRS:
        return min(2, len(words))
    if name == "x":  # a variable, whose value may be a .py file
        return min(1, len(words))
    # An option that is unknown here may be a flag; then what follows is another option, or the program.
    return 0 if not words or words[0].startswith("-") or words[0].endswith(".py") else 1


def misspelt_options(options: Sequence[str]) -> list[str]:
    """A sentence on each of ``options``, of which mpirun has refused some, whose name is nearly one of ours."""
    ours = sorted(_SWITCHES | _WITH_ARGUMENT | horovodrun.BY_NAME.keys())
    sentences = []
    for word in options:
        option = word.partition("=")[0]
        name = option.lstrip("-")
        if option.startswith("-") and name not in _FLAGS | _PAIRS:
            # 0.85: mpirun's --output, --timeout and --max-restarts are none of ours with a slip of the pen.
            for meant in difflib.get_close_matches(name, ours, n=1, cutoff=0.85):
                sentences.append(f"{option} is no option of hvdliterun, so mpirun was given it: is --{meant} meant?")
    return sentences
