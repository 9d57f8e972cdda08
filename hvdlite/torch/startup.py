"""hvd.init, which registers process sets and compares versions of torch; and a restart that keeps process sets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

import hvdlite
from hvdlite import default_runtime
from hvdlite.errors import ConfigError, MismatchError
from hvdlite.recovery.survivors import Survivors
from hvdlite.torch.functions import allgather_object
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.ranges import profiler_of_this_process

if TYPE_CHECKING:
    from mpi4py import MPI

_LOG = logging.getLogger("hvdlite")


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """`hvdlite.init`, which also sees to it that every rank runs the same version of torch, and registers process sets.

    Args:
        comm: who takes part; see `hvdlite.init`.
        process_sets: registered in this order, the same on every rank; of a communicator that was split, each rank
            passes its part. "dynamic", which Horovod needs for sets that are added later, is accepted; they always can
            be.

    Raises:
        ValueError: something in ``process_sets`` is no process set; or two have the same ranks: those that are not
            duplicates stay registered, and another init() with them makes the objects that it is given usable.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets is {process_sets!r}; pass a list of hvd.ProcessSet, or 'dynamic'")
        process_sets = None
    for made in process_sets or ():
        check_process_set(made)
    member = default_runtime.membership()
    if process_sets and isinstance(member, Survivors):
        member.hindrance = "hvd.init(process_sets=...) names them all"
    elif process_sets and member is not None:
        raise ConfigError(
            "hvd.init(process_sets=[...]) names ranks, which change under `hvdliterun --elastic`: call "
            "hvd.add_process_set in the training function, which all ranks begin together"
        )
    if not hvdlite.is_initialized():
        hvdlite.init(comm, versions={"torch": torch.__version__})
        global_process_set.mpi_comm = None if comm is None or isinstance(comm, Sequence) else comm
    _show_in_profiler()
    if process_sets:
        _register(process_sets)


def _show_in_profiler() -> None:
    """Let torch.profiler and Nsight show what the timeline does: waits, and reductions on the threads they profile."""
    runtime = hvdlite.runtime()
    runtime.recorder.profiler = profiler_of_this_process(runtime.config.disable_nvtx_ranges)


def _register(process_sets: Sequence[ProcessSet]) -> None:
    """Register what is not registered yet, and make every set of the list usable; all ranks call it.

    The sets of a position may differ between ranks where they come from parts of one communicator that was split.

    Raises:
        ValueError: a set of the list has the ranks of another, or all ranks; the others are usable.
        MismatchError: ranks named other ranks.
    """
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
        made.process_set_id = number
    if duplicates:
        raise ValueError(f"process_sets: {duplicates[0]} has the ranks of another process set; leave it out")


def restart(*, follows_rank_0: bool = True) -> None:
    """Call `hvdlite.restart`, and register the same process sets under the same numbers. Collective.

    A `ProcessSet` is known by its number and its ranks, so the objects that programs hold stay usable. Where ranks have
    come or gone, the sets are gone.

    Raises:
        NotInitializedError: hvdlite does not run in this process.
    """
    sets = hvdlite.runtime().process_sets()
    member = default_runtime.membership()
    before = () if member is None or member.generation is None else member.generation.workers
    hvdlite.restart(follows_rank_0=follows_rank_0)
    _show_in_profiler()
    runtime = hvdlite.runtime()
    if member is not None and member.generation is not None and member.generation.workers != before:
        if len(sets) > 1:
            _LOG.warning("process sets are gone, as the ranks have changed: add them in the training function")
        return
    for wanted, ranks in sets.items():
        if wanted == 0:
            continue
        number, _ = runtime.add_group(ranks)
        while number < wanted:  # sets that were removed have taken numbers
            runtime.remove_group(number)
            number, _ = runtime.add_group(ranks)
