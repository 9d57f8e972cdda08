"""Operations of a frozen plan that are submitted one after the other, handed over and done as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from hvdlite._native import Signatures
from hvdlite.coordinator.request import NAMED, Key, Request
from hvdlite.coordinator.submission import Future, Submission, label_of
from hvdlite.memory.views import TensorView

BURST_S = 0.1
"""How long one may take to come: long, since who is only slow is not to lose a plan; who waits says so at once."""

Part = tuple[int, int, int, object]
"""Of an operation: addresses of its input and its output, its sequence number, and what keeps the memory alive.

One tuple, so that an interrupt comes before it is submitted, or after."""

Run = Callable[[Sequence[int], Sequence[int], str], object]
"""Does a burst: addresses of inputs and of outputs, one for each operation, and its name for people."""


class KnownBurst:
    """What is the same of a burst in every period of a plan.

    Args:
        entries: (request, sequence) of its operations, as they came before.
        end: place in the period of what comes after it.

    Attributes:
        names: keys of those operations that have a name; others have another key every time.
        run: None until it is done for the first time.
        signatures: of its operations, what a caller passes.
    """

    def __init__(self, entries: Sequence[tuple[Request, int]], end: int) -> None:
        self.end = end
        self.requests = [request for request, _ in entries]
        self.names = frozenset((request.name, NAMED) for request, sequence in entries if sequence == NAMED)
        self.label = f"{self.requests[0].name} and {len(entries) - 1} more"
        self.run: Run | None = None
        self.signatures = Signatures(len(entries))

    @property
    def can_be_collected(self) -> bool:
        """Whether each operation is of one tensor on the host."""
        return all(len(request.tensors) == 1 and not request.tensors_on_device for request in self.requests)


class Burst(Future):
    """One time that a `KnownBurst` is submitted.

    Args:
        since_ns: when the first of it was, by `time.monotonic_ns`.
        pause_s: before that, see `hvdlite.coordinator.submission.Pace.step`.
        take_apart: calls `apart`.

    Attributes:
        parts: of every operation that was submitted so far.
        is_open: more of it is to come.
        has_succeeded: all of it is done, as one.
        complete: of one that was started, and the thread was not rung for: does the rest, once all ranks have started
            it, for which it waits if it is told to; it may also do nothing, and leave it to the thread.
    """

    __slots__ = (
        "_apart", "_keys", "_take_apart", "complete", "has_succeeded", "is_open", "known", "parts", "pause_s",
        "since_ns",
    )  # fmt: skip

    def __init__(self, known: KnownBurst, since_ns: int, pause_s: float, take_apart: Callable[[], object]) -> None:
        super().__init__()
        self.known = known
        self.since_ns = since_ns
        self.pause_s = pause_s
        self.parts: list[Part] = []
        self.is_open = True
        self.has_succeeded = False
        self.complete: Callable[[Burst, bool], None] | None = None
        self._take_apart = take_apart
        self._apart: Sequence[Submission] = ()
        self._keys: Collection[Key] = ()

    @property
    def label(self) -> str:  # type: ignore[override]
        """Its name for people."""
        return self.known.label

    @property
    def keys(self) -> Collection[Key]:
        """Of all that was submitted of it."""
        if self._keys:
            return self._keys
        names, parts, requests = self.known.names, self.parts, self.known.requests
        if len(names) == len(parts):
            return names
        keys = [(request.name, part[2]) for request, part in zip(requests, parts, strict=False)]
        if len(parts) == len(requests):  # which are all
            self._keys = keys
        return keys

    def labels(self) -> Iterator[tuple[Request, str]]:
        """The request of every operation, and its name for people."""
        for request, part in zip(self.known.requests, self.parts, strict=True):
            yield request, label_of(request, part[2])

    def wait(self, number: int) -> None:
        """Sleep until operation ``number`` of it is complete; raises what it ended in."""
        if self.is_open:  # the rest may come only after this
            self._take_apart()
        self.ask()
        if self.complete is not None and not self.is_done:
            self.complete(self, True)
        self._sleep()
        if self._apart:
            self._apart[number].wait()
        else:
            self._raise()

    def poll(self, number: int) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if self.is_open:
            self._take_apart()
        self.ask(waits=False)
        if self.complete is not None and not self.is_done:
            self.complete(self, False)
        if self._apart:
            return self._apart[number].poll()
        if not self.is_done:
            self._give_way()
        return self.is_done

    def succeed(self) -> None:
        """All of it is done."""
        self.parts.clear()  # who keeps a handle keeps the memory of one operation, not of all
        self.has_succeeded = True
        self._complete()

    def apart(self) -> Sequence[Submission]:
        """What was submitted of it as so many submissions, which are waited for from now on; none if it has failed."""
        if not self.is_done:
            self._apart = [self._submission(*made) for made in zip(self.known.requests, self.parts, strict=False)]
            if self._apart:
                self._apart[0].pause_s = self.pause_s
            self.is_open = False
            self._complete()
        return self._apart

    def _submission(self, request: Request, part: Part) -> Submission:
        spec, (source, target, sequence, owner) = request.tensors[0], part
        inputs, outputs = ([TensorView(at, spec.shape, spec.dtype, owner)] for at in (source, target))
        made = Submission(request, sequence, inputs, inputs if source == target else outputs)
        made.assist, made.pace, made.submitted_ns = self.assist, self.pace, self.since_ns
        return made
