"""What the ranks of a process group must agree on about a call: they show cards, and compare texts if those differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from hvdlite.errors import MismatchError
from hvdlite.rank_list import rank_list

_UNSAID = {"device": "the CPU"}  # of what a call says nothing: by the name of the fact
TEXT_BYTES = 2048  # of what a rank says about a call, when ranks contradict one another


class Call(NamedTuple):
    """A call of a process group.

    Attributes:
        operation: torch's name of it.
        facts: what all ranks must mean alike, by name.
        card: of operation and facts; other calls have others.
    """

    operation: str
    facts: tuple[tuple[str, str], ...]
    card: int

    @property
    def on_gpus(self) -> Call:
        """The same call of tensors in the memory of GPUs."""
        return _on_gpus(self)

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(value for _, value in self.facts)})"

    @property
    def text(self) -> bytes:
        """Operation and facts, `TEXT_BYTES` at most; what is too long is cut."""
        facts = [(name, value if len(value) < 300 else f"{value[:300]}…") for name, value in self.facts]
        return json.dumps([self.operation, facts]).encode()[:TEXT_BYTES]


def _call(operation: str, *facts: tuple[str, object]) -> Call:
    told = tuple((name, str(value)) for name, value in facts if value is not None)
    digest = blake2b(json.dumps([operation, told]).encode(), digest_size=8).digest()
    return Call(operation, told, int.from_bytes(digest, "little"))


@lru_cache(maxsize=4096)
def _on_gpus(call: Call) -> Call:
    return _call(call.operation, *call.facts, ("device", "a GPU"))


@lru_cache(maxsize=4096)
def call_on(
    operation: str, shape: torch.Size, dtype: torch.dtype, op: str | None = None, root: int | None = None
) -> Call:
    """Of one tensor."""
    return _call(operation, ("shape", tuple(shape)), ("dtype", dtype), ("op", op), ("root", root))


@lru_cache(maxsize=1024)
def call_on_several(operation: str, shapes: tuple[torch.Size, ...], dtype: torch.dtype, op: str | None = None) -> Call:
    """Of several tensors."""
    listed = [tuple(shape) for shape in shapes]
    return _call(operation, ("number of tensors", len(listed)), ("shapes", listed), ("dtype", dtype), ("op", op))


@lru_cache(maxsize=64)
def call_on_sparse(operation: str, shape: torch.Size, dtype: torch.dtype, sparse_dim: int) -> Call:
    """Of one sparse tensor, whose indices have ``sparse_dim`` dimensions."""
    return _call(operation, ("shape", tuple(shape)), ("dtype", dtype), ("sparse dimensions", sparse_dim))


@lru_cache(maxsize=64)
def call_without_shape(operation: str, dtype: torch.dtype | None = None) -> Call:
    """Where ranks have tensors of different shapes, or none."""
    return _call(operation, ("dtype", dtype))


def contradiction(group: str, texts: Sequence[bytes], ranks: Sequence[int]) -> MismatchError:
    """What ``texts``, of the calls that the ranks have come for, say; the same on every rank."""
    said = [_parsed(text) for text in texts]
    operations = _who_means([operation for operation, _ in said], ranks)
    if len(operations) > 1:
        calls = _who_means([f"{operation}({', '.join(facts.values())})" for operation, facts in said], ranks)
        differences = ["they call " + " but ".join(f"{call} on {who}" for call, who in calls)]
    else:
        names = dict.fromkeys(name for _, facts in said for name in facts)
        meant = {
            name: _who_means([facts.get(name, _UNSAID.get(name, "none")) for _, facts in said], ranks) for name in names
        }
        differences = [
            f"{name} is " + " but ".join(f"{value} on {who}" for value, who in values)
            for name, values in meant.items()
            if len(values) > 1
        ] or ["they expect other sizes of one another than they send"]
    return MismatchError(
        f"{operations[0][0] if len(operations) == 1 else 'collectives'} of process group {group}: the ranks contradict "
        f"one another: {'; '.join(differences)}. Make the same calls in the same order with the same arguments on "
        "every rank of the group. Threads that call at the same time, as that of dcp.async_save does, need a group "
        "each: dist.new_group()."
    )


def _parsed(text: bytes) -> tuple[str, dict[str, str]]:
    said = text.rstrip(b"\0")
    try:
        operation, facts = json.loads(said)
        return str(operation), {str(name): str(value) for name, value in facts}
    except (ValueError, TypeError, RecursionError):  # it was too long, or is none of ours
        return said.decode(errors="replace"), {}


def _who_means(values: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, str]]:
    """(value, ranks that have it), in the order of ranks."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return [(value, rank_list(who)) for value, who in found.items()]
