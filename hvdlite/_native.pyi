"""The compiled extension: kernels on addresses. It links neither torch nor MPI; what takes long releases the GIL.

``dtype`` and ``op`` are the integers of hvdlite.dtypes; addresses and counts are 64-bit.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

def instruction_set() -> str:
    """The path the kernels take: 'avx512', 'avx2' or 'plain'; the widest of this processor unless told otherwise."""

def use_instruction_set(name: str) -> None:
    """Let the kernels take another path; to be called before any of them runs.

    Raises:
        ValueError: there is no such path, or this processor cannot take it; says which it can.
    """

def reduce(
    destinations: Sequence[int],
    sources: Sequence[int],
    numel: int,
    dtype: int,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """Every destination[i] = postscale * op over j of (prescale * sources[j][i]), summed in the order of sources.

    A postscale of 1 / n for a whole number n divides by n, which rounds once.

    A destination may be one of the sources, at the same address. Source: csrc/kernels/reduce.cpp.
    """

def copy(destination: int, source: int, nbytes: int) -> None:
    """memcpy without the GIL."""

class TensorList:
    """Tensors laid out in a fusion buffer: tensor i takes elements [offsets[i], offsets[i] + numels[i]) of it.

    Offsets ascend and do not overlap. Address 0 stands for zeros that nobody stored. Source: csrc/kernels/pack.cpp.
    """

    def __init__(self, addresses: Sequence[int], numels: Sequence[int], offsets: Sequence[int]) -> None: ...
    def pack(self, destination: int, begin: int, end: int, from_dtype: int, to_dtype: int, scale: float = 1.0) -> None:
        """Write elements [begin, end) of the fused layout to ``destination`` (the address of element ``begin``).

        Casts from the tensors' type to the buffer's, times ``scale``; gaps become 0. A tensor that already
        lives at its place (same address, same type, scale 1) is not touched.
        """
    def unpack(self, source: int, begin: int, end: int, from_dtype: int, to_dtype: int, scale: float = 1.0) -> None:
        """Read elements [begin, end) of the fused layout back into the tensors; the mirror of pack.

        Tensors with address 0 are skipped, and so are those that live at their place.
        """

def exchange_tensors_by(table: object | None) -> None:
    """Ask tensors what they are by ``table``, their type's ``__dlpack_c_exchange_api__``, and not by their attributes.

    Source: csrc/calls/exchanged_tensor.cpp.
    """

class GradientSnapshot:
    """What ``p.grad`` of parameters was, and how often it had been changed in place; keeps the gradients alive.

    Each method takes the same list of parameters. Source: csrc/calls/gradient_snapshot.cpp.
    """

    gradients: list[Any]
    """As they were taken; None where one was missing."""
    versions: list[int]
    """Of torch's, of these; 0 where one was missing."""
    addresses: list[int]
    """Of their memory, as `locate` has found them; else empty."""

    def take(self, parameters: list[Any]) -> None: ...
    def drop(self) -> None: ...
    def are_unchanged(self, parameters: list[Any]) -> bool:
        """Whether each ``p.grad`` is the same tensor with the same elements, in the same memory if that is known; or
        missing, as it was."""
    def locate(self, tensors: TensorList, type: type, layout: object, dtype: object) -> bool:
        """Move ``tensors`` to where the gradients lie that were taken.

        False, and nothing is moved, unless each is there, of that type, layout and dtype, contiguous, of as many
        elements as the tensor in its place, and in memory that no other one has.
        """
    def require_grad(self) -> bool:
        """Whether any of the gradients that were taken does."""

def first_beyond(addresses: Sequence[int], numels: Sequence[int], dtype: int, limit: float) -> int:
    """The first tensor, by place, that has an element which is NaN or beyond ``limit`` in absolute value; -1: none.

    Infinities are found with any limit.

    Raises:
        ValueError: ``dtype`` is none of floats.

    Source: csrc/kernels/scan.cpp.
    """

def bit_sums(addresses: Sequence[int], nbytes: Sequence[int]) -> list[int]:
    """Of each block of memory the sum of its 64-bit words, and of the bytes after the last.

    Source: csrc/kernels/scan.cpp.
    """

class Barrier:
    """A barrier of ``size`` processes in shared memory that was zeroed before first use.

    Source: csrc/waiting/signal.cpp.
    """

    OK: ClassVar[int]
    TIMEOUT: ClassVar[int]
    ABORTED: ClassVar[int]
    LEFT: ClassVar[int]

    def __init__(self, address: int, rank: int, size: int, abort_address: int, spin_us: int) -> None:
        """``address``: of `bytes_needed(size)` bytes; ``abort_address``: a 32-bit word, non-zero ends every wait."""
    @staticmethod
    def bytes_needed(size: int) -> int: ...
    def wait(self, timeout_s: float) -> int:
        """Arrive and wait for the others: OK, TIMEOUT, ABORTED or LEFT. After the last three it is unusable."""
    def leave(self) -> None:
        """This rank comes no more: whoever waits for it, now or later, is told LEFT. By any thread."""
    def late(self) -> list[int]:
        """The ranks that have not arrived at the barrier this rank waited at last."""
    def allreduce(
        self,
        copies: Sequence[int],
        numel: int,
        dtype: int,
        op: int,
        prescale: float,
        postscale: float,
        timeout_s: float,
    ) -> int:
        """Allreduce in place over the copies of all ranks: barrier, my shard from all copies to all copies, barrier."""

    STAGING_WINDOWS: ClassVar[int]
    def staged_allreduce(
        self,
        inputs: TensorList,
        outputs: TensorList,
        staging: Sequence[int],
        window_numel: int,
        numel: int,
        dtype: int,
        wire_dtype: int,
        op: int,
        prescale: float,
        postscale: float,
        timeout_s: float,
    ) -> int:
        """Allreduce private memory by way of `STAGING_WINDOWS` windows per rank, used for nothing else.

        ``staging[r]`` is the address of rank r's windows. Source: csrc/node/staged_allreduce.cpp.
        """

