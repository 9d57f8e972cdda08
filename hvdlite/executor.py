"""Where what the ranks agreed on is executed: on the host, or on GPUs where its tensors are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.submission import Submission, label_of
from hvdlite.device_transfer import DeviceTransfer
from hvdlite.engine import Engine
from hvdlite.errors import gpu_blamed

if TYPE_CHECKING:
    from hvdlite._native import Moment
    from hvdlite.device_engine import DeviceEngine

# Who gives a stream more than about a thousand things is kept by the driver until it goes on, and nobody watches then.
# A bucket is some seven, and two for each other rank, in each window that it fills.
_MOST_ENQUEUED = 32
_NAP_S = 50e-6

Work = Sequence[tuple[Response, Submission | None]]
"""What all ranks agreed on; None stands for what this rank has not submitted because it has joined."""


class Labelled(Protocol):
    """What people know by a name."""

    label: str


class _Enqueued(NamedTuple):
    """What a GPU has to do together, and keeps alive."""

    moment: Moment
    what: Sequence[Labelled]
    since_s: float

    @property
    def label(self) -> str:
        return self.what[0].label


class Executor:
    """Executes buckets, one after the other, by the engine of the memory that has their tensors.

    An operation runs on GPUs if all its tensors are there and it can; if not, its tensors pass through the host.

    Args:
        host: the engine for memory of the host.
        build_device_engine: called when the first tensors on GPUs come, on all ranks alike, with this rank's GPU if it
            is known; returns None where the GPUs of these ranks cannot work together.
        timeout_s: the longest wait for a GPU whose tensors pass through the host.
        check: raises once the job has failed.
    """

    def __init__(
        self,
        host: Engine,
        build_device_engine: Callable[[int | None], DeviceEngine | None],
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self._host = host
        self._build_device_engine = build_device_engine
        self._check = check
        self._transfer = DeviceTransfer(host.recorder, timeout_s, check)
        self._device: DeviceEngine | None = None
        self._has_device = False  # whether it is known if there is one
        self._enqueued: deque[_Enqueued] = deque()
        self.own_gpu: int | None = None
        """That of this rank, where it has said so before it joined."""

    def execute(self, work: Work) -> object:
        """Do what all ranks agreed on; return what the user gets."""
        operation: Any = work[0][0].request
        host = self._host
        host.executed.buckets += 1
        on_device = operation.tensors_on_device
        if not on_device:
            bucket, label = _bucket(work, host)
            return operation.run(host, bucket, label)
        with gpu_blamed(host.ranks[host.rank], f"'{label_of(operation, work[0][0].sequence)}'"):
            device = self.device_for(self._ordinal(work)) if on_device == len(operation.tensors) else None
            if device is None or not device.can_run(operation):
                bucket, label = _bucket(work, host)
                return self._transfer.run(bucket, lambda on_host: operation.run(host, on_host, label), label)
            return self._enqueue(device, work)

    def _ordinal(self, work: Work) -> int | None:
        """The GPU of this rank; None where it has joined, and has not said which."""
        for _, submission in work:
            if submission is not None and submission.device is not None:
                return submission.device.ordinal
        return self.own_gpu

    def execute_burst(self, burst: Burst) -> None:
        """Do all of it; each operation is of one tensor on the host."""
        known, host = burst.known, self._host
        host.executed.buckets += 1
        if known.run is None:
            operation: Any = known.requests[0]
            known.run = operation.prepare_burst(host, known.requests)
        known.run([part[0] for part in burst.parts], [part[1] for part in burst.parts], burst.label)

    def _enqueue(self, device: DeviceEngine, work: Work) -> object:
        """Have the GPU do it, after what the tensors' streams did before they were handed over."""
        operation: Any = work[0][0].request
        bucket, label = _bucket(work, device.engine)
        views = [view for _, submission in bucket for view in (*submission.inputs, *submission.outputs)]
        device.memory.stream.follow(list({view.device.ready: None for view in views if view.device is not None}))
        for _, submission in bucket:
            submission.allocate = device.ordered(submission.allocate)
        result = operation.run(device.engine, bucket, label)
        moment = device.memory.moment()
        for _, submission in bucket:
            submission.done_on_device = moment
        self.enqueued(moment, *(submission for _, submission in bucket))
        return result

    def enqueued(self, moment: Moment, *what: Labelled) -> bool:
        """The GPU has to do ``what``, and has done it at ``moment``; whether it had nothing to do before.

        Where that is too much at a time, wait. Raises as `watch`, or why the job has failed.
        """
        is_first = not self._enqueued
        self._enqueued.append(_Enqueued(moment, what, time.monotonic()))
        self._forget_done()
        while len(self._enqueued) > _MOST_ENQUEUED:
            self._check()
            time.sleep(_NAP_S)
            self.watch()
        return is_first

    @property
    def is_under_way(self) -> bool:
        """Whether a GPU has something to do, as far as is known."""
        return bool(self._enqueued)

    def watch(self) -> None:
        """See that the GPU goes on.

        Raises:
            CollectiveError: it has failed, or has not come to the end of an operation in time; names that, and the
                ranks that are late.
        """
        self._forget_done()
        if self._enqueued:
            assert self._device is not None
            oldest = self._enqueued[0]
            self._device.watch(oldest.label, time.monotonic() - oldest.since_s)

    def _forget_done(self) -> None:
        device = self._device
        while self._enqueued:
            assert device is not None
            if not device.has_reached(self._enqueued[0].moment, self._enqueued[0].label):
                return
            self._enqueued.popleft()

    def device_for(self, ordinal: int | None) -> DeviceEngine | None:
        """The engine for memory of GPUs; None where these cannot work together. The first call is collective.

        Args:
            ordinal: of this rank's GPU, if it is known.
        """
        if not self._has_device:
            self._device = self._build_device_engine(ordinal)
            self._has_device = True
            self._check()  # a failure meanwhile has not woken what was not there
        return self._device

    @property
    def device(self) -> DeviceEngine | None:
        """The engine for memory of GPUs, once there is one."""
        return self._device


def _bucket(work: Work, engine: Engine) -> tuple[list[tuple[Response, Submission]], str]:
    """``work`` with this rank's part in all of it, which is nothing where it has joined; and its name for people."""
    operation: Any = work[0][0].request
    bucket = [(response, submission or operation.absentee(response, engine.memory)) for response, submission in work]
    label = bucket[0][1].label
    return bucket, label if len(work) == 1 else f"{label} and {len(work) - 1} more"
