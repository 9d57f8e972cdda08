"""Random programs: sequences of legal and illegal operations that every rank draws alike, and what must come of them.

A `Step` is one operation: what its ranks submit, who of them contradicts the others, and in what. `Step.results` and
`Step.fault` say in closed form, for any rank, how it ends. Nothing here communicates.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.dtypes import ReduceOp
from hvdlite.operations.reducescatter import row_bounds
from hvdlite.torch.tensor_view import dtype_of
from torch_lab import REDUCING

SETS: dict[int, list[list[int]]] = {2: [[1]], 3: [[0, 1], [1, 2]], 4: [[0, 1, 2], [1, 3]]}
"""Ranks of process sets 1, 2, ... by the number of ranks of the job."""

OPERATIONS = {
    "allreduce": 6, "grouped_allreduce": 3, "allgather": 3, "grouped_allgather": 2, "broadcast": 3, "alltoall": 3,
    "reducescatter": 2, "grouped_reducescatter": 1, "barrier": 1,
}  # fmt: skip
SIZES = [0, 1, 2, 3, 5, 16, 63, 64, 65, 127, 257, 1000, 2049, 3001]
NAMES = [f"tensor {i}" for i in range(25)]
MISTAKES = {  # that a rank makes and hears of at once, before it does the right thing
    "allreduce": ["bool", "complex", "unregistered set", "op"],
    "grouped_allreduce": ["bool", "sparse", "unregistered set", "op"],
    "allgather": ["complex", "sparse", "unregistered set"],
    "grouped_allgather": ["meta", "unregistered set"],
    "broadcast": ["root", "complex", "unregistered set"],
    "alltoall": ["splits", "complex", "scalar", "unregistered set"],
    "reducescatter": ["scalar", "op", "bool", "unregistered set"],
    "grouped_reducescatter": ["scalar", "op", "meta", "unregistered set"],
}


@dataclass(frozen=True)
class Call:
    """What one rank passes to hvd."""

    operation: str
    process_set: int
    name: str | None
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()  # without dimension 0 where that may differ between ranks
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    compression: Any = hvd.Compression.none
    waits: bool = False  # for the result, before it goes on
    in_place: bool = False
    has_splits: bool = False

    def __str__(self) -> str:
        """Without what has its usual value."""
        said = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)
            if getattr(self, item.name) not in (item.default, ())
        ]
        return f"{self.operation}({', '.join(said[1:])})"

    @property
    def kind(self) -> str:
        """What the ranks agree on; a group of tensors is no kind of its own."""
        return self.operation.removeprefix("grouped_")

    @property
    def reduces(self) -> bool:
        return self.kind in ("allreduce", "reducescatter")

    @property
    def is_ragged(self) -> bool:
        return self.kind in ("allgather", "alltoall")

    @property
    def is_grouped(self) -> bool:
        return self.operation.startswith("grouped_")

    @property
    def full_name(self) -> str:
        return f"{self.kind}.noname" if self.name is None else self.name

    def tensor_name(self, index: int) -> str:
        alone = len(self.shapes) == 1 and (self.name is None or not self.is_grouped)
        return self.full_name if alone else f"{self.full_name}.{index}"

    @property
    def label(self) -> str:
        """Its name in errors that are not about one of several tensors."""
        return self.tensor_name(0) if len(self.shapes) == 1 else self.full_name


@dataclass(frozen=True)
class Step:
    """One operation of a program, the same on every rank."""

    number: int
    salt: int
    members: tuple[int, ...]
    call: Call
    odd_rank: int | None = None
    odd_call: Call | None = None
    difference: str = ""
    mistakes: dict[int, str] = field(default_factory=dict)  # by rank
    early_rank: int | None = None  # submits, and once more under this name, before the others submit
    submitters: tuple[int, ...] = ()  # all members but those that have joined

    def __str__(self) -> str:
        said = [f"{self.number}: {self.call}", f"by {self.submitters} of {self.members}"]
        said += [f"on rank {self.odd_rank} {self.odd_call}"] * (self.odd_call is not None)
        said += [f"first wrongly {self.mistakes}"] * bool(self.mistakes)
        said += [f"rank {self.early_rank} first, and twice"] * (self.early_rank is not None)
        return ", ".join(said)

    def call_of(self, rank: int) -> Call:
        return self.odd_call if rank == self.odd_rank and self.odd_call is not None else self.call

    # Inputs: any rank can compute those of any rank. Small integers, so that the results are exact in every dtype.

    def inputs(self, rank: int) -> list[torch.Tensor]:
        call = self.call_of(rank)
        return [
            filled((*self._rows(rank, i), *shape), dtype, 3 * rank + self.salt + i)
            for i, (shape, dtype) in enumerate(zip(call.shapes, call.dtypes, strict=True))
        ]

    def splits(self, rank: int) -> list[int]:
        """Rows to each member, by this one."""
        place = self.members.index(rank)
        if not self.call_of(rank).has_splits:
            return [self.salt % 3] * len(self.members)
        return [(self.salt + place + 2 * receiver) % 3 for receiver in range(len(self.members))]

    def _rows(self, rank: int, index: int) -> tuple[int, ...]:
        call = self.call_of(rank)
        if call.kind == "alltoall":
            rest = self.salt % 2 if call.has_splits else 0  # rows that go nowhere
            return (sum(self.splits(rank)) + rest,)
        return ((self.salt + 3 * rank + index) % 5,) if call.is_ragged else ()

    # How it ends.

    def fault(self) -> str | None:
        """The beginning of the error on every rank; None where there is none."""
        calls = {rank: self.call_of(rank) for rank in self.submitters}
        first = calls[self.submitters[0]]
        there = [rank for rank in self.submitters if rank != self.odd_rank]
        if self.odd_call is not None and self.odd_rank in self.submitters and there:
            what, label, value, odd_value = self._contradiction(first)
            text = {tuple(there): value, (self.odd_rank,): odd_value}
            (a, a_value), (b, b_value) = sorted(text.items())
            return f"{first.kind} '{label}': {what} is {a_value} on {ranks(a)} but {b_value} on {ranks(b)}. "
        absent = tuple(sorted({*self.members} - {*self.submitters}))
        integers = {dtype for dtype in first.dtypes if not dtype.is_floating_point}
        has_identity = abs(first.prescale) <= 1.0 and (first.prescale >= 0.0 or torch.uint8 not in integers)
        if absent and integers and first.op is ReduceOp.PRODUCT and not has_identity:
            return f"{first.kind} '{first.label}': {ranks(absent)} called join(), and no integer times the prescale "
        if absent and first.kind in ("allgather", "alltoall", "broadcast"):
            return f"{first.kind} '{first.label}': {ranks(absent)} called join() and cannot take part. "
        return None

    def _contradiction(self, first: Call) -> tuple[str, str, object, object]:
        """(what differs, the name of what it differs in, its value, and that of the odd rank)."""
        a, b = self.call, self.odd_call
        assert b is not None
        if self.difference in ("dtype", "shape"):
            index = next(i for i in range(len(a.shapes)) if (a.dtypes[i], a.shapes[i]) != (b.dtypes[i], b.shapes[i]))
            if self.difference == "dtype":
                return "dtype", a.tensor_name(index), dtype_of(a.dtypes[index]).label, dtype_of(b.dtypes[index]).label
            what = "shape after the first dimension" if a.is_ragged else "shape"
            return what, a.tensor_name(index), a.shapes[index], b.shapes[index]
        what, value, odd_value = {
            "operation": ("operation", a.kind, b.kind),
            "tensors": ("number of tensors", len(a.shapes), len(b.shapes)),
            "op": ("op", a.op.label, b.op.label),
            "prescale": ("prescale factor", a.prescale, b.prescale),
            "postscale": ("postscale factor", a.postscale, b.postscale),
            "root": ("root rank", a.root, b.root),
            "compression": (
                "compression",
                *("none" if c.compression is hvd.Compression.none else "float16" for c in (a, b)),
            ),
        }[self.difference]
        return what, first.label, value, odd_value

    def results(self, rank: int) -> list[torch.Tensor]:
        """What ``rank`` gets where there is no fault."""
        call = self.call_of(self.submitters[0])
        if call.kind == "broadcast":
            return self.inputs(call.root)
        if call.kind == "alltoall":
            return self._received(rank)
        by_rank = [self.inputs(other) for other in self.submitters]
        if call.kind == "allgather":
            return [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
        full = [self._reduced(call, torch.stack(parts)) for parts in zip(*by_rank, strict=True)]
        if call.kind == "allreduce":
            return full
        place = self.members.index(rank)
        bounds = [row_bounds(tensor.shape[0], len(self.members)) for tensor in full]
        return [tensor[b[place] : b[place + 1]] for tensor, b in zip(full, bounds, strict=True)]

    def _received(self, rank: int) -> list[torch.Tensor]:
        place = self.members.index(rank)
        parts, counts = [], []
        for sender in self.members:
            bounds = [0, *torch.tensor(self.splits(sender)).cumsum(0).tolist()]
            parts.append(self.inputs(sender)[0][bounds[place] : bounds[place + 1]])
            counts.append(len(parts[-1]))
        received = [torch.tensor(counts, dtype=torch.int32)] if self.call.has_splits or not self.call.waits else []
        return [torch.cat(parts), *received]

    def _reduced(self, call: Call, stacked: torch.Tensor) -> torch.Tensor:
        """(submitters, ...) to (...)."""
        whole = not stacked.is_floating_point()

        def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
            return (tensor * factor).trunc() if whole else tensor * factor

        wide = scaled(stacked.double(), call.prescale)
        if call.op is ReduceOp.AVERAGE:  # over all members, also those that have joined
            result = wide.sum(0) * call.postscale / len(self.members)
            return (result.trunc() if whole else result).to(stacked.dtype)
        combined = {
            ReduceOp.SUM: wide.sum, ReduceOp.MIN: wide.amin, ReduceOp.MAX: wide.amax, ReduceOp.PRODUCT: wide.prod,
        }[call.op](0)  # fmt: skip
        return scaled(combined, call.postscale).to(stacked.dtype)

    def accepts(self, got: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether they are the same: to the bit, but for what is a third of something."""
        if got.dtype is not expected.dtype or got.shape != expected.shape:
            return False
        size = len(self.members)
        is_exact = self.call_of(self.submitters[0]).op is not ReduceOp.AVERAGE or size & (size - 1) == 0
        if is_exact or not got.is_floating_point():
            return torch.equal(got, expected)
        return torch.allclose(got, expected, rtol=4 * torch.finfo(got.dtype).eps, atol=0.0)