class PlacesInTurn:
    """Where the ranks of a node put few bytes for one another. Source: csrc/node/places_in_turn.h."""

    @property
    def most_bytes(self) -> int:
        """Of a rank; fewer for more than two ranks."""

    def __init__(self, address: int, rank: int, size: int, abort_address: int, spin_us: int) -> None:
        """``address``: of `bytes_needed(size)` bytes; ``abort_address``: a 32-bit word, non-zero ends every wait."""
    @staticmethod
    def bytes_needed(size: int) -> int: ...
    def withdraw(self) -> None:
        """What a `PreparedInNode` has begun on some ranks will not be done; all ranks call it at one place."""
    def late(self) -> list[int]:
        """The ranks for which the last operation here has waited in vain."""
    def wake_all(self) -> None:
        """Make every sleeper look at its abort word."""

class SmallAllreduce:
    """Allreduce of at most `PlacesInTurn.most_bytes`, by way of ``places``. Source: csrc/node/small_allreduce.cpp."""

    MOST_BYTES_AT_HOME: ClassVar[int]
    """More than that is reduced in less time where it lies, if that is memory which all ranks can reach."""

    def __init__(self, places: PlacesInTurn) -> None: ...
    def run(
        self,
        inputs: TensorList,
        outputs: TensorList,
        numel: int,
        wanted: tuple[int, int],
        dtype: int,
        wire_dtype: int,
        op: int,
        prescale: float,
        postscale: float,
        timeout_s: float,
    ) -> int:
        """The same as `Barrier.staged_allreduce`, with the same results, of elements [begin, end) that this rank
        wants; ``outputs`` lie there."""

class SmallGather:
    """Numbers that each rank tells all, and bytes that it gives them. Source: csrc/node/small_gather.cpp."""

    most_numbers: int
    """For which there is room in a place."""

    def __init__(self, places: PlacesInTurn) -> None: ...
    def room(self, width: int) -> int:
        """Bytes beside so many numbers, of which there are at most `most_numbers`."""
    def run(
        self, numbers: Sequence[int], pieces: Sequence[tuple[int, int]], timeout_s: float
    ) -> tuple[int, list[list[int]]]:
        """What the wait ended with, as of `Barrier.wait`; and everybody's ``numbers``, of which all have as many.

        ``pieces``: (address, bytes) of what this rank gives, if there is room for all of it.
        """
    def read(self, target: int, parts: Sequence[tuple[int, int]]) -> None:
        """What all have given in the last `run`: of each rank a part of it, as (where it begins, bytes), one after the
        other to ``target``."""

class OrderedExchange:
    """Collectives of the ranks of a node that make the same calls in the same order.

    Source: csrc/node/ordered_exchange.cpp.

    A call ends with `OK`; with `CONTRADICTION` on all ranks, where they showed different cards or mean different sizes,
    and nothing was done; with `TIMEOUT`, after which the same call, made again, goes on waiting; with `DEPARTED` where
    a rank that has to come has left; or with `ABORTED`. Parts are (address, bytes), one per rank.
    """

    OK: ClassVar[int]
    TIMEOUT: ClassVar[int]
    ABORTED: ClassVar[int]
    CONTRADICTION: ClassVar[int]
    DEPARTED: ClassVar[int]

    def __init__(
        self,
        address: int,
        rank: int,
        size: int,
        abort_address: int,
        spin_us: int,
        window_bytes: int,
        streamed_bytes: int,
    ) -> None:
        """``address``: of `bytes_needed` zeroed bytes; ``abort_address``: a 32-bit word, non-zero ends every wait;
        ``streamed_bytes``: what a rank takes goes past its caches where it is as much as this."""
    @staticmethod
    def bytes_needed(size: int, window_bytes: int) -> int: ...
    def meet(self, card: int, timeout_s: float) -> int:
        """Wait for all ranks. ``card``, here and below: 64 bits that say which collective this is, alike on all."""
    def alltoall(
        self,
        card: int,
        departures: Sequence[tuple[int, int]],
        arrivals: Sequence[tuple[int, int]],
        timeout_s: float,
    ) -> int:
        """departures[r] goes to rank r, arrivals[s] comes from rank s."""
    def spread(
        self, card: int, departure: tuple[int, int], arrivals: Sequence[tuple[int, int]], timeout_s: float
    ) -> int:
        """The same bytes go to all ranks; each takes those of the ranks whose arrival is not empty."""
    def broadcast(self, card: int, tensors: TensorList, bytes: int, root: int, timeout_s: float) -> int:
        """``tensors``, of single bytes in a layout of so many, become those of rank ``root``."""
    def tell(self, card: int, numbers: Sequence[int], timeout_s: float) -> tuple[int, list[int]]:
        """What the call ended with; and everybody's ``numbers``, rank by rank, of which all have as many."""
    def reduce_scatter(
        self,
        card: int,
        inputs: Sequence[int],
        numels: Sequence[int],
        output: int,
        dtype: int,
        op: int,
        prescale: float,
        postscale: float,
        timeout_s: float,
    ) -> int:
        """numels[r] elements at inputs[r] are this rank's part of what rank r gets at ``output``. Address 0 stands for
        zeros that nobody stored, and for a result that nobody wants."""
    @property
    def traffic(self) -> tuple[int, int, int, int]:
        """What `alltoall` has moved between this rank and others so far, as `hvdlite.counters.Traffic` has it."""
    def leave(self) -> None:
        """From here on whoever waits for this rank learns that it will not come."""
    def late(self) -> list[int]:
        """The ranks for which the last call has waited in vain."""
    def departed(self) -> list[int]:
        """The ranks that have left, whether a call waits for them or not."""
    def wake_all(self) -> None:
        """Make every sleeper look at its abort word."""

class ReadyCounts:
    """How much of a frozen plan each of ``size`` ranks is ready for. Source: csrc/node/ready_counts.cpp."""

    def __init__(self, address: int, doorbells: int, rank: int, size: int) -> None:
        """``address``, ``doorbells``: a zeroed line of 64 bytes per rank each; the latter are the ranks' doorbells."""
    def set(self, plan: int, count: int) -> None:
        """This rank's; rings who wants to know that all are ready for more than before."""
    def all(self, plan: int) -> int:
        """The smallest."""
    def want_ring(self, wanted: bool) -> None:
        """Whether this rank wants to know."""
    def has_news(self, heard: int) -> bool:
        """Whether this rank was rung since it had counted ``heard`` rings."""
    def wait(self, plan: int, count: int, heard: int, timeout_s: float, spin_us: int) -> bool:
        """Until all are ready for ``count`` operations; False where a ring, a signal or the time came before."""
    NEXT_BITS: ClassVar[int]
    def agree(self, plan: int, next: int, heard: int, timeout_s: float, spin_us: int) -> bool:
        """Whether all ranks want ``next``, of `NEXT_BITS`, in place of ``plan``, which has ended for all of them then.

        This one has done all that it has said to be ready for. If not, no rank hears otherwise of ``plan``: one goes on
        with it, wants something else, was rung, or has waited for so long.
        """

