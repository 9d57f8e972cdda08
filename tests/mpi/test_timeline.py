"""start_timeline() and stop_timeline() on running ranks; the file itself is tests/unit/test_timeline*.py's."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


def record(path: Path, *, mark_cycles: bool = False) -> list[dict]:
    """The events of one allreduce, on rank 0; nothing on others."""
    hvd.start_timeline(str(path), mark_cycles=mark_cycles)
    hvd.allreduce(torch.ones(3), name="between")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="after")
    return events_of(path) if hvd.rank() == 0 else []


def events_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


@pytest.fixture
def directory(running: None) -> Iterator[Path]:
    """One for all ranks: rank 0's."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(hvd.broadcast_object(own))


@pytest.mark.parametrize("mark_cycles", [False, True])
def test_all_ranks_are_in_the_file_of_rank_0(directory: Path, mark_cycles: bool) -> None:
    events = record(directory / f"rank{hvd.rank()}.json", mark_cycles=mark_cycles)
    hvd.barrier()
    assert [path.name for path in directory.iterdir()] == ["rank0.json"]
    if hvd.rank() == 0:
        operations = [event for event in events if "between" in event["name"]]
        assert {event["pid"] for event in operations} == set(range(hvd.size()))
        assert not any("after" in event["name"] for event in events)
        assert any(event["name"] == "CYCLE_START" for event in events) == mark_cycles


def test_rank_0_alone_starts_it_on_all(directory: Path) -> None:
    path = directory / "alone.json"
    if hvd.rank() == 0:
        hvd.start_timeline(str(path))
    hvd.allreduce(torch.ones(3), name="between")
    if hvd.rank() == 0:
        hvd.stop_timeline()
        names = {(event["pid"], event["name"]) for event in events_of(path)}
        assert {pid for pid, name in names if "between" in name} == set(range(hvd.size()))


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_ranks_that_work_in_other_directories_write_into_the_same_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str], Any]
) -> None:
    own = directory / f"rank{hvd.rank()}"
    own.mkdir()
    monkeypatch.chdir(own)
    hvd.start_timeline(kind("trace.json"))
    hvd.allreduce(torch.ones(3), name="between")
    hvd.stop_timeline()
    hvd.barrier()
    assert list(own.iterdir()) == [own / "trace.json"] * (hvd.rank() == 0)
    if hvd.rank() == 0:
        assert {event["pid"] for event in events_of(own / "trace.json")} == set(range(hvd.size()))


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", None])
def test_what_is_no_path_is_an_error_of_the_caller_alone(directory: Path, path: Any) -> None:
    if hvd.rank() == 0:
        with pytest.raises((ValueError, TypeError)):
            hvd.start_timeline(path)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_one_after_the_other(directory: Path) -> None:
    for i in range(3):
        events = record(directory / f"{i}.json")
        assert hvd.rank() != 0 or any("between" in event["name"] for event in events)


@pytest.mark.parametrize("late", [False, True])
def test_the_end_of_another_rank_completes_the_file(directory: Path, late: bool) -> None:
    """As in the last lines of a script: rank 1 is through, and rank 0 has nobody left to tell."""
    if hvd.size() == 1:
        pytest.skip("there is no other rank")
    path, rank = directory / "last.json", hvd.rank()
    hvd.start_timeline(str(path))
    hvd.allreduce(torch.ones(3), name="between")
    if rank == 1:
        hvd.shutdown()
    if rank == 0:
        if late:
            with pytest.raises(hvd.HorovodInternalError):
                hvd.barrier()  # so that the end of rank 1 has come here
        hvd.stop_timeline()
        assert any("between" in event["name"] for event in events_of(path))
        if late:
            with pytest.raises(hvd.HorovodInternalError):
                hvd.start_timeline(str(path))
    hvd.shutdown()
    hvd.init()