@dataclass(frozen=True)
class Program:
    """``steps``, in any order as far as that is legal; then ``last_steps``, of which rank r does the first
    ``stops[r]`` before it joins."""

    seed: int
    steps: tuple[Step, ...]
    last_steps: tuple[Step, ...] = ()
    stops: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [f"program {self.seed}", *map(str, self.steps)]
        if self.stops:
            lines += [f"then, before ranks join after {self.stops} of them,", *map(str, self.last_steps)]
        return "\n".join(lines)


def draw(seed: int, size: int) -> Program:
    """The same on every rank."""
    rng = random.Random(seed)
    sets = [tuple(range(size)), *map(tuple, SETS.get(size, []))]
    pen = _Pen(rng, sets, seed % 101)
    steps = tuple(pen.step(rng.randrange(len(sets))) for _ in range(rng.randint(1, 9)))
    if size == 1 or rng.random() > 0.15:
        return Program(seed, steps)
    count = rng.randint(1, 5)
    stops = tuple(rng.randint(0, count) for _ in range(size))
    last = []
    for number in range(max(stops)):
        there = tuple(rank for rank in range(size) if stops[rank] > number)
        step = replace(pen.step(0), submitters=there, early_rank=None)
        last.append(step)
    return Program(seed, steps, tuple(last), stops)