class DirectCall:
    """An operation that comes again and again in a plan. Source: csrc/prepared/direct_call.h.

    Attributes:
        NOT_YET: other ranks are late, and nothing was done.
        DONE_AND_RUNG: it was done, and this rank's doorbell has rung meanwhile.
        BEGUN: the caller has to bring it to its end.
    """

    DONE: ClassVar[int]
    NOT_YET: ClassVar[int]
    DONE_AND_RUNG: ClassVar[int]
    TIMEOUT: ClassVar[int]
    ABORTED: ClassVar[int]
    BEGUN: ClassVar[int]

    @property
    def can_run(self) -> bool:
        """Whether `run` may be called now."""
    @property
    def has_two_phases(self) -> bool:
        """Whether it can be started, and completed later."""
    @property
    def result_rows(self) -> int:
        """Of the result for which there has to be room, where that is not always the same."""
    def run(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int, heard: int) -> int:
        """Say to be ready for operation ``count`` of ``plan``, from 1, wait for all, and do it.

        ``heard``: the rings that were followed; any more end the wait.
        """
    def start(self, inputs: Sequence[int], outputs: Sequence[int], plan: int, count: int) -> None:
        """Of what has two phases, the first: after it the other ranks do not wait for this one."""
    def complete(self, heard: int) -> int:
        """The second phase; what `run` returns."""
    def complete_now(self) -> int:
        """The same if all ranks have started; else NOT_YET, and this rank is rung once they have."""
    def last(self) -> tuple[int, int, int]:
        """Plan, count and result of the last `run`, if it has said so; else those of the one before."""

class Patience:
    """How long a `PreparedInNode` waits."""

    def __init__(self, spin_us: int, patience_s: float, timeout_s: float) -> None:
        """``patience_s``: the longest wait until all ranks are ready, of which ``spin_us`` without sleep;
        ``timeout_s``: inside."""

class Windows:
    """For what is more than few bytes; ``card`` as of the methods of ``exchange``."""

    def __init__(self, exchange: OrderedExchange, card: int) -> None: ...

class PreparedInNode(DirectCall):
    """An operation of the ranks of a node. Source: csrc/prepared/prepared_in_node.cpp."""

    def ready_ns(self) -> int:
        """When all were ready for the last that was done, in the time of `time.monotonic_ns`."""

class PreparedAllreduce(PreparedInNode):
    """Source: csrc/prepared/prepared_allreduce.cpp."""

    def __init__(
        self,
        barrier: Barrier,
        small: SmallAllreduce,
        counts: ReadyCounts,
        numels: Sequence[int],
        offsets: Sequence[int],
        numel: int,
        memory: Sequence[int],
        window_numel: int,
        dtype: int,
        wire_dtype: int,
        op: int,
        prescale: float,
        postscale: float,
        patience: Patience,
    ) -> None:
        """``memory``: per rank, what `Barrier.staged_allreduce` calls staging; or, with ``window_numel`` 0, where the
        tensors live, ``numel`` elements."""

class PreparedReduceScatter(PreparedInNode):
    """Of one tensor, which travels as it is unless it is of few bytes.

    Source: csrc/prepared/prepared_reduce_scatter.cpp.
    """

    def __init__(
        self,
        small: SmallAllreduce,
        windows: Windows,
        counts: ReadyCounts,
        numels: Sequence[int],
        dtype: int,
        wire_dtype: int,
        op: int,
        prescale: float,
        postscale: float,
        patience: Patience,
    ) -> None:
        """``numels``: elements that each rank gets."""

class PreparedGather(PreparedInNode):
    """An allgather or alltoall. Source: csrc/prepared/prepared_gather.h.

    It is `BEGUN` where ranks give something else than was expected, which they are expected to give from then on:
    `SmallGather.run` has all of it then.
    """

    def __init__(
        self,
        gather: SmallGather,
        windows: Windows,
        counts: ReadyCounts,
        numbers: Sequence[int],
        column: int,
        row_bytes: int,
        is_alltoall: bool,
        patience: Patience,
    ) -> None:
        """``numbers``: of rows that this rank gives, one after the other; it gets those of ``column``, of each rank.
        At first others are expected to give nothing. ``is_alltoall``: there is a number for each rank."""

class PreparedBroadcast(PreparedInNode):
    """Of one tensor, of more than few bytes. Source: csrc/prepared/prepared_broadcast.cpp."""

    def __init__(self, windows: Windows, counts: ReadyCounts, bytes: int, root: int, patience: Patience) -> None:
        """``root``: of the node. Input 0: this rank gives nothing."""

class PreparedBarrier(PreparedInNode):
    def __init__(self, counts: ReadyCounts, patience: Patience) -> None: ...

class Count:
    """Numbers of the unnamed operations of a kind: 0, 1, 2, ..."""

    next: int

    def take(self) -> int:
        """`next`, which is one more afterwards."""
    def restart(self) -> None: ...

class Flag:
    """A truth that native code and Python change alike."""

    is_set: bool

    def __init__(self, is_set: bool) -> None: ...

class Signature:
    """What a caller has passed for one tensor. Source: csrc/calls/signature.h."""

    def __init__(
        self,
        kind: object,
        tensor: object,
        name: str | None,
        op: object,
        prescale: object,
        postscale: object,
        is_empty: bool,
        home: weakref.ref[Any] | None,
    ) -> None:
        """``kind``: of the operation. ``is_empty``: so that ``tensor`` may have no address. ``home``: memory that it
        lives in, and has to."""

