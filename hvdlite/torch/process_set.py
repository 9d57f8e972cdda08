"""Process sets: the ranks that take part in an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import hvdlite
from hvdlite import mpi
from hvdlite.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI


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

    Raises:
        ValueError: ``ranks_or_comm`` is neither.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Comm) -> None:
        self.process_set_id: int | None = None
        self.shortcuts: Any = None
        """See hvdlite/torch/shortcuts.py."""
        self.mpi_comm: MPI.Comm | None = None
        self._ranks: list[int] | None = None
        self._process_group: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None = None
        """See `process_group`; beside torch's default group, with which it ends."""
        if isinstance(ranks_or_comm, Iterable):
            self._ranks = sorted(int(rank) for rank in ranks_or_comm)
        elif hasattr(ranks_or_comm, "Get_group"):  # asked so, since a job without MPI does not import mpi4py
            self.mpi_comm = ranks_or_comm
        else:
            example = f"[{ranks_or_comm}]" if isinstance(ranks_or_comm, int) else "[0, 1]"
            raise ValueError(
                f"a process set of {ranks_or_comm!r}: pass a list of ranks, {example}, or an mpi4py communicator"
            )

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, ascending."""
        if self._ranks is None:
            assert self.mpi_comm is not None
            self._ranks = sorted(hvdlite.runtime().ranks_of(mpi.world_ranks_of(self.mpi_comm)))
        return self._ranks

    def group(self) -> Group:
        """What carries its operations.

        Raises:
            NotInitializedError: hvdlite does not run in this process.
            ValueError: it is not registered, or this rank is not a member.
        """
        group = self.group_of_members()
        if group is None:
            raise ValueError(f"rank {hvdlite.rank()} is not a member of {self}; only members may call its operations")
        return group

    def group_of_members(self) -> Group | None:
        """`group`, and None where this rank is not a member."""
        runtime = hvdlite.runtime()
        if not self.is_registered():
            raise ValueError(
                f"{self} is not registered; pass it to hvd.add_process_set, or to hvd.init(process_sets=[...])"
            )
        assert self.process_set_id is not None
        return runtime.groups.get(self.process_set_id)

    def is_registered(self) -> bool:
        """Whether the job has a process set of its number and its ranks."""
        return self.process_set_id is not None and hvdlite.runtime().group_number(self.ranks) == self.process_set_id

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None) -> ProcessSet | None:
        """The process set of the ranks of a process group of torch.distributed; all ranks of the job call it.

        Each gives a group of its own, as ranks of a DeviceMesh have; what is not registered yet is.

        Args:
            group: None, or what torch returns to those who are no members: this rank has none.

        Returns:
            None where this rank has no group.

        Raises:
            ValueError: torch.distributed and hvdlite have other ranks.
        """
        _check_same_ranks()
        is_member = isinstance(group, dist.ProcessGroup)
        own = sorted(dist.get_process_group_ranks(group)) if is_member else None
        given: list[list[int] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(given, own)
        for ranks in dict.fromkeys(tuple(ranks) for ranks in given if ranks is not None):
            if hvdlite.runtime().group_number(ranks) is None:
                add_process_set(list(ranks))
        if own is None:
            return None
        process_set = _of_ranks(own)
        process_set._process_group = (dist.group.WORLD, group)
        return process_set

    def process_group(self, **options: Any) -> dist.ProcessGroup | None:
        """The process group of torch.distributed of these ranks: that of `from_group`, or else one over hvdlite.

        The first call makes it, and all ranks of the job make that call; later ones return the same.

        Args:
            options: of ``dist.new_group``, for a group of its own at each call.

        Returns:
            None where this rank is no member.

        Raises:
            ValueError: torch.distributed and hvdlite have other ranks.
        """
        _check_same_ranks()
        if not options and self._process_group is not None and self._process_group[0] is dist.group.WORLD:
            return self._process_group[1]
        made = dist.new_group(self.ranks, **{"backend": "hvdlite", **options})
        group = made if self.included() else None
        if not options:
            self._process_group = (dist.group.WORLD, group)
        return group

    def moment(self) -> tuple[int, int]:
        """Now, for `next_number`: which group this is, and how often all its members have joined.

        (0, 0) while hvdlite does not run, and of who is no member.
        """
        group = self.group_of_members() if hvdlite.is_initialized() and self.is_registered() else None
        return (0, 0) if group is None else (group.made_ns, group.joins)

    def next_number(self, made: tuple[int, int], kind: str, shape: str) -> int:
        """See `hvdlite.group.Group.next_number`; ``made`` is the `moment` at which it was."""
        group = self.group()
        made_ns, joins = made
        return group.next_number(joins if made_ns == group.made_ns else 0, kind, shape)

    def size(self) -> int:
        """How many members there are."""
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


def _check_same_ranks() -> None:
    if not dist.is_initialized():
        raise ValueError('torch.distributed does not run: call dist.init_process_group("hvdlite") first')
    if (dist.get_rank(), dist.get_world_size()) != (hvdlite.rank(), hvdlite.size()):
        raise ValueError(
            f"this is rank {dist.get_rank()} of {dist.get_world_size()} to torch.distributed, but rank "
            f"{hvdlite.rank()} of {hvdlite.size()} to hvdlite; start both on the same ranks"
        )


def _of_ranks(ranks: list[int]) -> ProcessSet:
    """Unpickle: the set of ``ranks``, registered where the job has one."""
    process_set = ProcessSet(ranks)
    if hvdlite.is_initialized():
        process_set.process_set_id = hvdlite.runtime().group_number(ranks)
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
    added.process_set_id, _ = hvdlite.runtime().add_group(added.ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take back `add_process_set`; all ranks of the job call it. Its operations in flight fail.

    Returns:
        Whether it was registered; `global_process_set` stays.

    Raises:
        ValueError: ``process_set`` is none.
    """
    number = check_process_set(process_set).process_set_id
    runtime = hvdlite.runtime()
    if not number or not process_set.is_registered():
        return False
    runtime.remove_group(number)
    process_set.process_set_id = None
    return True


def check_process_set(process_set: ProcessSet) -> ProcessSet:
    """``process_set`` itself.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}; pass hvd.global_process_set or an hvd.ProcessSet")
    return process_set
