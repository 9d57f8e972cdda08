"""A blocking operation that comes again and again: all that is the same every time, and its native call, made once."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hvdlite._native import DirectCall
from hvdlite.collectives.base import PreparedCall
from hvdlite.coordinator.prepared import Outcome, outcome_at, outcome_of
from hvdlite.coordinator.remembered import Remembered
from hvdlite.coordinator.submission import Submission
from hvdlite.group import Group
from hvdlite.memory.base import Home
from hvdlite.memory.views import TensorView
from hvdlite.operations.operation import Operation
from hvdlite.recorder import Lane

if TYPE_CHECKING:
    from hvdlite._native import Signature

P = TypeVar("P", bound="PreparedOperation")

_NOT_YET = Outcome.NOT_YET


class Tensors(NamedTuple):
    """Addresses of what this rank gives, and of where its results go; 0 contributes zeros.

    Attributes:
        home: where they live, if the request says so.
        owner: keeps all of them alive; the object that the caller gets is its last part.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    home: Home | None
    owner: Any


class PreparedOperation:
    """``request``, as one call of the backend of ``group``; what `Group.perform` takes, with `Tensors`.

    Args:
        nbytes: of what is done, and ``dtype`` the label of its type, for people.

    Attributes:
        gives: whether the tensors of this rank are what it contributes; else zeros are.
        new_result: makes the tensor that the caller gets, of that which is passed and of so many rows; None where it is
            like that.
        home_memory: in which its tensors live, if they live in one place; a weak reference.
    """

    lane: Lane | None = None
    """In which the timeline shows it."""
    gives = True
    home_memory: weakref.ref[Any] | None = None

    def __init__(self, group: Group, request: Operation, call: PreparedCall, nbytes: int = 0, dtype: str = "") -> None:
        self.request = request
        self.label = request.name
        self.signature: Signature | None = None
        self.direct = call.direct
        self.new_result: Callable[[Any, int], Any] | None = None
        self._call = call
        self._run = call.run
        self._executed = group.world.engine.executed
        self._recorder = group.recorder
        self._nbytes = nbytes
        self._reduced_bytes = nbytes if request.reduced_types else 0
        self._dtype = dtype

    @property
    def is_valid(self) -> bool:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        return True

    @property
    def native(self) -> PreparedOperation | None:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        return None if self.signature is None or self.direct is None else self

    def run(self, tensors: Tensors, plan: int, count: int, heard: int) -> Outcome:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        start_ns = time.monotonic_ns() if self._recorder.enabled else 0
        outcome = self.ended(self._run(tensors.inputs, tensors.outputs, plan, count, heard), tensors)
        if start_ns and outcome is not _NOT_YET:
            ready_ns = self._call.ready_ns()
            if ready_ns:
                self._record(start_ns, ready_ns, time.monotonic_ns())
        return outcome

    def ended(self, result: int, tensors: Tensors) -> Outcome:
        """See `hvdlite.coordinator.prepared.Native`."""
        outcome = outcome_of(result)
        if outcome is Outcome.FAILED:
            outcome = outcome_of(self._call.resume(result))
            if outcome is not _NOT_YET:
                self._count(1)
            return outcome
        if outcome is not _NOT_YET:
            self.count_done(1)
        return outcome

    def count_done(self, times: int) -> None:
        """See `hvdlite.coordinator.prepared.Native`."""
        self._call.count_done(times)
        self._count(times)

    def _count(self, times: int) -> None:
        self._executed.buckets += times
        self._executed.reduced_bytes += times * self._reduced_bytes

    def _record(self, start_ns: int, ready_ns: int, end_ns: int) -> None:
        add, kind = self._recorder.add, self.request.label
        add(Lane.NEGOTIATION, f"NEGOTIATE_{kind.upper()} {kind}.{self.label}", start_ns, ready_ns)
        went_on = self._call.last()[-1] == DirectCall.BEGUN  # step by step, which has recorded each
        if self.lane is not None and not went_on:
            add(self.lane, self.label, ready_ns, end_ns, self._nbytes, self._dtype)

    def outcome(self, plan: int, count: int) -> Outcome | None:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        return outcome_at(self._call.last(), plan, count)

    def submission(self, sequence: int, tensors: Tensors) -> Submission:
        """See `hvdlite.coordinator.prepared.Prepared`."""
        inputs = self._views(tensors.inputs, tensors.owner)
        outputs = inputs if tensors.outputs is tensors.inputs else self._views(tensors.outputs, tensors.owner)
        return Submission(self.request, sequence, inputs, outputs, home=tensors.home)

    def tensors(self, source: int, target: int, owner: object) -> Tensors:
        """See `hvdlite.coordinator.prepared.Native`."""
        inputs = [source if self.gives else 0]
        return Tensors(inputs, inputs if [target] == inputs else [target], self._home_of(source), owner)

    def _home_of(self, source: int) -> Home | None:
        return None

    def _views(self, addresses: Sequence[int], owner: object) -> list[TensorView]:
        specs = self.request.tensors
        return [TensorView(at, spec.shape, spec.dtype, owner) for at, spec in zip(addresses, specs, strict=True)]


def prepared_once(group: Group, key: Hashable, make: Callable[[], P | None]) -> P | None:
    """What ``make`` has made for ``key``, which it does once; None where it cannot be prepared."""
    known: Remembered[P | None] = group.world.coordinator.at_once.prepared
    if key in known:
        prepared = known[key]
        if prepared is None or prepared.is_valid:
            return prepared
    return known.remember(key, make())


def has_come_before(group: Group, key: Hashable) -> bool:
    """Whether this was asked for ``key``: what is another one each time, as with other rows, is prepared in vain."""
    known = group.world.coordinator.at_once.seen
    if key in known:
        return True
    known.remember(key, None)
    return False


def can_be_prepared(group: Group) -> bool:
    """Whether what repeats is done in one call now; a profiler sees more if it is not."""
    return group.world.coordinator.runs_free and not group.recorder.profiler._is_profiler_enabled