class Signatures:
    """Of the operations of a burst, by their places."""

    are_known: bool
    """All of them are."""

    def __init__(self, count: int) -> None: ...
    def knows(self, place: int) -> bool: ...
    def learn(self, place: int, signature: Signature) -> None: ...

class Started:
    """What the shortcut has started, and nobody waits for at once. Source: csrc/calls/started.cpp."""

    def complete_now(self) -> int:
        """By who is at work: do the rest if all ranks have started; what `DirectCall.run` returns."""
    def settle(self, left: object) -> None:
        """``left``: what is waited for from now on, or None if it is complete."""
    def fail(self, error: BaseException) -> None:
        """It has ended in ``error``."""

class StartedOperation(Started):
    """One operation."""

    operation: tuple[Any, int, int, int, object]
    """While it is not settled: what was prepared, sequence, addresses of the input and of the output, owner of both."""

    def wait(self) -> None:
        """Sleep until it is complete; raises what it ended in."""
    def poll(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

class PlannedBurst:
    """A burst of a plan, which a call of two phases does."""

    known: Any
    prepared: Any

    def __init__(
        self,
        known: object,
        prepared: object,
        call: DirectCall,
        signatures: Signatures,
        numbers: Sequence[tuple[int, int]],
    ) -> None:
        """``known``: what it is to Python. ``prepared``: does it by ``call``. ``numbers``: of each operation, its
        sequence in the first period, and how it grows with each."""

class StartedBurst(Started):
    """A burst of few bytes, from its first operation on. Source: csrc/calls/started_burst.cpp."""

    planned: PlannedBurst
    """While it is not settled, like `parts`."""
    parts: list[tuple[int, int, int, object]]
    """Of every operation that was submitted so far: addresses of its input and its output, sequence, owner of both."""
    since_ns: int
    """When the first of it was submitted, by `time.monotonic_ns`."""
    was_waited_before: bool
    """Whether the user had waited since what was submitted before that."""
    has_succeeded: bool
    """All of it is done, as one."""

    def ask(self) -> None:
        """Somebody waits for it."""
    def wait(self, number: int) -> None:
        """Sleep until operation ``number`` of it is complete; raises what it ended in."""
    def poll(self, number: int) -> bool:
        """Whether `wait` would return, or raise, at once."""

class Shortcut:
    """From a call in Python to what comes next in a plan that runs free. Source: csrc/calls/shortcut.cpp."""

    closings: int
    """How often it was closed."""
    untold: int
    """Operations that were done here, and that `take` has yet to tell of."""
    unsettled: Started | None
    """What was started last, whether it was taken or not, until it is settled."""
    under_way: tuple[Any, Any] | None
    """That, or what is being done here by who waits for it: (prepared, sequence) of an operation, (known, parts) of a
    burst."""

    def __init__(
        self,
        at_work: Any,
        recorder: object,
        rest: Callable[[Any, int, int, int, object, int], Any],
        rest_of_burst: Callable[[StartedBurst, int], Any],
        settle: Callable[[], object],
        has_waited: Flag,
    ) -> None:
        """``rest``: called with what was begun and not done without a remark, by whoever is at work, as (prepared,
        sequence, address of the input, of the output, owner of both, result of `DirectCall.run`); returns what
        is to be waited for afterwards, or None. ``rest_of_burst``: likewise, of a burst. ``settle``: called again and
        again by who waits for what was started, while another thread is at work, that it be settled. ``has_waited``:
        whether the user has waited for anything, or asked, since the last submission."""
    def follow(self, plan: int, period: int, serial: int) -> bool:
        """A plan begins, of so many operations in a period; whether what was learned of the last one of ``serial`` is
        known still."""
    def take_periods(self) -> tuple[int, int]:
        """How many periods of the plan were begun here since the last time: without a wait before them, and with
        one."""
    def knows(self, position: int, prepared: object) -> bool:
        """Whether ``prepared`` is what comes at ``position``."""
    def learn(
        self,
        position: int,
        signature: Signature,
        prepared: object,
        call: DirectCall,
        new_result: Callable[[Any, int], Any] | None,
        gives: bool,
        unnamed: Count | None,
        sequence: int,
        stride: int,
    ) -> None:
        """What comes at ``position`` of the period: ``prepared``, which ``call`` does. ``new_result``: makes a result,
        of the tensor and so many rows; None where it is like the tensor. ``gives``: whether the tensor is what this
        rank contributes; else zeros are. ``unnamed`` gives it the number ``sequence`` in the first period, and one that
        is ``stride`` larger in each one after that."""
    def knows_burst(self, position: int, known: object) -> bool:
        """Whether a burst of ``known`` begins at ``position``."""
    def learn_burst(self, position: int, burst: PlannedBurst) -> None:
        """What begins at ``position`` of the period."""
    def open(self, done: int, heard: int, closings: int) -> None:
        """``done`` operations of the plan are, and so many rings were followed. Nothing happens if it was closed since
        there were ``closings``."""
    def close(self) -> None:
        """Something else begins."""
    def pause(self) -> None:
        """Who is at work looks at the plan, and may open it again: these are no closings."""
    def forget(self) -> None:
        """Refer to no operation any more."""
    def take(self) -> list[tuple[Any, int]]:
        """(prepared, or `PlannedBurst`, and how often it was done) since the last time, the last one at the end."""
    def take_started(self) -> Started | None:
        """What was started last, unless it is settled: who takes it settles it."""
    def function(self, kind: object, new_like: Callable[[Any], Any]) -> Callable[..., Any]:
        """Of operations of ``kind``: (tensor, name, op, prescale, postscale, in_place) -> the result, or None where
        nothing was done."""
    def submitting_function(
        self,
        kind: object,
        make_handle: Callable[[StartedOperation, Any, Any], Any],
        collecting: Collecting,
        make_handle_in_burst: Callable[[Any, int, Any, Any], Any],
        new_like: Callable[[Any], Any],
        named: int,
        unnamed: Count,
    ) -> Callable[..., Any]:
        """Of operations of ``kind`` that nobody waits for at once: (tensor, name, op, prescale, postscale, in_place) ->
        ``make_handle_in_burst(burst, place, result, name)`` of what ``collecting`` expects;
        ``make_handle(started, result, name)`` of what was started; or None where nothing was done. ``named`` is the
        sequence of what has a name, ``unnamed`` counts what has none."""

class Instant:
    """A point in time, by `time.monotonic`."""

    at_s: float

    def __init__(self, at_s: float) -> None: ...

class Collecting:
    """What is submitted of bursts that came before. Source: csrc/calls/collecting.cpp.

    Nothing is taken while ``lock`` is held. What ``shortcut`` can start is collected for it, if the coordinator thread
    looks within ``longest_s``, which it does at ``next_look``. ``open``: begins a burst of what is `follow`ed, if that
    comes next; whether it has. ``complete``: all of what is open may be there. ``take_apart``: somebody waits for it.
    """

    burst: Any
    """What `begin` was told, or `adopt`, until `end`; else None."""
    is_open: bool
    """Whether a burst is, there or here."""
    since_s: float
    """When the last one was begun, by `time.monotonic`."""

    def __init__(
        self,
        lock: threading.Lock,
        shortcut: Shortcut,
        next_look: Instant,
        longest_s: float,
        open: Callable[[Any], bool],
        complete: Callable[[], object],
        take_apart: Callable[[], object],
    ) -> None: ...
    def follow(self, known: Sequence[tuple[object, Signatures]]) -> None:
        """What may come."""
    def begin(self, burst: object, parts: list[Any], signatures: Signatures) -> None:
        """From now on, appended to ``parts``: (input, output, sequence, owner)."""
    def adopt(self, make: Callable[[StartedBurst], object]) -> None:
        """The same of what is open here: it goes on as the burst that ``make`` makes of it."""
    def stop(self) -> None:
        """Append nothing more."""
    def end(self) -> None:
        """It is somebody else's."""

class PoliteLook:
    """How long one looks for what others bring, before one leaves them the core. Source: csrc/waiting/polite_look.h."""

    def __init__(self, longest_us: int, busy_us: int, courtesy_us: int) -> None:
        """An offer of the core that takes longer than ``busy_us`` ends the look, and all others for ``courtesy_us``."""
    def until(self, happened: Callable[[], bool]) -> bool:
        """Look until ``happened()``, and at least once; whether it is so. Offers of the core offer the GIL as well."""

_Addition = tuple[Sequence[int], Sequence[int], int, int, int, float, float]
"""Arguments of a call of `reduce`."""

class BoundMessages:
    """Persistent requests and additions in phases: start some, wait for some, reduce.

    Source: csrc/messages/bound_messages.cpp.

    Calls return how far it is: `DONE`, `WAITING` for a message to or from ``peer``, or `FAILED`, where MPI has
    returned ``error``.
    """

    DONE: ClassVar[int]
    WAITING: ClassVar[int]
    FAILED: ClassVar[int]

    def __init__(
        self,
        start: int,
        test: int,
        phases: Sequence[
            tuple[
                Sequence[int],
                Sequence[tuple[int, int]],
                Sequence[_Addition],
            ]
        ],
    ) -> None:
        """``start``, ``test``: addresses of MPI_Start and MPI_Test.

        A phase: addresses of requests to start; (address, peer) of those to wait for; arguments of `reduce`.
        """
    def start(self) -> int:
        """Execute it anew, as far as need not wait."""
    def advance(self) -> int:
        """Go on, as far as need not wait."""
    def work(self, look: PoliteLook, limit_us: int, longest_nap_us: int) -> int:
        """Go on, with naps in between, until all is done, for up to ``limit_us``."""
    def close(self) -> None:
        """Call nothing else from here on: the requests go back to MPI."""
    @property
    def peer(self) -> int: ...
    @property
    def moved(self) -> int:
        """How many messages it has found to be through."""
    @property
    def error(self) -> int: ...

class BoundPipeline:
    """Persistent requests and additions of a long schedule: each as soon as what it needs has come, or left.

    Source: csrc/messages/bound_pipeline.cpp.

    Calls return how far it is, as those of `BoundMessages` do.

    Attributes:
        peer: of the message that it waits for.
        moved: how many messages have come, or are known to have left.
        error: what MPI has returned where it failed.
    """

    def __init__(
        self,
        start: int,
        test: int,
        first: Sequence[_Addition],
        sends: Sequence[tuple[int, int, int]],
        receives: Sequence[tuple[int, int, int, bool, Sequence[_Addition]]],
        window: int,
    ) -> None:
        """``start``, ``test``: addresses of MPI_Start and MPI_Test. ``first``: what is done before anything is sent.

        ``sends``: (address of the request, peer, how many receives it follows). ``receives``: (address of the request,
        peer, how many sends it follows, whether it has one of ``window`` slots, what is done with it).
        """
    def start(self) -> int:
        """Execute it anew, as far as need not wait."""
    def work(self, look: PoliteLook, limit_us: int, longest_nap_us: int) -> int:
        """Go on, with naps in between, until all is done, for up to ``limit_us``."""
    @property
    def peer(self) -> int: ...
    @property
    def moved(self) -> int: ...
    @property
    def error(self) -> int: ...

class EarlyTurns:
    """How far ranks of a node are with what rank 0 exchanges for all, in turns. Source: csrc/messages/early_turns.h."""

    def __init__(self, counts: ReadyCounts, address: int) -> None:
        """``counts``: of these ranks. ``address``: of `bytes_needed` zeroed bytes, a multiple of 64."""
    @staticmethod
    def bytes_needed(size: int) -> int: ...
    def begin(self) -> None:
        """This rank has put its tensors into its place: its next turn."""
    def all_have_begun(self) -> bool: ...
    def bring(self) -> None:
        """Of rank 0: the result is in every place."""
    def has_come(self) -> bool: ...

class EarlyShape:
    """Where tensors of an `EarlyAllreduce` lie. Source: csrc/messages/early_allreduce.h."""

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        numel: int,
        places: Sequence[int],
        rank: int,
        dtype: int,
        wire_dtype: int,
        in_node: tuple[int, float, float] | None,
    ) -> None:
        """At ``places``, of each rank of the node, of ``numel`` elements, as they travel.

        ``in_node``: op and scales, by which all places are reduced into that of rank 0; None where it is alone.
        """

