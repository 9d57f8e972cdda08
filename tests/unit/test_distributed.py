"""What process groups are made of: the order of calls, what ranks say that contradict one another, the entry point."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdlite import plain
from hvdlite.distributed.call import call_on, call_without_shape, contradiction
from hvdlite.distributed.creation import create
from hvdlite.distributed.lane import Lane
from hvdlite.distributed.meeting import listen
from hvdlite.distributed.profiled import Profiled
from hvdlite.distributed.work import GroupWork, all_of
from hvdlite.errors import CollectiveError, RankFailedError, StartupError
from hvdlite.links.proof import new_key
from hvdlite.naps import Patience
from hvdlite.start.rendezvous import MissingError, RendezvousRanks
from hvdlite.start.torch_store import InGivenStore

ROOT = Path(__file__).resolve().parents[2]


def test_tasks_are_done_in_order_by_whoever_waits_or_the_thread() -> None:
    lane, done = Lane("test"), []
    works = [GroupWork(lambda n=n: done.append(n), [], str(n)) for n in range(200)]  # type: ignore[misc]
    for number, work in enumerate(works):
        work.begin(lane, is_awaited=number % 7 == 0)
        if number % 5 == 0:
            work.wait()
            assert work.is_success()
    works[-1].wait()
    assert done == list(range(200))
    assert lane.close(10)


def test_who_waits_does_nothing_that_comes_later() -> None:
    lane, gate = Lane("test"), threading.Event()
    first, second = GroupWork(lambda: None, [], "first"), GroupWork(gate.wait, [], "second")
    first.begin(lane, is_awaited=False)
    second.begin(lane, is_awaited=False)
    first.wait()  # would wait for ever with the second
    assert not second.is_completed()
    gate.set()
    second.wait()
    assert lane.close(10)


def test_what_a_callback_adds_is_done_before_what_waits_already() -> None:
    """Ranks differ in how much that is."""
    lane, gate, done = Lane("test"), threading.Event(), []
    first = GroupWork(gate.wait, [], "first")
    first.begin(lane, is_awaited=False)

    def then(_: object) -> None:
        for name, is_awaited in (("for nobody", False), ("awaited", True)):
            GroupWork(lambda name=name: done.append(name), [], name).begin(lane, is_awaited=is_awaited)  # type: ignore[misc]

    called = first.get_future().then(then)
    last = GroupWork(lambda: done.append("last"), [], "last")
    last.begin(lane, is_awaited=False)
    gate.set()
    last.wait()
    called.wait()
    assert done == ["for nobody", "awaited", "last"]
    assert lane.close(10)


def test_a_wait_has_a_limit_and_an_error_is_kept() -> None:
    lane, gate = Lane("test"), threading.Event()
    slow = GroupWork(gate.wait, [], "slow")
    slow.begin(lane, is_awaited=False)
    with pytest.raises(CollectiveError, match="slow is not done after the timeout of 0.05 s"):
        slow.wait(timedelta(seconds=0.05))
    wrong = GroupWork(lambda: 1 / 0, [], "wrong")
    wrong.begin(lane, is_awaited=False)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        wrong.wait()
    assert isinstance(wrong.exception(), ZeroDivisionError)
    assert not wrong.is_success()
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        wrong.get_future().wait()
    assert lane.close(10)


def test_a_callback_may_wait_for_the_future_of_another_call() -> None:
    lane, gate, done = Lane("test"), threading.Event(), []
    first = GroupWork(gate.wait, [], "first")
    first.begin(lane, is_awaited=False)

    def then(_: object) -> None:
        second = GroupWork(lambda: done.append("second"), [], "second")
        second.begin(lane, is_awaited=False)
        second.get_future().wait()  # torch's, which knows of no lane; the lane's thread is here
        done.append("callback")

    future = first.get_future().then(then)
    gate.set()
    future.wait()
    assert done == ["second", "callback"]
    assert lane.close(10)


def test_what_a_profiler_shows_ends_before_anybody_learns_that_the_call_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, seen = GroupWork(None, [], "shown"), []
    work.profiled = Profiled("shown", [])
    monkeypatch.setattr(work.profiled, "end", lambda: seen.append(work.is_completed()))
    work.get_future().add_done_callback(lambda _: seen.append("callback"))
    work.finish()
    assert seen == [False, "callback"]


@pytest.mark.parametrize("ends_elsewhere", [False, True])
def test_what_a_profiler_shows_has_shapes_and_is_asynchronous(ends_elsewhere: bool) -> None:
    with torch.profiler.profile(record_shapes=True) as profiler:
        shown = Profiled("shown", [torch.ones(3, 4), [torch.ones(5)], []])
        if ends_elsewhere:
            thread = threading.Thread(target=shown.end)
            thread.start()
            thread.join()
        else:
            shown.end()
    (event,) = [event for event in profiler.events() if event.name == "shown"]
    assert event.input_shapes == [[3, 4], [5]]
    assert event.is_async


def test_several_works_as_one() -> None:
    lane, gate = Lane("test"), threading.Event()
    works = [GroupWork(run, [], "") for run in (gate.wait, lambda: None)]
    together = all_of(works)
    for work in works:
        work.begin(lane, is_awaited=False)
    assert not together.is_completed()
    gate.set()
    assert together.wait() and all(work.is_completed() for work in works)
    wrong = GroupWork(lambda: 1 / 0, [], "wrong")
    together = all_of([*works, wrong])
    wrong.begin(lane, is_awaited=False)
    with pytest.raises(ZeroDivisionError):
        together.wait()
    assert all_of([]).wait()
    assert lane.close(10)


def test_a_lane_without_work_sleeps() -> None:
    lane = Lane("test")
    GroupWork(lambda: None, [], "one").begin(lane, is_awaited=False)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    assert lane.close(10)


def test_contradictions_name_what_differs() -> None:
    float32, float64 = torch.float32, torch.float64
    same = [call_on("all_reduce", torch.Size([2, 3]), float32, "SUM")] * 2
    other = call_on("all_reduce", torch.Size([2, 3]), float64, "SUM")
    assert same[0].card != other.card
    text = str(contradiction("0", [call.text for call in (*same, other)], [4, 5, 9]))
    assert "dtype is torch.float32 on ranks 4 and 5 but torch.float64 on rank 9" in text
    assert "shape is" not in text
    text = str(contradiction("0", [same[0].text, call_without_shape("barrier").text], [0, 1]))
    assert "they call all_reduce((2, 3), torch.float32, SUM) on rank 0 but barrier() on rank 1" in text
    assert text.endswith(
        "Threads that call at the same time, as that of dcp.async_save does, need a group each: dist.new_group()."
    )


@pytest.mark.skipif(torch.__version__ < "2.5", reason="torch 2.5 and later look for backends")
def test_importing_torch_registers_the_backend_and_imports_nothing_of_hvdlite() -> None:
    script = (
        "import importlib.metadata as m, sys\n"
        "entry = m.EntryPoint('hvdlite', 'hvdlite_torch_backend:register', 'torch.backends')\n"
        "found = m.entry_points\n"
        "m.entry_points = lambda **k: [entry] if k.get('group') == 'torch.backends' else found(**k)\n"
        "import torch, torch.distributed as dist\n"
        "assert 'hvdlite' in dist.Backend.backend_list\n"
        "assert 'hvdlite' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)
    assert 'hvdlite = "hvdlite_torch_backend:register"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("addresses", "seen"), [(["192.0.2.1", "127.0.0.1"], "127.0.0.1"), (["127.0.0.1", "::1"], "::ffff:127.0.0.1")]
)
def test_who_comes_to_the_store_has_an_address_that_hosts_files_know(addresses: list[str], seen: str) -> None:
    """Where all are of IPv4; a store at an address of IPv6 takes both."""
    with listen(addresses) as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        link, address = listener.accept()
        link.close()
    assert address[0] == seen


def test_a_store_at_one_address_is_nowhere_else() -> None:
    with listen(["127.0.0.1"]) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.getsockname()[1]), timeout=5)


class Store:
    """torch's, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def get(self, name: str) -> bytes:
        return self.values[name]

    def check(self, names: list[str]) -> bool:
        return set(names) <= self.values.keys()


