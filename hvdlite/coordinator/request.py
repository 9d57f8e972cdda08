"""An operation as far as ranks must agree on it: all that the coordinator knows of it.

Each kind of operation is a subclass of `Request`, in a file of its own in operations/.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from hvdlite.dtypes import DType

NAMED = -1
"""Sequence number of an operation that the user named; unnamed ones count per operation."""

Key = tuple[str, int]
"""(name, sequence): what ranks must agree on to mean the same operation."""

_NAMES = 4  # of tensors, that a message lists


def title_of(operation: str, name: str | None) -> str:
    """What people see of an operation, by its user's ``name``: "allreduce 'loss'"."""
    return operation if name is None else f"{operation} '{name}'"


class TensorSpec(NamedTuple):
    """A tensor as it must be on every rank; ``shape`` leaves out dimension 0 where that may differ between ranks."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    is_on_device: bool = False


class Difference(NamedTuple):
    """Something in which two requests of one name must not differ."""

    tensor: str  # empty: the whole operation
    what: str
    mine: object
    theirs: object
    advice: str


@dataclass(frozen=True, eq=False)
class Request:
    """An operation as it must be on every rank.

    An operation that comes again, as in every step of training, has the same request object, not an equal one. So what
    follows from a request is kept in the object, and who looks for one compares addresses before contents.
    """

    name: str
    tensors: tuple[TensorSpec, ...] = ()

    label: ClassVar[str]
    """The kind of operation, for people and on the wire."""
    is_ragged: ClassVar[bool] = False
    """Dimension 0 of its tensors may differ between ranks, which tell one another when they do it."""
    repeats: ClassVar[bool] = False
    """It may be part of a frozen plan: nothing of it varies between ranks."""
    unsettles: ClassVar[bool] = False
    """What comes after it comes in another order, so that a frozen plan ends with it."""
    departs: ClassVar[bool] = False
    """A rank that submits it is absent from all other operations until all ranks have submitted it."""

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        return tuple(getattr(self, item.name) for item in fields(self))

    @cached_property
    def _hash(self) -> int:
        return hash((self.label, self._content))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._content == other._content)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._content

    @cached_property
    def tensors_on_device(self) -> int:
        """How many of its tensors are in the memory of a GPU."""
        return sum(spec.is_on_device for spec in self.tensors)

    # Agreement.

    def settled(self) -> Request:
        """Without what may differ between ranks."""
        return self

    def differences(self, other: Any) -> Iterator[Difference]:
        """What must be the same in ``other``, a request of the same kind; the first that is not is reported."""
        same_list = "Pass the same list of tensors on every rank"
        yield Difference("", "number of tensors", len(self.tensors), len(other.tensors), same_list)
        where = "shape after the first dimension" if self.is_ragged else "shape"
        elsewhere = "in all dimensions but the first" if self.is_ragged else "or use allgather for ragged tensors"
        for i, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if mine == theirs:
                continue
            order = "Pass the tensors in the same order on every rank"
            yield Difference(mine.name, f"name of tensor {i} of the group", repr(mine.name), repr(theirs.name), order)
            convert = "Convert it to the same dtype on every rank"
            yield Difference(mine.name, "dtype", mine.dtype.label, theirs.dtype.label, convert)
            here, there = (("the CPU", "a GPU")[spec.is_on_device] for spec in (mine, theirs))
            yield Difference(mine.name, "device", here, there, "Pass tensors on the same kind of device on every rank")
            pass_same = f"Pass the same shape on every rank, {elsewhere}"
            yield Difference(mine.name, where, mine.shape, theirs.shape, pass_same)

    def objection(self, absent: Sequence[int]) -> str | None:
        """Why the ranks ``absent`` must take part: what follows "ranks 1 and 2 called join()"; None if not."""
        return None

    @property
    def fusion(self) -> tuple[Hashable, int]:
        """What must be equal for two requests to travel together, None where one goes alone; and its bytes."""
        return None, 0

    @property
    def subject(self) -> str:
        """What it is about, for people: its only tensor, or its name."""
        return self.tensors[0].name if len(self.tensors) == 1 else self.name

    @property
    def contents(self) -> str:
        """The tensors in it, for people, as "a, b and 7 more"; empty where its name says it all."""
        names = [spec.name for spec in self.tensors if spec.name != self.name]
        if not names or names[0] == f"{self.name}.0":
            return ""
        if len(names) > _NAMES + 1:
            return f"{', '.join(names[:_NAMES])} and {len(names) - _NAMES} more"
        return ", ".join(names)