class EarlyAllreduce(DirectCall):
    """An allreduce of few bytes between nodes, in one call. Source: csrc/messages/early_allreduce.cpp.

    Attributes:
        NODE_IS_LATE: a rank of this node has not begun, so that no messages are started.
        progress: of the last that has begun; like a result of `BoundMessages`, or `NODE_IS_LATE`.
        began_ns: when it did, in the time of `time.monotonic_ns`.
        outputs: of it.
        has_news: whether this rank's doorbell has rung since.
    """

    NODE_IS_LATE: ClassVar[int]
    progress: int
    began_ns: int
    outputs: TensorList
    has_news: bool

    def __init__(
        self,
        counts: ReadyCounts,
        turns: EarlyTurns,
        look: PoliteLook,
        shape: EarlyShape,
        spin_us: int,
        patience_s: float,
    ) -> None:
        """``patience_s``: longest wait until all ranks of the node are ready, of which ``spin_us`` without sleep.

        It is also that for the result.
        """
    def bind(self, messages: BoundMessages) -> None:
        """Of rank 0: by what it exchanges its place with other nodes, until they are closed."""

class PacketRoom:
    """How much room ranks make in packets beside their numbers. Source: csrc/messages/packet_room.h.

    Attributes:
        now: in bytes; 0 where that is not known, or no longer.
    """

    now: int

    def __init__(self) -> None: ...
    @staticmethod
    def enough_for(bytes: int) -> int: ...
    def note(self, bytes: int) -> None:
        """All ranks have done the operation, and that which gave most gave so many."""

    def forget(self) -> None: ...

