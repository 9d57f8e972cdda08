"""Starting and ending: many times, side by side, on some of the ranks, in the default runtime; nothing grows."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from mpi4py import MPI

import hvdlite
from backend_lab import RANK, SIZE, reduced
from hvdlite._native import SocketBell
from hvdlite.config import Config
from hvdlite.coordinator.tree import Tree
from hvdlite.dtypes import DType, ReduceOp
from hvdlite.errors import ConfigError, NotInitializedError, RankFailedError, ShutDownError, StartupError
from hvdlite.job_runtime import Runtime
from hvdlite.mpi import MpiRanks
from hvdlite.operations.allocate import allocate
from hvdlite.operations.barrier import barrier_async
from runtime_lab import LAYOUTS, TINY, Tensor, agree, allreduce, machines, running

pytestmark = pytest.mark.up_to_three_ranks

SubComm = Callable[[int], MPI.Intracomm | None]
several = pytest.mark.skipif(SIZE == 1, reason="needs ranks to leave out")


@pytest.fixture(scope="module")
def world() -> Iterator[MPI.Intracomm]:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


def sums(runtime: Runtime, name: str | None = None) -> str | None:
    """One allreduce, whose sum depends on who takes part."""
    tensor = Tensor.input(50, DType.FLOAT32)
    if runtime.size == SIZE:
        allreduce(runtime, tensor, name=name).wait()
        return tensor.problem(reduced(ReduceOp.SUM, 50, DType.FLOAT32))
    ones = Tensor.of(tensor.memory.view("float32") * 0 + 1.0, DType.FLOAT32)
    allreduce(runtime, ones, name=name).wait()
    return ones.problem(tensor.memory.view("float32") * 0 + float(runtime.size))


def test_several_runtimes_side_by_side(world: MPI.Intracomm, sub_comm: SubComm) -> None:
    """On all ranks twice, on the first ranks, and grouped into nodes; operations interleave freely."""
    first = sub_comm(max(1, SIZE - 1))
    with machines(LAYOUTS[-1]):
        split = Runtime(MpiRanks(world), TINY)
    with split, running(world) as one, running(world) as two:
        part = None if first is None else Runtime(MpiRanks(first), TINY)
        problems = []
        handles = []
        order = [one, split, two] if RANK % 2 else [two, one, split]
        for runtime in order * 5:
            tensor = Tensor.input(500, DType.INT32)
            handles.append((allreduce(runtime, tensor), tensor))
        if part is not None:
            problems.append(sums(part))
        for handle, tensor in handles:
            handle.wait()
            problems.append(tensor.problem(reduced(ReduceOp.SUM, 500, DType.INT32)))
        if part is not None:
            part.close()
        problems += [sums(runtime) for runtime in (one, two, split)]
        agree(world, *problems)


def test_who_waits_long_for_the_end_says_so(world: MPI.Intracomm, caplog: pytest.LogCaptureFixture) -> None:
    """Here until a thread lets the coordinator go on."""
    with running(world, replace(TINY, stall_check_time_s=0.1)) as runtime:
        worker = runtime.world.coordinator._worker
        is_held, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with worker.at_work:
                is_held.set()
                may_end.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
        threading.Timer(1.0, may_end.set).start()
        runtime.close()
        holder.join()
    said = [line for line in caplog.messages if f"rank {RANK} has waited for 0.1 s in hvd.shutdown()" in line]
    agree(world, None if len(said) == 1 else f"said: {caplog.messages}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_has_ended_does_not_wait_until_garbage_is_collected(layout: tuple[int, ...], world: MPI.Intracomm) -> None:
    """Its memory would stay as long, and its descriptors."""
    gc.collect()
    gc.disable()
    try:
        with running(world, TINY, layout) as runtime:
            problems = [sums(runtime, name) for name in (None, "sum") for _ in range(30)]
        left = {name: weakref.ref(one) for name, one in {"runtime": runtime, "world": runtime.world}.items()}
        del runtime
        agree(world, *problems, *(f"the {name} is there" for name, one in left.items() if one() is not None))
    finally:
        gc.enable()


@several
def test_disjoint_halves_work_at_the_same_time(world: MPI.Intracomm) -> None:
    half = world.Split(RANK % 2, RANK)
    with running(half) as runtime:
        assert (runtime.rank, runtime.size) == (RANK // 2, half.size)
        problems = [sums(runtime, f"step {step}") for step in range(20 + 20 * (RANK % 2))]
    half.Free()
    agree(world, *problems)


def test_rank_0_decides_the_settings(world: MPI.Intracomm) -> None:
    mine = Config(
        cache_capacity=3 + RANK, fusion_threshold_bytes=1000 * RANK, chunk_bytes=64 << RANK, tree_fanout=1 + RANK
    )
    with running(world, mine, LAYOUTS[-1]) as runtime:
        assert runtime.config.cache_capacity == 3
        assert runtime.config.fusion_threshold_bytes == 0
        assert runtime.config.tree_fanout == 1
        agree(world, *(sums(runtime, f"{i}") for i in range(10)))


def test_a_runtime_of_this_process_alone_needs_no_communicator(world: MPI.Intracomm) -> None:
    with Runtime(None, Config()) as runtime:
        assert (runtime.rank, runtime.size, runtime.topology.local_size, runtime.topology.cross_size) == (0, 1, 1, 1)
        tensor = Tensor.input(5, DType.FLOAT32)
        allreduce(runtime, tensor, op=ReduceOp.AVERAGE, postscale=2.0).wait()
        agree(world, tensor.problem(2 * Tensor.input(5, DType.FLOAT32).memory.view("float32").astype(float)))


def test_the_default_runtime_starts_and_ends_many_times(world: MPI.Intracomm) -> None:
    for turn in range(10):
        hvdlite.init()
        hvdlite.init()  # does nothing
        assert hvdlite.is_initialized()
        assert (hvdlite.rank(), hvdlite.size()) == (RANK, SIZE)
        assert (hvdlite.local_rank(), hvdlite.local_size()) == (RANK, SIZE)
        assert (hvdlite.cross_rank(), hvdlite.cross_size(), hvdlite.is_homogeneous()) == (0, 1, True)
        runtime = hvdlite.runtime()
        agree(world, sums(runtime, "again"))
        if turn % 2:
            world.Barrier()  # all end together, or each when it comes to it
        hvdlite.shutdown()
        hvdlite.shutdown()
        assert not hvdlite.is_initialized()
        with pytest.raises(NotInitializedError):
            hvdlite.size()
        with pytest.raises(NotInitializedError):
            hvdlite.runtime()
        with pytest.raises(ShutDownError):
            barrier_async(runtime.group)


@several
def test_init_with_some_ranks(world: MPI.Intracomm) -> None:
    """In the order of the list; the other ranks do not take part."""
    chosen = list(range(SIZE))[:0:-1]
    for _ in range(3):
        if RANK in chosen:
            hvdlite.init(comm=chosen)
            assert hvdlite.size() == SIZE - 1
            assert hvdlite.rank() == chosen.index(RANK)
            assert sums(hvdlite.runtime()) is None
            hvdlite.shutdown()
    world.Barrier()


def test_init_with_a_communicator_of_the_user(world: MPI.Intracomm) -> None:
    mine = world.Split(0, -RANK)
    hvdlite.init(comm=mine)
    mine.Free()  # it was duplicated
    assert hvdlite.rank() == SIZE - 1 - RANK
    assert sums(hvdlite.runtime()) is None
    hvdlite.shutdown()
    world.Barrier()


def test_init_with_ranks_that_make_no_sense(world: MPI.Intracomm) -> None:
    wrong = [[RANK, RANK], [RANK, SIZE], [r for r in range(SIZE + 1) if r != RANK], []]
    for ranks in wrong:
        with pytest.raises(ConfigError, match=r"hvd\.init\(comm="):
            hvdlite.init(comm=ranks)
        assert not hvdlite.is_initialized()
    agree(world)


def test_settings_that_do_not_parse_are_named(world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_CYCLE_TIME", "soon")
    with pytest.raises(ConfigError, match="HVDLITE_CYCLE_TIME='soon'"):
        hvdlite.init()
    monkeypatch.delenv("HVDLITE_CYCLE_TIME")
    hvdlite.init()
    hvdlite.shutdown()


def test_messages_of_the_user_do_not_mix_with_ours(world: MPI.Intracomm) -> None:
    """mpi4py on the same communicator, from another thread, with tags of any number."""
    with running(world, machine_of=LAYOUTS[-1]) as runtime:
        problems: list[str | None] = []

        def mine() -> None:
            for turn in range(50):
                left, right = (RANK - 1) % SIZE, (RANK + 1) % SIZE
                got = world.sendrecv((turn, RANK), right, turn % 4, source=left, recvtag=MPI.ANY_TAG)
                problems.append(None if got == (turn, left) else f"got {got} in turn {turn} from {left}")

        thread = threading.Thread(target=mine)
        thread.start()
        problems += [sums(runtime) for _ in range(50)]
        thread.join()
        agree(world, *problems)


@several
def test_a_start_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(world: MPI.Intracomm) -> None:
    """There is no room on the last rank's machine; once there is, all can start."""

    def no_room(node: object) -> None:
        raise ValueError("no room")

    def fail(layout: tuple[int, ...]) -> None:
        with machines(layout), pytest.MonkeyPatch.context() as patch:
            if RANK == SIZE - 1:
                patch.setattr("hvdlite.world.HostMemory", no_room)
            with pytest.raises((ValueError, StartupError), match="no room") as raised:
                Runtime(MpiRanks(world), TINY)
            problem = (
                None if RANK == SIZE - 1 or f"rank {SIZE - 1}: no room" in str(raised.value) else str(raised.value)
            )
            agree(world, problem)

    for layout in LAYOUTS:
        fail(layout)
        before = _resources()
        for _ in range(3):
            fail(layout)
        after = _resources()
        agree(world, *(f"{name}: {before[name]}, {after[name]}" for name in COUNTED if after[name] > before[name]))
        with running(world, TINY, layout) as runtime:
            agree(world, sums(runtime))


