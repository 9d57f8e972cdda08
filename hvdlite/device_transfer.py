"""Tensors of GPUs, by way of pinned memory of the host: operations see tensors of the host, and know no device.

What an operation reads is copied to the host once the stream that makes it has come so far; what it writes is copied
back before the operation is complete. The copies have a stream of their own, and nothing waits for a device as a whole,
nor without a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from hvdlite import _native
from hvdlite.collectives.base import LATE_GPU
from hvdlite.coordinator.messages import Response
from hvdlite.coordinator.submission import Submission
from hvdlite.memory.layout import align_up
from hvdlite.memory.views import TensorView
from hvdlite.naps import nap_until
from hvdlite.recorder import NO_SPAN, Lane, Recorder

_LEAST_BYTES = 1 << 20

Bucket = Sequence[tuple[Response, Submission]]


class DeviceTransfer:
    """Takes the tensors of one bucket after the other to the host and back.

    Attributes:
        timeout_s: the longest wait for a GPU.

    Args:
        check: raises once the job has failed.
    """

    def __init__(self, recorder: Recorder, timeout_s: float, check: Callable[[], None]) -> None:
        self._recorder = recorder
        self.timeout_s = timeout_s
        self._check = check
        self._devices: dict[int, _Device] = {}

    def run(self, bucket: Bucket, operate: Callable[[Bucket], object], label: str) -> object:
        """What ``operate`` returns for ``bucket`` with all tensors on the host.

        Raises:
            CollectiveError: a GPU did not come in time; or what the job's check raises meanwhile.
        """
        on_host = [(response, self._on_host(submission)) for response, submission in bucket]
        return self._between(lambda: operate(on_host), label)

    def run_on(
        self,
        inputs: Sequence[TensorView],
        outputs: Sequence[TensorView],
        operate: Callable[[Sequence[TensorView], Sequence[TensorView]], object],
        label: str,
    ) -> None:
        """Call ``operate`` with ``inputs`` and ``outputs`` on the host; what is both has one place there.

        Raises:
            CollectiveError: as `run`.
        """
        sources = [self._place(view, downloads=True) for view in inputs]
        targets = [self._place(view, uploads=True) for view in outputs]
        self._between(lambda: operate(sources, targets), label)

    def _between(self, operate: Callable[[], object], label: str) -> object:
        """``operate`` after what has a place was copied there, and before it is copied back."""
        with self._span(Lane.FROM_DEVICE, label):
            for device in self._devices.values():
                self._await(device.download(), label)
        try:
            result = operate()
        except BaseException:
            for device in self._devices.values():
                device.end_bucket()  # what contradicts leaves no trace, and others may go on
            raise
        with self._span(Lane.TO_DEVICE, label):
            for device in self._devices.values():
                self._await(device.upload(), label)
                device.end_bucket()
        return result

    def _await(self, moment: _native.Moment | None, label: str) -> None:
        if moment is None:
            return
        try:
            nap_until(lambda: moment.is_reached, f"'{label}': {LATE_GPU}", timeout_s=self.timeout_s, check=self._check)
        except BaseException:
            for device in self._devices.values():
                device.leave_behind()
            raise

    def _on_host(self, submission: Submission) -> Submission:
        if submission.device is None:
            return submission
        in_place = submission.outputs is submission.inputs
        inputs = [self._place(view, downloads=True, uploads=in_place) for view in submission.inputs]
        outputs = inputs if in_place else [self._place(view, uploads=True) for view in submission.outputs]
        allocate = submission.allocate

        def allocate_twice(index: int, shape: tuple[int, ...]) -> TensorView:
            assert allocate is not None
            return self._place(allocate(index, shape), uploads=True)

        return Submission(
            submission.request,
            submission.sequence,
            inputs,
            outputs,
            splits=submission.splits,
            allocate=None if allocate is None else allocate_twice,
        )

    def _place(self, view: TensorView, *, downloads: bool = False, uploads: bool = False) -> TensorView:
        """The place of ``view`` on the host; the same one each time in a bucket."""
        if view.device is None or view.address == 0:
            return view
        ordinal = view.device.ordinal
        if ordinal not in self._devices:
            self._devices[ordinal] = _Device(ordinal)
        return self._devices[ordinal].place(view, downloads=downloads, uploads=uploads)

    def _span(self, lane: Lane, label: str) -> AbstractContextManager[None]:
        return self._recorder.span(lane, label) if self._recorder.enabled else NO_SPAN


class _Device:
    """The copies of one device, and pinned memory, which grows to what the largest bucket needs."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._copies = _native.DeviceCopies(ordinal)
        self._blocks: list[_native.PinnedMemory] = []
        self._used = 0  # of the last block
        self._clear()

    def _clear(self) -> None:
        self._places: dict[tuple[int, int], TensorView] = {}  # by address on the device and bytes
        self._moments: dict[_native.Moment, None] = {}  # each once: tensors of an operation share theirs
        self._downloads: list[tuple[int, int, int]] = []
        self._uploads: list[tuple[int, int, int]] = []

    def place(self, view: TensorView, *, downloads: bool, uploads: bool) -> TensorView:
        assert view.device is not None
        key = view.address, view.nbytes
        if key not in self._places:
            block, address = self._take(view.nbytes)
            self._places[key] = TensorView(address, view.shape, view.dtype, block)
        place = self._places[key]._replace(shape=view.shape, dtype=view.dtype)
        self._moments[view.device.ready] = None
        if downloads:
            self._downloads.append((place.address, view.address, view.nbytes))
        if uploads:
            self._uploads.append((view.address, place.address, view.nbytes))
        return place

    def download(self) -> _native.Moment | None:
        """When that is done; None where there is nothing to do."""
        if not self._moments:
            return None
        moment = self._copies.begin(list(self._moments), self._downloads)
        self._moments.clear()
        return moment

    def upload(self) -> _native.Moment | None:
        """Likewise."""
        return self._copies.begin(list(self._moments), self._uploads) if self._uploads else None

    def leave_behind(self) -> None:
        """A copy may yet come: its memory stays to the end of the process."""
        for block in self._blocks:
            block.leave_behind()

    def end_bucket(self) -> None:
        self._clear()
        if len(self._blocks) > 1:  # one that is large enough for all, next time
            total = sum(block.nbytes for block in self._blocks)
            self._blocks = [_native.PinnedMemory(self._ordinal, total)]
        self._used = 0

    def _take(self, nbytes: int) -> tuple[_native.PinnedMemory, int]:
        """(block, address) of ``nbytes`` that nobody has."""
        nbytes = align_up(nbytes)
        if not self._blocks or self._used + nbytes > self._blocks[-1].nbytes:
            self._blocks.append(_native.PinnedMemory(self._ordinal, max(nbytes, _LEAST_BYTES)))
            self._used = 0
        block = self._blocks[-1]
        address = block.address + self._used
        self._used += nbytes
        return block, address