class EarlyGather(EarlyAllreduce):
    """An allgather or alltoall of few bytes between nodes, in one call. Source: csrc/messages/early_gather.h.

    It is `BEGUN` also where all have come, and numbers were told: others give something else than was expected, which
    they are expected to give from then on, or more than there is room for.

    Attributes:
        is_valid: whether its packets are those that other ranks send; else it cannot run.
    """

    is_valid: bool

    def __init__(
        self,
        counts: ReadyCounts,
        turns: EarlyTurns,
        look: PoliteLook,
        shape: EarlyShape,
        spin_us: int,
        patience_s: float,
        numbers: Sequence[int],
        column: int,
        row_bytes: int,
        is_alltoall: bool,
        job_rank: int,
        packets: tuple[int, int, int, int],
        room: PacketRoom,
        room_then: int,
    ) -> None:
        """``shape``: of packets; ``numbers`` and so on: see `PreparedGather`.

        ``packets``: addresses of that of this rank, and of all; bytes of one, and of the room beside its numbers.
        ``room``: where it is not ``room_then``, ranks send other packets.
        """

class EarlyReduceScatter(EarlyAllreduce):
    """The same of one tensor, of which this rank wants a part of the result.

    Source: csrc/messages/early_reduce_scatter.cpp.
    """

    def __init__(
        self,
        counts: ReadyCounts,
        turns: EarlyTurns,
        look: PoliteLook,
        shape: EarlyShape,
        spin_us: int,
        patience_s: float,
        part: int,
    ) -> None:
        """``shape``: of the parts, which lie one after the other. ``part``: that which is wanted."""

def load64(address: int) -> int:
    """Atomic load, sequentially consistent."""

def store64(address: int, value: int) -> None:
    """Atomic store, sequentially consistent."""

def load32(address: int) -> int: ...
def store32(address: int, value: int) -> None: ...
def doorbell_ring(address: int) -> None:
    """Count one ring at the 28-byte doorbell and wake its assistant, or its owner where there is none."""

def doorbell_wait(address: int, seen: int, timeout_s: float) -> int:
    """Sleep until there is a ring after ``seen`` that no assistant follows, or the time is over; return the count."""

def doorbell_begin_assistance(address: int) -> None:
    """From here on rings wake the caller instead of the owner; one assistant at a time."""

def doorbell_assist(address: int, seen: int, timeout_s: float, spin_us: int) -> int:
    """Sleep of the assistant until the count differs from ``seen``; it looks for ``spin_us`` before."""

def doorbell_end_assistance(address: int, heard: int) -> int:
    """Leave, with ``heard`` rings followed; return the count. If that is another one, the owner must be rung."""

def wake_all(address: int) -> None:
    """Wake every waiter of a 32-bit futex word, so that it looks at its abort word."""

class Deadline:
    """A native thread that prints ``message`` to stderr and ends the process unless cancelled in time.

    Before the end it runs the program ``explain``, if any, for a few seconds. Where ``after`` has processes, each a
    pidfd that stays open and a name, the time begins when the first of them ends, and its name stands before
    ``message``.

    It needs no GIL, so it fires even where MPI_Init blocks inside C. Source: csrc/waiting/deadline.cpp.
    """

    def __init__(
        self,
        seconds: float,
        message: str,
        exit_code: int,
        explain: Sequence[str] = (),
        after: Sequence[tuple[int, str]] = (),
    ) -> None: ...
    def cancel(self) -> None: ...

def map_file(address: int, bytes: int, file: int, is_private: bool) -> None:
    """Map the first ``bytes`` of a file at ``address``, in place of what is mapped there.

    Args:
        is_private: what is written there from here on stays in this process.

    Raises:
        OSError: the kernel refuses; nothing is mapped there then.
    """

def end_at_exit(least: int) -> None:
    """Once Python has ended, end the process with its own exit status, with ``least`` for 0, and nothing of C besides.

    Source: csrc/waiting/deadline.cpp.
    """

class Heartbeat:
    """A native thread that sends ``beat`` to each of ``sockets`` every ``interval_s``, and messages as they come.

    It needs no GIL. Nobody waits for a neighbour that does not read; one that is gone is passed over. The sockets stay
    open until this is closed. Source: csrc/waiting/heartbeat.cpp.

    Raises:
        RuntimeError: the machine refuses a thread or a file descriptor.
    """

    def __init__(self, sockets: Sequence[int], interval_s: float, beat: bytes) -> None: ...
    def send(self, index: int, message: bytes) -> None:
        """To the neighbour with the socket at ``index``."""
    def rest(self, index: int) -> None:
        """No more beats to that neighbour."""
    def close(self, patience_s: float = 0.0) -> None:
        """End once all is sent, or after ``patience_s``."""

