"""The ranks that take part in an operation."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import hvdlite

if TYPE_CHECKING:
    from hvdlite.runtime import Runtime


_numbers: weakref.WeakKeyDictionary[Runtime, Iterator[int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ProcessSet:
    """A set of ranks; every operation takes one. `global_process_set` is all of them."""

    process_set_id: int

    def runtime(self) -> Runtime:
        """The runtime that carries its operations.

        Raises:
            ShutDownError: hvdlite is not running in this process.
        """
        return hvdlite.runtime()

    def next_number(self) -> int:
        """0, 1, 2, ... on one runtime: for names of what every rank makes in the same order."""
        return next(_numbers.setdefault(self.runtime(), itertools.count()))

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members."""
        return list(range(self.size()))

    def size(self) -> int:
        return hvdlite.size()

    def rank(self) -> int:
        """This process's rank among the members."""
        return hvdlite.rank()

    def included(self) -> bool:
        """Whether this process is a member."""
        return self.rank() in self.ranks


global_process_set = ProcessSet(0)


def check_process_set(process_set: ProcessSet) -> ProcessSet:
    """``process_set`` itself.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}; pass hvd.global_process_set")
    return process_set
