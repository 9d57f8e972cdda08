"""Process sets: the ranks that take part in an operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import hvdlite
from hvdlite.errors import MismatchError
from hvdlite.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdlite.runtime import Runtime


class ProcessSet:
    """A set of ranks. Register it with `add_process_set`, or by init(process_sets=...), on all ranks of the job.

    Sets may overlap; each negotiates and communicates for itself, so operations of several sets run at the same time,
    and a slow set holds up no other. Each costs a member a thread that sleeps, and HVDLITE_STAGING_BYTES of memory as
    far as it is used.

    Args:
        ranks_or_comm: ranks of the job, or an mpi4py communicator of some of its processes.

    Attributes:
        process_set_id: 1, 2, 3, ... in the order of registration; None while it is not registered.
        mpi_comm: the communicator that was given; None where ranks were.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Comm) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: MPI.Comm | None = None
        self._group: Group | None = None
        self._runtime: weakref.ref[Runtime] | None = None
        self._ranks: list[int] | None = None
        if isinstance(ranks_or_comm, Iterable):
            self._ranks = sorted(int(rank) for rank in ranks_or_comm)
        else:
            self.mpi_comm = ranks_or_comm

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, ascending."""
        if self._ranks is None:
            assert self.mpi_comm is not None
            self._ranks = sorted(hvdlite.runtime().ranks_of(self.mpi_comm))
        return self._ranks

    def group(self) -> Group:
        """What carries its operations.

        Raises:
            ShutDownError: hvdlite is not running in this process.
            ValueError: it is not registered, or this rank is not a member.
        """
        group = self.group_of_members()
        if group is None:
            raise ValueError(f"rank {hvdlite.rank()} is not a member of {self}; only members may call its operations")
        return group

    def group_of_members(self) -> Group | None:
        """`group`, and None where this rank is not a member."""
        runtime = hvdlite.runtime()
        if self.process_set_id is None or self._runtime is None or self._runtime() is not runtime:
            raise ValueError(
                f"{self} is not registered; pass it to hvd.add_process_set, or to hvd.init(process_sets=[...])"
            )
        return self._group

    def next_number(self) -> int:
        """0, 1, 2, ...: for names of what every member makes in the same order."""
        return self.group().next_number()

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        """This process's rank among the members.

        Raises:
            ValueError: it is none.
        """
        if not self.included():
            raise ValueError(f"rank {hvdlite.rank()} is not a member of {self}")
        return self.ranks.index(hvdlite.rank())

    def included(self) -> bool:
        """Whether this process is a member."""
        return hvdlite.rank() in self.ranks

    def register(self, runtime: Runtime, number: int, group: Group | None) -> None:
        """It is set ``number`` of ``runtime``, and ``group`` there on its members."""
        self.process_set_id, self._group, self._runtime = number, group, weakref.ref(runtime)

    def remove(self, runtime: Runtime) -> bool:
        """Undo `register`; whether it was registered with ``runtime``."""
        if not self.process_set_id or self._runtime is None or self._runtime() is not runtime:
            return False
        runtime.remove_group(self.process_set_id)
        self.process_set_id = self._group = self._runtime = None
        return True

    def __deepcopy__(self, memo: object) -> ProcessSet:
        return self  # as part of a model that is copied

    def __reduce__(self) -> tuple[Callable[[list[int]], ProcessSet], tuple[list[int]]]:
        return _of_ranks, (self.ranks,)

    def __repr__(self) -> str:
        members = self._ranks if self._ranks is not None else "a communicator"
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={members})"


class _GlobalProcessSet(ProcessSet):
    """All ranks; always registered."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(hvdlite.size()))

    def group_of_members(self) -> Group:
        return hvdlite.runtime().group

    def __reduce__(self) -> Any:
        return "global_process_set"

    def __repr__(self) -> str:
        return "hvd.global_process_set"


global_process_set = _GlobalProcessSet()


def _of_ranks(ranks: list[int]) -> ProcessSet:
    """Unpickle: the set of ``ranks``, registered where the job has one."""
    process_set = ProcessSet(ranks)
    if hvdlite.is_initialized():
        runtime = hvdlite.runtime()
        number = runtime.group_number(ranks)
        if number is not None:
            process_set.register(runtime, number, runtime.groups.get(number))
    return process_set


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks; all ranks of the job call it, in the same order, members or not.

    Args:
        process_set: or its ranks.

    Raises:
        ValueError: there is a set of these ranks already; they are no ranks of this job.
        MismatchError: other ranks named other ranks.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    runtime = hvdlite.runtime()
    number, group = runtime.add_group(added.ranks)
    added.register(runtime, number, group)
    return added


def add_process_sets(process_sets: Sequence[ProcessSet]) -> None:
    """Register what is not registered yet, and make every set of the list usable; all ranks call it.

    The sets of a position may differ between ranks where they come from parts of one communicator that was split.

    Raises:
        ValueError: a set of the list has the ranks of another, or all ranks; the others are usable.
        MismatchError: ranks named other ranks.
    """
    from hvdlite.torch.functions import allgather_object  # built upon this file

    runtime = hvdlite.runtime()
    everywhere = allgather_object([(made.ranks, made.mpi_comm is not None) for made in process_sets])
    if len({len(lists) for lists in everywhere}) > 1:
        raise ValueError(
            f"process_sets has {[len(lists) for lists in everywhere]} sets on the ranks; pass the same ones"
        )
    seen, duplicates = {0}, []
    for position, made in enumerate(process_sets):
        named = [lists[position] for lists in everywhere]
        others = [rank for rank, (ranks, _) in enumerate(named) if ranks != named[0][0]]
        if others and not all(is_part for _, is_part in named):
            raise MismatchError(
                f"process_sets: set {position} has ranks {named[0][0]} on rank 0 but {named[others[0]][0]} on rank "
                f"{others[0]}. Name the same ranks on every rank."
            )
        for ranks, _ in named:
            if runtime.group_number(ranks) is None:
                runtime.add_group(ranks)
        number = runtime.group_number(made.ranks)
        assert number is not None
        if number in seen:
            duplicates.append(made)
            continue
        seen.add(number)
        made.register(runtime, number, runtime.groups.get(number))
    if duplicates:
        raise ValueError(f"process_sets: {duplicates[0]} has the ranks of another process set; leave it out")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take back `add_process_set`; all ranks of the job call it. Its operations in flight fail.

    Returns:
        Whether it was registered; `global_process_set` stays.
    """
    return process_set.remove(hvdlite.runtime())


def check_process_set(process_set: ProcessSet) -> ProcessSet:
    """``process_set`` itself.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}; pass hvd.global_process_set or an hvd.ProcessSet")
    return process_set