class SocketBell:
    """A native thread that rings the doorbell at ``address``, in ``memory``, whenever one of ``sockets`` has news.

    News are bytes to read, its end, and room for bytes where there was none. It reads nothing itself, and needs no GIL.
    Source: csrc/waiting/socket_bell.cpp.

    Raises:
        RuntimeError: the machine refuses a thread or a file descriptor.
    """

    def __init__(self, sockets: Sequence[int], address: int, memory: object) -> None: ...
    def close(self) -> None: ...

def use_cuda_library(path: str) -> None:
    """Load the CUDA driver from ``path``, not from libcuda.so.1; before its first use.

    Source: csrc/gpu/cuda_driver.cpp.
    """

def cuda_devices() -> int:
    """How many GPUs the CUDA driver sees.

    Raises:
        RuntimeError: there is no driver, or none that works; says why.
    """

def cuda_version() -> int:
    """The version of CUDA that the driver has, as 13000 for 13.0. RuntimeError: there is no driver."""

def cuda_device_uuid(device: int) -> str:
    """32 hexadecimal digits that no other GPU has. RuntimeError: no such device."""

def cuda_device_name(device: int) -> str:
    """What its vendor calls it. RuntimeError: no such device."""

class Moment:
    """A point in a stream: whatever was enqueued there until now has happened once it is reached.

    Args:
        stream: what torch calls ``torch.cuda.Stream.cuda_stream``.
        is_timed: whether `seconds_since` will be asked for.

    Raises:
        RuntimeError: of the driver; or the stream is being captured into a CUDA graph.
    """

    def __init__(self, device: int, stream: int, is_timed: bool = False) -> None: ...
    def seconds_since(self, earlier: Moment) -> float:
        """Of the GPU's time; both are timed, and reached. Negative where ``earlier`` is not."""
    def precede(self, stream: int) -> None:
        """What is enqueued on ``stream`` from now on comes after it. RuntimeError: it is being captured."""
    def wait(self) -> None:
        """Sleep until it is reached."""
    @property
    def is_reached(self) -> bool: ...

