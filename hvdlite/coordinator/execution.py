"""What was agreed on is done: submissions are found, fused, handed to the world, and completed.

Called by who is at work (worker.py) alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.frozen_plan import Batch
from hvdlite.coordinator.fusion import fuse
from hvdlite.coordinator.in_flight import InFlight
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.owner import Owner
from hvdlite.coordinator.progress import Progress
from hvdlite.coordinator.request import Request
from hvdlite.coordinator.submission import Submission
from hvdlite.recorder import Lane


class Execution:
    """Does what this rank has in flight, in the order in which it is told to.

    Args:
        all_are_back: called when ranks that had joined may submit again.
    """

    def __init__(
        self, owner: Owner, in_flight: InFlight, progress: Progress, all_are_back: Callable[[], object]
    ) -> None:
        self._owner = owner
        self._in_flight = in_flight
        self._progress = progress
        self._all_are_back = all_are_back

    def retire(self) -> None:
        """Refer to nobody any more."""
        del self._owner

    def execute(self, responses: Sequence[Response]) -> None:
        """Do what a batch of the log names: what fits together at once."""
        if len(responses) == 1:
            self._execute_bucket(responses)
            return
        for bucket in fuse(responses, self._owner.config.fusion_threshold_bytes):
            self._execute_bucket(bucket)

    def count_and_execute(self, batch: Batch) -> None:
        """Do operations of a plan, which the log does not name, together."""
        if isinstance(batch, Burst):
            self._count_burst(batch)
            self._execute_burst(batch)
        elif batch:
            self._progress.counted += len(batch)
            self._progress.batches += 1
            self.execute(batch)

    def execute_alone(self, submission: Submission) -> None:
        """Do what is not in flight, as its caller does it himself."""
        request = submission.request
        if self._owner.recorder.enabled:
            self._record_negotiation(request, submission.label, submission.submitted_ns, time.monotonic_ns())
        submission.succeed(self._owner.execute([(Response(request, submission.sequence), submission)]))

    def _execute_bucket(self, bucket: Sequence[Response]) -> None:
        now_ns = time.monotonic_ns()
        found = self._in_flight.begin([response.key for response in bucket])
        if found is None:  # closed meanwhile; the reason is on its way to every rank
            self._owner.check()
            return
        if self._owner.recorder.enabled:
            for submission in found:
                if submission is not None:
                    self._record_negotiation(submission.request, submission.label, submission.submitted_ns, now_ns)
        if bucket[0].request.departs:  # all ranks are back
            self._in_flight.has_joined = False
            self._all_are_back()
        result = self._owner.execute(list(zip(bucket, found, strict=True)))
        self._in_flight.finish()
        for submission in found:
            if submission is not None:
                submission.succeed(result)

    def _execute_burst(self, burst: Burst) -> None:
        now_ns = time.monotonic_ns()
        if not self._in_flight.begin_burst(burst):
            self._owner.check()
            return
        if self._owner.recorder.enabled:
            for request, label in burst.labels():
                self._record_negotiation(request, label, burst.since_ns, now_ns)
        self._owner.execute_burst(burst)
        self._in_flight.finish()
        burst.succeed()

    def burst_was_done(self, burst: Burst) -> None:
        """By a native call; perhaps once more, where an interrupt has come."""
        self._in_flight.remove(burst)
        self._count_burst(burst)
        burst.succeed()

    def _count_burst(self, burst: Burst) -> None:
        self._progress.counted += len(burst.parts)
        self._progress.batches += 1

    def _record_negotiation(self, request: Request, label: str, since_ns: int, now_ns: int) -> None:
        kind = request.label
        name = f"NEGOTIATE_{kind.upper()} {kind}.{label}"  # Horovod's words, which people search for
        self._owner.recorder.add(Lane.NEGOTIATION, name, since_ns, now_ns)