def test_the_last_step_of_a_slower_rank_is_in_the_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ends as soon as it has stepped; the last one hears of that in its step."""
    if hvd.size() == 1:
        pytest.skip("there is no slower rank")
    rank, has_ended, runtime = hvd.rank(), threading.Event(), hvdlite.runtime()
    takes = runtime._timeline.take_notice

    def take_notice(content: dict[str, Any]) -> None:
        if content["kind"] == "shutdown":
            has_ended.set()
        takes(content)

    class Slow(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            if is_last and rank == hvd.size() - 1:
                has_ended.wait(30)
                time.sleep(0.1)  # so that the file would be complete by now
            return super().step(*args, **kwargs)

    monkeypatch.setattr(runtime._timeline, "take_notice", take_notice)
    model, is_last = torch.nn.Linear(3, 1), False
    optimizer = hvd.DistributedOptimizer(Slow(model.parameters(), 0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.start_timeline(str(directory / "slower.json"))
    hvd.barrier()
    for is_last in (False, False, True):  # noqa: B007
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    hvd.shutdown()
    try:
        events = events_of(directory / "slower.json") if rank == 0 else []
        steps = [event["pid"] for event in events if event.get("cat") == "optimizer"]
        assert rank != 0 or [steps.count(each) for each in (0, runtime.size - 1)] == [3, 3]
    finally:
        hvd.init()


def test_the_end_of_this_rank_completes_the_file(directory: Path) -> None:
    path, rank = directory / "own.json", hvd.rank()
    hvd.start_timeline(str(path))
    hvd.allreduce(torch.ones(3), name="between")
    hvd.shutdown()
    try:
        hvd.stop_timeline()
        assert rank != 0 or any("between" in event["name"] for event in events_of(path))
    finally:
        hvd.init()


def test_a_call_of_another_rank_does_nothing(directory: Path) -> None:
    if hvd.rank() != 0:
        hvd.start_timeline(str(directory / "other.json"))
    hvd.barrier()
    assert not hvdlite.runtime().recorder.enabled


def test_a_row_for_every_parameter_names_its_bucket(directory: Path) -> None:
    """In the first steps of a recording."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    hvd.start_timeline(str(directory / "parameters.json"))
    hvd.barrier()
    for _ in range(23):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    hvd.stop_timeline()
    if hvd.rank() != 0 or hvd.size() == 1:
        return
    events = [event for event in events_of(directory / "parameters.json") if event.get("cat") == "parameter"]
    for rank in range(hvd.size()):
        own = [event for event in events if event["pid"] == rank]
        assert len(own) == 20 * 4
        assert {event["name"] for event in own} == {name for name, _ in model.named_parameters()}
        assert len({event["tid"] for event in own}) == 4
        assert all(".bucket" in event["args"]["bucket"] for event in own)


def test_a_step_tells_the_process_set_of_its_optimizer(directory: Path) -> None:
    """Of ranks that are no members it says that they are alone."""
    if hvd.size() == 1:
        pytest.skip("there is no other process set")
    first = hvd.add_process_set([0])
    hvd.start_timeline(str(directory / "sets.json"))
    hvd.barrier()
    for process_set in (hvd.global_process_set, first):
        model = torch.nn.Linear(3, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), process_set=process_set
        )
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    number = first.process_set_id
    hvd.barrier()  # ranks that are no members may be behind
    hvd.stop_timeline()
    hvd.remove_process_set(first)
    if hvd.rank() == 0:
        steps = [event for event in events_of(directory / "sets.json") if event.get("cat") == "optimizer"]
        for rank in range(hvd.size()):
            told = [event["args"]["process set"] for event in steps if event["pid"] == rank]
            assert told == ["0", str(number) if rank == 0 else "none"]


@pytest.mark.parametrize(
    ("operation", "label"),
    [
        (lambda: hvd.allreduce(torch.ones(3), name="again"), "allreduce 'again'"),
        (lambda: hvd.grouped_allreduce([torch.ones(3), torch.ones(4)], name="again"), "allreduce 'again'"),
        (lambda: hvd.allgather(torch.ones(3), name="again"), "allgather 'again'"),
        (hvd.barrier, "barrier"),
    ],
)
def test_waits_for_what_repeats_are_shown_every_time(directory: Path, operation: Callable[[], Any], label: str) -> None:
    """Also once it is a plan's, and done where it is called: the wait is how the report knows who is late."""
    hvd.start_timeline(str(directory / "again.json"))
    hvd.barrier()
    begin_ns = time.monotonic_ns()
    for _ in range(20):
        operation()
    end_ns = time.monotonic_ns()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        trace = json.loads((directory / "again.json").read_text())
        origin_ns = int(trace["otherData"]["origin_ns"])
        waits = [event for event in trace["traceEvents"] if event.get("cat") == "wait" and event["name"] == label]
        begun_ns = [event["ts"] * 1000 + origin_ns for event in waits if event["pid"] == 0]
        assert sum(begin_ns <= at_ns <= end_ns for at_ns in begun_ns) >= 20