class DeviceStream:
    """A stream of ours, on which every method but `follow` enqueues something. Source: csrc/gpu/device_stream.cpp.

    Raises:
        RuntimeError: of the driver; every method may.
    """

    def __init__(self, device: int) -> None: ...
    @staticmethod
    def borrowed(device: int, handle: int) -> DeviceStream:
        """A stream of somebody else, who keeps it."""
    @property
    def handle(self) -> int: ...
    def follow(self, moments: Sequence[Moment]) -> None:
        """What is enqueued from now on comes after all of ``moments``."""
    def copy(self, to: int, source: int, nbytes: int) -> None: ...
    def zero(self, address: int, nbytes: int) -> None: ...
    def fill(self, address: int, numel: int, dtype: int, value: float) -> None: ...
    def pack(self, tensors: TensorList, buffer: int, begin: int, end: int, from_dtype: int, to_dtype: int) -> None:
        """As `TensorList.pack`."""
    def unpack(self, tensors: TensorList, buffer: int, begin: int, end: int, from_dtype: int, to_dtype: int) -> None:
        """As `TensorList.unpack`."""
    def reduce(
        self,
        destinations: Sequence[int],
        sources: Sequence[int],
        numel: int,
        dtype: int,
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """As `reduce`."""
    def multicast_store(self, multicast: int, source: int, nbytes: int) -> None:
        """Copy to the memory of all ranks at address ``multicast``; all three are multiples of 16.

        Raises:
            ValueError: they are not.
        """
    def multicast_sum(self, destination: int, multicast: int, nbytes: int, dtype: int) -> None:
        """Add up, in the switch, the memory of all ranks at address ``multicast``; all are multiples of 16.

        16-bit floats are added in fp32 and rounded once. In which order is left to the switch.

        Args:
            destination: 0: the memory of all ranks at ``multicast``.
            dtype: of floats.

        Raises:
            ValueError: they are not.
        """

class DeviceContext:
    """In a ``with`` block the GPU's context is the thread's, for libraries that look for it there.

    Raises:
        RuntimeError: of the driver.
    """

    def __init__(self, device: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

class DeviceSegment:
    """Memory of a GPU with a copy per rank of a node, all of them mapped by every rank.

    Source: csrc/gpu/device_memory.cpp.

    Raises:
        RuntimeError: the GPU has not so much left; every method may.
    """

    def __init__(self, device: int, nbytes: int) -> None: ...
    def share(self) -> tuple[bytes, int]:
        """What another process needs to get this rank's copy; the caller closes the file descriptor."""
    def map(self, shared: Sequence[bytes], files: Sequence[int], own: int) -> None:
        """Map all copies, by what every rank has shared; entry ``own`` is ignored. The caller closes the files."""
    @property
    def copies(self) -> list[int]:
        """The address of every rank's copy, once they are mapped."""

class FileSegment(DeviceSegment):
    """Shared by file descriptors: it is there as long as anybody has it mapped. Source: csrc/gpu/file_segment.cpp."""

class Multicast:
    """One address for the copies of all ranks of a node, each on a GPU of its own. Source: csrc/gpu/multicast.cpp.

    All ranks make each step before any makes the next. It goes with the segment, with which all ranks have to be done
    by then.

    Raises:
        RuntimeError: the driver or the GPU does not offer it; every step may.
    """

    def __init__(self, segment: FileSegment, ranks: int) -> None: ...
    def create(self) -> int:
        """Of the first rank: a file descriptor for the others, which the caller closes."""
    def open(self, file: int) -> None:
        """Of the other ranks."""
    def join(self) -> None:
        """With the GPU of this rank."""
    def bind(self) -> None:
        """The copy of this rank."""
    def map(self) -> None: ...
    @property
    def address(self) -> int:
        """Once it is mapped."""

class HandleSegment(DeviceSegment):
    """Shared by handles of CUDA IPC: it ends with the process that made it. Source: csrc/gpu/handle_segment.cpp."""

class StreamBarrier:
    """Streams of the ranks of a node that wait for one another; no thread waits. Source: csrc/gpu/stream_barrier.cpp.

    Args:
        page: `bytes_needed` zeroed bytes of the host's memory, the same in all ranks; kept while the driver knows it.

    Raises:
        ValueError: the page is too small.
        RuntimeError: of the driver; every method may.
    """

    def __init__(self, stream: DeviceStream, page: np.ndarray, rank: int, size: int) -> None: ...
    @staticmethod
    def bytes_needed(size: int) -> int: ...
    def meet(self) -> None:
        """What the stream does from now on comes after what the streams of all ranks did before they met."""
    def late(self) -> list[int]:
        """The ranks whose streams have not come as often as this one's."""
    def release(self) -> None:
        """Free all streams that wait here, in all processes, for good. From any thread, by every rank that lives."""
    def allreduce(
        self, copies: Sequence[int], numel: int, dtype: int, op: int, prescale: float, postscale: float
    ) -> None:
        """Reduce in place; rank i has its copy at ``copies[i]``. Source: csrc/gpu/direct_allreduce.cpp."""
    def staged_allreduce(
        self,
        inputs: TensorList,
        outputs: TensorList,
        copies: Sequence[int],
        window_numel: int,
        numel: int,
        dtype: int,
        wire_dtype: int,
        op: int,
        prescale: float,
        postscale: float,
    ) -> None:
        """Allreduce of tensors anywhere on this rank's GPU, by way of copies of ``window_numel`` elements."""

class PreparedDeviceAllreduce(PreparedInNode):
    """`StreamBarrier.staged_allreduce`, after and before what the caller's stream does.

    Source: csrc/gpu/prepared_device_allreduce.cpp.

    Raises:
        RuntimeError: of `run`, from the driver.
    """

    def __init__(
        self,
        barrier: StreamBarrier,
        counts: ReadyCounts,
        numels: Sequence[int],
        offsets: Sequence[int],
        numel: int,
        dtype: int,
        windows: Sequence[int],
        window_numel: int,
        wire_dtype: int,
        op: int,
        prescale: float,
        postscale: float,
        patience: Patience,
    ) -> None: ...
    def use_stream(self, stream: int) -> None:
        """The driver's handle of the stream on which the caller of the next `run` works."""
    def take_done(self) -> Moment | None:
        """Reached once the GPU has done the last that was enqueued; once for each."""

class PinnedMemory:
    """``nbytes`` of the host's memory, which the device reads and writes by itself.

    Raises:
        RuntimeError: the driver refuses.
    """

    def __init__(self, device: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def leave_behind(self) -> None:
        """It is never freed, since a GPU may yet write it."""

class DeviceCopies:
    """Copies between a device and pinned memory, on a stream of its own. Source: csrc/gpu/device_copies.cpp."""

    def __init__(self, device: int) -> None: ...
    def begin(self, after: Sequence[Moment], copies: Sequence[tuple[int, int, int]]) -> Moment:
        """Copy (to, from, bytes) each, after all of ``after``; reached when it is done. Nothing else there waits.

        Raises:
            RuntimeError: of the driver.
        """

def use_nccl_library(path: str) -> None:
    """Load NCCL from ``path``; empty: see `load_nccl`. Before its first use. Source: csrc/gpu/nccl_library.cpp."""

def load_nccl(wheels: Sequence[str]) -> tuple[str, int]:
    """(path, version as 22809 for 2.28.9) of the NCCL of this process.

    It is what the process has loaded already, or the first of ``wheels``, or the system's.

    Raises:
        RuntimeError: there is none, or one that is too old; says why.
    """

class NcclCommunicator:
    """One rank's end of a communicator of NCCL, whose calls end whatever becomes of other ranks.

    Collectives reduce or fill memory in place, and return `Barrier.OK` once they are enqueued on ``stream``. After
    `Barrier.TIMEOUT`, `Barrier.ABORTED` or an error it can only be aborted and closed. One thread calls, but for
    `abort`. Source: csrc/gpu/nccl_communicator.cpp.

    Raises:
        RuntimeError: NCCL refuses; in its words.
    """

    UNREGISTERED: int
    BUFFER: int
    WINDOW: int

    def __init__(self, device: int, unique_id: bytes, rank: int, size: int) -> None:
        """Begin to connect; `settle` waits for the other ranks."""
    @staticmethod
    def unique_id(device: int) -> bytes:
        """What one rank makes for all."""
    def settle(self, timeout_s: float) -> int:
        """Return once all ranks are connected."""
    def all_reduce(self, address: int, numel: int, dtype: int, op: int, stream: int, timeout_s: float) -> int: ...
    def reduce_scatter(self, address: int, block_numel: int, dtype: int, op: int, stream: int, timeout_s: float) -> int:
        """Block r of as many as there are ranks ends on rank r."""
    def all_gather(self, address: int, block_nbytes: int, stream: int, timeout_s: float) -> int:
        """Block r of as many as there are ranks is that of rank r."""
    def reduce(self, parts: Sequence[tuple[int, int, int]], dtype: int, op: int, stream: int, timeout_s: float) -> int:
        """(address, numel, root) each, as one group."""
    def broadcast(self, parts: Sequence[tuple[int, int, int]], stream: int, timeout_s: float) -> int:
        """(address, bytes, root) each, as one group."""
    def register_memory(self, segment: DeviceSegment, place: int, timeout_s: float) -> tuple[int, int]:
        """Have NCCL work in place in this rank's copy of ``segment``, which is copy ``place``; collective.

        Returns:
            As other calls, and how it does: `WINDOW`, `BUFFER`, or `UNREGISTERED` where this NCCL does not.
        """
    def wait(self, stream: int, timeout_s: float) -> int:
        """Sleep until all that is in ``stream`` now has been done."""
    def error(self) -> str:
        """What has failed since, in NCCL's words; empty if it knows of nothing."""
    def abort(self) -> None:
        """End what is on its way and every wait here. Returns at once; from any thread."""
    def close(self, timeout_s: float) -> bool:
        """Give it back once its work has been done, else abort it; whether NCCL has let go of it in time."""

def use_kernel_cache(directory: str) -> None:
    """Keep there what is compiled for GPUs at run time; empty: nowhere. Source: csrc/gpu/nvrtc.cpp."""

def kernel_image() -> str:
    """'ptx' where nvcc has compiled the kernels for GPUs at build time, 'nvrtc' where libnvrtc does at their first use.

    Source: csrc/gpu/device_kernels.cpp.
    """