@dataclass(frozen=True)
class Loop:
    """Steps that all ranks take turn by turn, in the same order but seldom: mostly one of a few, which are frozen."""

    seed: int
    turns: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        steps = {step.number: step for turn in reversed(self.turns) for step in turn}
        lines = [f"loop {self.seed}, {len(self.turns)} turns, of", *map(str, steps.values()), "are"]
        for turns in itertools.groupby([step.number for step in turn] for turn in self.turns):
            lines.append(f"{len([*turns[1]])} x {turns[0]}")
        return "\n".join(lines)


def draw_loop(seed: int, size: int) -> Loop:
    """The same on every rank."""
    rng = random.Random(f"loop {seed}")
    pen = _Pen(rng, [tuple(range(size))], seed % 101)
    orders = [[pen.usual() for _ in range(rng.randint(1, 6))] for _ in range(rng.choice([1, 2, 2, 3]))]
    for order in orders[1:]:
        if rng.random() < 0.3:
            order.insert(rng.randrange(len(order) + 1), rng.choice(orders[0]))
    usual = [order for order in orders for _ in range(8)]  # each until it is frozen
    while len(usual) < 30 + 8 * len(orders) and (len(orders) > 1 or rng.random() < 0.95):
        usual += rng.randint(1, 4) * [rng.choice(orders)]
    turns = []
    for turn, order in enumerate(usual):
        steps = list(order)
        if turn > 8 and rng.random() < 0.15:
            place = rng.randrange(len(steps) + 1)
            if rng.random() < 0.5:
                steps[place : place + 1] = []
            if rng.random() < 0.7:
                steps.insert(place, replace(pen.step(0), early_rank=None))
        turns.append(tuple(replace(step, salt=step.salt + turn) for step in steps))
    return Loop(seed, tuple(turns))