@several
def test_a_failure_wakes_who_sleeps_at_a_barrier_of_the_node(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would notice 0.1 s later, when they look by themselves."""
    woken: list[int] = []
    wake_all = hvdlite._native.wake_all
    monkeypatch.setattr(hvdlite._native, "wake_all", lambda address: (woken.append(address), wake_all(address)))
    with machines((0,) * SIZE):
        runtime = Runtime(MpiRanks(world), TINY)
    runtime.fail(ValueError("as a test"))
    with pytest.raises(RankFailedError):
        barrier_async(runtime.group).wait()
    runtime.close()
    agree(world, None if woken else "nobody was woken")


@several
def test_links_are_closed_after_the_bell_that_watches_them(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another socket may take their numbers."""
    closed: list[str] = []

    def noted(owner: type, name: str) -> None:
        close = getattr(owner, name)

        def note(self: object) -> None:
            closed.append(owner.__name__)
            close(self)

        monkeypatch.setattr(owner, name, note)

    noted(Tree, "abandon")
    noted(Tree, "close")
    noted(SocketBell, "close")
    for end in (Runtime.close, lambda runtime: runtime.world.release()):
        with machines(tuple(range(SIZE))):
            runtime = Runtime(MpiRanks(world), TINY)
        closed.clear()
        world.Barrier()
        end(runtime)
        problem = None if closed[:1] == ["SocketBell"] else f"{closed}"
        runtime.close()
        agree(world, problem)


COUNTED = ("files", "threads", "mappings")


def _resources() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:hvdlite" in line for line in maps)
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
        "resident": resident,
    }


@pytest.mark.time_limit(120)
def test_nothing_grows_with_the_number_of_runtimes(world: MPI.Intracomm) -> None:
    """Hundreds of them, as they come: collecting garbage is left to Python, as in a program."""

    def turn(count: int) -> None:
        for i in range(count):
            with running(world, TINY if i % 3 else Config(), LAYOUTS[i % len(LAYOUTS)]) as runtime:
                memory = allocate(runtime.group, 1 << 16).memory
                tensor = Tensor.at(memory, Tensor.input(900, DType.INT8).memory, DType.INT8)
                allreduce(runtime, tensor).wait()

    turn(20)  # whatever Python, MPI and the allocator keep
    before = _resources()
    turn(200 if SIZE < 3 else 60)
    allowed = dict.fromkeys(COUNTED, 0) | {"resident": 8 << 20}

    def grown() -> list[str]:
        after = _resources()
        growth = {name: after[name] - before[name] for name in before}
        return [f"{name}: {growth[name]} more" for name in growth if growth[name] > allowed[name]]

    until_s = time.monotonic() + 2
    while (problems := grown()) and time.monotonic() < until_s:  # a thread is there for a moment after it was joined
        time.sleep(0.01)
    agree(world, *problems)