class Gone:
    """A store whose process has ended while ranks wait."""

    def set(self, name: str, value: bytes) -> None:
        pass

    def check(self, names: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


class Trap:
    """What runs a program where it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def test_what_strangers_write_into_a_store_is_data_at_most() -> None:
    store = Store()
    store.set("start:1/1", pickle.dumps(Trap()))
    with pytest.raises(StartupError, match="another program has written where ranks meet"):
        RendezvousRanks(InGivenStore(store), "start", range(2), 0, 1.0).allgather("mine")


def test_ranks_that_have_a_key_take_nothing_else_from_a_store() -> None:
    store, key = Store(), new_key()
    place = InGivenStore(store, key)
    assert RendezvousRanks(place, "alone", range(1), 0, 1.0).allgather(("mine", b"\0")) == [("mine", b"\0")]
    assert key not in b"".join(store.values.values())
    for forged in (plain.dumps("theirs"), bytes(32) + plain.dumps("theirs"), store.get("alone:1/0"), b""):
        store.set("start:1/1", forged)
        with pytest.raises(StartupError, match="another program has written start:1/1 into the store"):
            RendezvousRanks(place, "start", range(2), 0, 1.0).allgather("mine")


def test_who_cannot_come_any_more_is_not_waited_for() -> None:
    error = RankFailedError(1, "rank 1 died")
    for store in (Store(), Gone()):
        with pytest.raises(RankFailedError) as caught:
            InGivenStore(store, obstacle=lambda: error).gather("start", range(2), 0, b"mine", Patience(3600.0))
        assert caught.value is error
    with pytest.raises(StartupError, match="is gone: Broken pipe"):
        InGivenStore(Gone()).gather("start", range(2), 0, b"mine", Patience(3600.0))


def test_who_has_come_before_it_left_is_not_missed() -> None:
    store = Store()

    def obstacle() -> MissingError:
        store.set("start/1", b"theirs")  # just after this rank has looked for it
        return MissingError.of([1], "left")

    assert InGivenStore(store, obstacle=obstacle).gather("start", range(2), 0, b"mine", Patience(3600.0)) == [
        b"mine",
        b"theirs",
    ]


TWICE = """
import sys
import torch, torch.distributed as dist
import hvdlite.torch as hvd

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
for _ in range(2):
    dist.init_process_group("hvdlite", store=store, rank=rank, world_size=2)
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
    hvd.shutdown()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("names", [[], [4, 6, 9]])
def test_a_start_that_fails_waits_for_nobody_who_has_not_come(
    names: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks the last has come, and has failed already; a rank that may have the store waits for it alone."""
    waited_for = []
    gather = InGivenStore.gather

    def noted(place: InGivenStore, key: str, ranks: Sequence[int], *arguments: Any) -> list[bytes]:
        waited_for.append((key, list(ranks)))
        return gather(place, key, ranks, *arguments)

    monkeypatch.setattr(InGivenStore, "gather", noted)
    store, ranks = torch.distributed.HashStore(), names or [0, 1, 2]
    for key in ("3.0/where", "failed"):
        store.set(f"hvdlite/{key}/{ranks[2]}", "-")
    options = SimpleNamespace(
        store=store,
        group_rank=0,
        group_size=3,
        group_id="7",
        global_ranks_in_group=names,
        timeout=timedelta(seconds=0.1),
    )
    with pytest.raises(StartupError, match=f"rank {ranks[1]} did not come within 0.1 s") as caught:
        create(options)
    assert caught.type is StartupError
    assert waited_for == [("hvdlite/3.0/where", ranks), ("hvdlite/failed", [ranks[0], ranks[2]])]


def test_hvd_init_meets_in_a_store_that_outlives_the_group(tmp_path: Path) -> None:
    programs = [
        subprocess.Popen([sys.executable, "-c", TWICE, str(rank), str(tmp_path / "store")], cwd=ROOT)
        for rank in range(2)
    ]
    try:
        assert [program.wait(60) for program in programs] == [0, 0]
    finally:
        for program in programs:
            program.kill()
            program.wait()
