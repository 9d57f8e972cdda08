"""What hvdliterun is asked to start, and what every way to start it needs."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlite import control_groups
from hvdlite.counted import counted
from hvdlite.errors import ConfigError
from hvdlite.links.interfaces import is_own

# What mpirun and ssh take for a host: nothing that begins with a dash, which they take for an option.
_HOST = re.compile(r"((?:[a-z0-9_][a-z0-9_.-]*@)?[a-z0-9_][a-z0-9_.-]*)(?::([0-9]{1,6}))?", re.IGNORECASE | re.ASCII)
_SLOTS = re.compile(r"\s+(max[_-])?slots\s*=\s*(\S+)")


@dataclass(frozen=True)
class Host:
    """A host, as ssh and mpirun know it: ``name`` may be user@host."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name for all others."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class Launch:
    """What is to be launched.

    Attributes:
        hosts: empty for this machine alone, and where a batch scheduler tells mpirun.
        options: for mpirun, as they are.
        ssh: for the ssh by which mpirun reaches hosts; no word has blanks.
        scheduled_hosts: how many hosts the batch scheduler has given, where mpirun is to ask it.
        is_elsewhere: whether those are other machines than this one.
        outlives_ranks: when a rank dies the others are left alone: they end by themselves, and may save before.
        goes_on: and these go on, if MPI can.
        has_input: whether something may come by stdin, see `has_input`.
        notes: for the user.
    """

    program: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    interfaces: str = ""
    options: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    scheduled_hosts: int = 1
    is_elsewhere: bool = False
    outlives_ranks: bool = False
    goes_on: bool = False
    has_input: bool = True
    notes: tuple[str, ...] = ()

    @property
    def host_count(self) -> int:
        return len(self.hosts) or self.scheduled_hosts

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.scheduled_hosts == 1 and not self.is_elsewhere and all(map(is_this_machine, self.hosts))

    @property
    def uses_network(self) -> bool:
        """Whether there are ranks on several hosts, or on another one than this machine."""
        return self.host_count > 1 or not self.is_local

    @property
    def ranks_per_host(self) -> int:
        """The most ranks that one host gets, filled by slots and then evenly."""
        if not self.hosts:
            return -(-self.ranks // self.scheduled_hosts)
        slots = sum(host.slots for host in self.hosts)
        extra = max(0, self.ranks - slots)
        return min(self.ranks, max(host.slots for host in self.hosts) + -(-extra // len(self.hosts)))


@dataclass(frozen=True)
class Command:
    """A command line, the variables to add to the environment it runs in, and why they are added."""

    argv: list[str]
    environment: dict[str, str]
    notes: list[str]


def check_directory() -> None:
    """Raises ConfigError where the working directory is gone, in which programs, torch and mpirun fail in odd ways."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError("the working directory has been removed: change to one that is there") from error


def open_standard_descriptors() -> None:
    """Make 0, 1 and 2 the null device where they are closed, as by ``<&- >&-``.

    Whatever is opened next has their numbers otherwise: what a rank writes to 1 would go there, and without 0 and 1
    Open MPI's mpirun ends with status 1 and says nothing.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def has_input() -> bool:
    """Whether something may come by stdin: where that is /dev/null or closed, as under cron and nohup, nothing does."""
    try:
        stdin = os.fstat(0)
    except OSError:
        return False
    return not stat.S_ISCHR(stdin.st_mode) or stdin.st_rdev != os.stat(os.devnull).st_rdev


def is_read_from_stdin(program: Sequence[str]) -> bool:
    """Whether ``program`` is a Python that is told what to do by stdin: ``python``, ``python3 -u -``."""
    if not re.fullmatch(r"python[0-9.]*", os.path.basename(program[0])):
        return False
    words = list(program[1:])
    while words and words[0].startswith("-") and words[0] != "-":
        option = words.pop(0)
        if option in ("-W", "-X"):
            del words[:1]  # its argument
        elif option.startswith(("-W", "-X")):
            continue
        elif option.startswith("--") or set(option) & set("cmVh?"):  # -c and -m are the program; others print and end
            return False
    return not words or words[0] == "-"


def why_no_program(name: str) -> str:
    """Why ``name``, which PATH does not lead to, cannot be started, with what to write where something is there."""
    if os.path.isdir(name):
        return "is a directory; name a program"
    if os.path.isfile(name) and os.access(name, os.X_OK):  # one with a slash in its name would have been found
        return f"is not in PATH; write ./{name} for the one that is here"
    if os.path.isfile(name):
        return "may not be executed; write what runs it before it, as in bash script.sh, or chmod +x"
    if os.path.isfile(f"{name}.py"):
        return f"is not there; write {name}.py"
    return "is neither a .py file nor a program in PATH"


def is_this_machine(host: Host) -> bool:
    own, name = socket.gethostname().lower(), host.address.lower()
    # Either may lack its domain; where both have one, hosts may differ by it alone.
    same_name = name in (own, own.partition(".")[0]) or name.partition(".")[0] == own
    return name == "localhost" or is_own(name) or same_name


def thread_settings(launch: Launch, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Variables that leave each rank its share of the cores, and why, unless the user has chosen."""
    if "OMP_NUM_THREADS" in environ:
        return {}, []
    cores, limit, ranks = len(os.sched_getaffinity(0)), control_groups.cores(), launch.ranks_per_host
    have = counted(cores, "core")
    if limit is not None and limit < cores:  # more threads would all be halted for most of each period
        have += f", of which the control group allows {limit:g}"
        cores = max(1, int(limit))
    threads = max(1, cores // ranks)
    note = f"OMP_NUM_THREADS={threads}: {have}, {counted(ranks, 'rank')} on a host; set it to choose yourself"
    return {"OMP_NUM_THREADS": str(threads)}, [note]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """``a:2,b:2``; a host without a number has one slot.

    Raises:
        ConfigError: names the part that makes no sense.
    """
    return united(_host(part.strip(), part.strip()) for part in text.split(",") if part.strip())


def united(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Each host once, with all its slots: some lists name a host for each of them, or this machine by several names."""
    named = list(hosts)
    own = {host.name for host in named if is_this_machine(host)}
    slots: Counter[str] = Counter()
    for host in named:
        slots[min(own) if host.name in own else host.name] += host.slots  # the same in whatever order they are named
    return tuple(Host(name, count) for name, count in slots.items())


def read_hostfile(path: str) -> tuple[Host, ...]:
    """A file of ``host slots=2`` (Open MPI's form) or ``host:2`` (MPICH's), a host a line; ``#`` starts a comment.

    Open MPI's ``max_slots`` are a host's slots where the line has no others, as there, and else mean nothing.

    Raises:
        ConfigError: the file cannot be read or has no host; a line makes no sense; names file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()  # some editors put a mark before the text
    except OSError as error:
        raise ConfigError(f"hostfile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"hostfile {path}: is no text: {error}") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if slots := dict(_SLOTS.findall(entry)):
            entry = f"{_SLOTS.sub('', entry)}:{slots.get('') or next(iter(slots.values()))}"
        if entry:
            hosts.append(_host(entry, f"{path}:{number}: {line.strip()}"))
    if not hosts:
        raise ConfigError(f"hostfile {path}: names no host")
    return united(hosts)


def _host(entry: str, origin: str) -> Host:
    found = parse_host(entry)
    if found is None:
        raise ConfigError(refusal(origin, entry, "write host:slots, as in node0:4, with at least one slot"))
    return found


def refusal(origin: str, entry: str, way_out: str) -> str:
    """Why ``entry`` of ``origin``, of which `parse_host` makes nothing, is no host."""
    if _is_ipv6(entry) or _is_ipv6(entry.rpartition(":")[0]):
        # Open MPI 5 and MPICH 5 take what stands before the first colon for the name, and call ssh with that.
        return (
            f"{origin!r} is an address of IPv6, which mpirun takes for no host: give a name that leads there, as in "
            "DNS or in /etc/hosts of all hosts"
        )
    return f"{origin!r} is not a host; {way_out}"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def parse_host(entry: str, slots: int = 1) -> Host | None:
    """``a:2``, or ``a`` with ``slots``; None if mpirun or ssh could take the name for something else, or of 0 slots."""
    found = _HOST.fullmatch(entry)
    if found is None or int(found[2] or slots) == 0:
        return None
    return Host(found[1], int(found[2] or slots))
