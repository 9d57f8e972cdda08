"""What a batch scheduler has given to this job: its hosts, and how many ranks each is meant for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdlite.cli.job import Host, parse_host, read_hostfile, refusal, united
from hvdlite.errors import ConfigError

_HOSTFILES = (
    *("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE"),
)
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Allocation:
    """Hosts of this job.

    Attributes:
        scheduler: what it is called.
        knows_mpirun: whether every mpirun finds the hosts by itself, in the scheduler's own way.
    """

    scheduler: str
    hosts: tuple[Host, ...]
    knows_mpirun: bool = False

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    def first(self, ranks: int) -> tuple[Host, ...]:
        """The hosts that ``ranks`` fill, in their order; all, if there are more ranks than slots."""
        filled = 0
        for number, host in enumerate(self.hosts, start=1):
            filled += host.slots
            if filled >= ranks:
                return self.hosts[:number]
        return self.hosts


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """That of the scheduler whose variables ``environ`` has; None where there is none.

    Raises:
        ConfigError: a variable or a file of hosts makes no sense; names it.
    """
    return next((found for look in _SCHEDULERS if (found := look(environ)) is not None), None)


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    nodes, tasks = environ.get("SLURM_JOB_NODELIST"), environ.get("SLURM_TASKS_PER_NODE")
    if not nodes or not tasks:
        return None
    names = expand_nodes(nodes)
    slots = _expand_counts(tasks)
    if len(slots) != len(names):
        raise ConfigError(f"SLURM_TASKS_PER_NODE={tasks} does not fit SLURM_JOB_NODELIST={nodes}; say -np N and -H")
    return Allocation("Slurm", _hosts("SLURM_JOB_NODELIST", zip(names, slots, strict=True)), knows_mpirun=True)


def _lsf(environ: Mapping[str, str]) -> Allocation | None:
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        return None
    if len(words) % 2:
        raise ConfigError(f"LSB_MCPU_HOSTS={' '.join(words)!r} is not 'host slots host slots'; say -np N and -H")
    return Allocation("LSF", _hosts("LSB_MCPU_HOSTS", zip(words[::2], words[1::2], strict=True)))


def _pbs(environ: Mapping[str, str]) -> Allocation | None:
    """A line for each rank."""
    path = environ.get("PBS_NODEFILE")
    if not path:
        return None
    try:
        counts = Counter(Path(path).read_text(errors="replace").split())
    except OSError as error:
        raise ConfigError(f"PBS_NODEFILE={path}: {error.strerror}") from error
    return Allocation("PBS", _hosts(f"PBS_NODEFILE={path}", counts.items())) if counts else None


def _mpijob(environ: Mapping[str, str]) -> Allocation | None:
    """Kubeflow's, whose launcher has the file of hosts in the variable that its MPI reads."""
    path = next((environ[name] for name in _HOSTFILES if environ.get(name)), None)
    return None if path is None else Allocation("MPIJob", read_hostfile(path))


def _hosts(origin: str, counts: Iterable[tuple[str, object]]) -> tuple[Host, ...]:
    """Of names, and of how many ranks each is meant for."""
    hosts = []
    for name, slots in counts:
        host = parse_host(f"{name}:{slots}")
        if host is None:
            why = refusal(f"{name} {slots}", f"{name}:{slots}", "say -np N and -H")
            raise ConfigError(f"{origin}: {why}")
        hosts.append(host)
    return united(hosts)


_SCHEDULERS: tuple[Callable[[Mapping[str, str]], Allocation | None], ...] = (_slurm, _lsf, _pbs, _mpijob)


def expand_nodes(text: str) -> list[str]:
    """The hosts of Slurm's ``a[01-03,7]x,b``, in its order.

    Raises:
        ConfigError: what is in brackets are no numbers, or there are very many.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, numbers in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            endings = [plain] if plain else [n for span in numbers.split(",") for n in _expand_span(span)]
            if len(names) * len(endings) > _MOST_HOSTS:
                raise _no_list(text)
            names = [name + ending for name in names for ending in endings]
        hosts += names
    return hosts


def _expand_span(span: str) -> list[str]:
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", span)
    if found is None or int(found[2] or 0) - int(found[1]) > _MOST_HOSTS:
        raise _no_list(span)
    return [str(n).zfill(len(found[1])) for n in range(int(found[1]), int(found[2] or found[1]) + 1)]


def _expand_counts(text: str) -> list[int]:
    """Of Slurm's ``2(x3),1``."""
    counts: list[int] = []
    for count, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text):
        if len(count) + len(times) > 12 or int(times or 1) > _MOST_HOSTS:
            raise _no_list(text)
        counts += [int(count)] * int(times or 1)
    return counts


def _no_list(text: str) -> ConfigError:
    return ConfigError(f"{text!r} is nothing that Slurm says of its nodes; say -np N and -H")