class _Pen:
    """Writes steps."""

    def __init__(self, rng: random.Random, sets: list[tuple[int, ...]], salt: int) -> None:
        self._rng = rng
        self._sets = sets
        self._salt = salt
        self._names = [rng.sample(NAMES, len(NAMES)) for _ in sets]
        self._count = 0

    def step(self, process_set: int) -> Step:
        rng, members = self._rng, self._sets[process_set]
        call = self._call(process_set)
        step = Step(self._count, self._salt + self._count, members, call, submitters=members)
        self._count += 1
        if call.operation == "barrier":
            return step
        if len(members) > 1 and rng.random() < 0.2:
            step = self._contradicted(step)
        elif len(members) > 1 and call.name is not None and rng.random() < 0.06:
            step = replace(step, call=replace(call, waits=False), early_rank=rng.choice(members))
        if rng.random() < 0.1:
            wrong = {rank: rng.choice(MISTAKES[call.operation]) for rank in members if rng.random() < 0.5}
            step = replace(step, mistakes=wrong)
        return step

    def usual(self) -> Step:
        """A legal one of all ranks, mostly an allreduce of one tensor."""
        operation = "allreduce" if self._rng.random() < 0.8 else None
        call = self._call(0, operation)
        call = replace(call, waits=call.operation == "barrier" or self._rng.random() < 0.6)
        self._count += 1
        return Step(self._count - 1, self._salt + self._count, self._sets[0], call, submitters=self._sets[0])

    def _call(self, process_set: int, operation: str | None = None) -> Call:
        rng, members = self._rng, self._sets[process_set]
        operation = operation or rng.choices([*OPERATIONS], [*OPERATIONS.values()])[0]
        name = None if operation == "barrier" or rng.random() < 0.3 else self._names[process_set].pop()
        call = Call(operation, process_set, name, waits=operation == "barrier" or rng.random() < 0.15)
        if operation == "barrier":
            return call
        count = rng.randint(0, 4) if call.is_grouped else 1
        dtypes = REDUCING if call.reduces else [*REDUCING, torch.bool]
        # Groups of one dtype fuse with others.
        one = rng.choice(dtypes)
        chosen = [one if rng.random() < 0.6 else rng.choice(dtypes) for _ in range(count)]
        shapes = tuple(self._shape(call) for _ in range(count))
        call = replace(call, dtypes=tuple(chosen), shapes=shapes)
        if call.kind == "broadcast":
            return replace(call, root=rng.choice(members), in_place=rng.random() < 0.5)
        if call.kind == "alltoall":
            return replace(call, has_splits=rng.random() < 0.7)
        return self._reduction(call) if call.reduces else call

    def _reduction(self, call: Call) -> Call:
        rng = self._rng
        ops = [hvd.Sum, hvd.Sum, hvd.Average]
        ops += [hvd.Min, hvd.Max, hvd.Product] if call.kind == "allreduce" else []
        op = rng.choice(ops)
        signed = all(dtype is not torch.uint8 for dtype in call.dtypes)
        factors = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 2.0, 0.0] + [-1.0] * signed
        prescale, postscale = rng.choice(factors), rng.choice(factors)
        if op is hvd.Product:  # 8 * 8 * 8 is too much for int8
            prescale, postscale = prescale if prescale < 2.0 else 0.25, min(postscale, 1.0)
        in_place = call.kind == "allreduce" and rng.random() < 0.4
        return replace(call, op=op, prescale=prescale, postscale=postscale, in_place=in_place)

    def _shape(self, call: Call) -> tuple[int, ...]:
        rng = self._rng
        if call.is_ragged:
            return rng.choice([(), (), (1,), (3,), (0,), (2, 5), (200,)])
        if call.kind == "reducescatter":
            return rng.choice([(0,), (1,), (2,), (5,), (7, 3), (2, 0), (64, 2), (1000,), (3, 129)])
        return rng.choice([(), (3, 5), (2, 1, 4), *((size,) for size in SIZES)])

    def _contradicted(self, step: Step) -> Step:
        rng, call = self._rng, step.call
        differences = ["dtype", "shape"] if call.shapes else []
        differences += ["tensors"] * call.is_grouped + ["operation"] * (call.name is not None)
        differences += ["op", "prescale", "postscale"] * call.reduces
        if call.waits and call.reduces and not call.in_place and not step.mistakes:
            differences.append("compression")
        differences += ["root"] * (call.kind == "broadcast")
        if not differences:
            return step
        difference = rng.choice(differences)
        odd = self._other(call, difference, step.members)
        return replace(step, odd_rank=rng.choice(step.members), odd_call=odd, difference=difference)

    def _other(self, call: Call, difference: str, members: Sequence[int]) -> Call:
        """``call`` with one thing different, and legal in itself."""
        rng = self._rng
        index = rng.randrange(len(call.shapes)) if call.shapes else 0
        if difference == "dtype":
            choice = [d for d in REDUCING if d is not call.dtypes[index] and d is not torch.uint8]
            return replace(call, dtypes=_with(call.dtypes, index, rng.choice(choice)))
        if difference == "shape":
            shape = call.shapes[index]
            other = (*shape[:-1], shape[-1] + 1) if shape and rng.random() < 0.6 else (*shape, 2)
            return replace(call, shapes=_with(call.shapes, index, other))
        if difference == "tensors":
            more = self._shape(call)
            return replace(call, dtypes=(*call.dtypes, torch.float32), shapes=(*call.shapes, more))
        if difference == "operation":
            kind = rng.choice([k for k in ("allreduce", "allgather", "broadcast", "reducescatter") if k != call.kind])
            return Call(
                kind, call.process_set, call.name, (torch.float32,), ((3,),), root=members[0], waits=call.waits,
                in_place=kind in ("allreduce", "broadcast") and call.in_place,
            )  # fmt: skip
        if difference == "op":
            ops = [op for op in (hvd.Sum, hvd.Average) if op is not call.op]
            return replace(call, op=rng.choice(ops))
        if difference == "compression":
            return replace(call, compression=hvd.Compression.fp16)
        if difference == "root":
            return replace(call, root=rng.choice([rank for rank in members if rank != call.root]))
        return replace(call, **{difference: getattr(call, difference) + 0.25})


def filled(shape: tuple[int, ...], dtype: torch.dtype, salt: int) -> torch.Tensor:
    """1 to 4, or all kinds of bool: products of four with factors of two are exact in bfloat16, and fit int8."""
    values = (torch.arange(math.prod(shape)) * 7 + salt) % 4
    return (values % 2 if dtype is torch.bool else values + 1).to(dtype).reshape(shape)


def ranks(group: tuple[int, ...]) -> str:
    if len(group) == 1:
        return f"rank {group[0]}"
    return f"ranks {', '.join(map(str, group[:-1]))} and {group[-1]}"


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
