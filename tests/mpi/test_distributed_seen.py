"""What is seen of process groups over hvdlite: by profilers, in timelines, and in statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import hvdlite.torch as hvd
from distributed_lab import NODES, RANK, SIZE, beside_hvdlite, process_group, told
from hvdlite.timeline.report import build_report

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]


@pytest.fixture
def timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the settings of all ranks name; a test ends once each has looked."""
    path = Path(str(told(str(tmp_path / "timeline.json"))[0]))
    monkeypatch.setenv("HVDLITE_TIMELINE", str(path))
    yield path
    told(None)


def test_profilers_show_calls() -> None:
    with process_group():
        with torch.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3))
            dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * SIZE)
            dist.barrier()
            for _ in range(20):
                sent = dist.isend(torch.ones(3), (RANK + 1) % SIZE)
                dist.irecv(torch.ones(3), (RANK - 1) % SIZE).wait()
                sent.wait()
                dist.broadcast(torch.ones(3), 0, async_op=True).wait()
        shown = [event for event in profile.events() if event.name.startswith("hvdlite:")]
        assert all(event.is_async for event in shown)
        shapes = {event.name: event.input_shapes for event in shown}
        assert shapes["hvdlite:reduce_scatter"] == [[2]] * SIZE
        assert shapes["hvdlite:all_reduce"] == shapes["hvdlite:send"] == shapes["hvdlite:recv"] == [[3]]
        assert shapes["hvdlite:barrier"] == []
        names = Counter(event.name for event in shown)
        assert names["hvdlite:all_reduce"] == names["hvdlite:barrier"] == 1
        assert names["hvdlite:broadcast"] == names["hvdlite:send"] == names["hvdlite:recv"] == 20


@pytest.mark.parametrize("hvdlite_first", [True, False])
def test_one_timeline_and_one_count_of_both(hvdlite_first: bool, tmp_path: Path) -> None:
    path = told(str(tmp_path / "timeline.json"))[0]
    with beside_hvdlite(hvdlite_first=hvdlite_first):
        before = hvd.statistics()["reduced_bytes"]
        hvd.start_timeline(path)
        hvd.barrier()  # from here on it records on all ranks
        dist.all_gather([torch.empty(10) for _ in range(SIZE)], torch.ones(10))
        group = dist.new_group(range(SIZE))
        dist.all_reduce(torch.ones(100), group=group)
        dist.destroy_process_group(group)
        hvd.allreduce(torch.ones(100), name="gradient")
        torch.optim.SGD([torch.ones(1)]).step()
        hvd.barrier()  # after which no rank has anything to record
        hvd.stop_timeline()
        assert hvd.statistics()["reduced_bytes"] - before == 800
        if RANK == 0:
            events = json.loads(Path(path).read_text())["traceEvents"]
            names = {event["name"] for event in events}
            assert {"all_gather", "all_reduce"} <= names, names
            steps = {event["pid"] for event in events if (event.get("cat"), event["name"]) == ("optimizer", "step")}
            assert steps == set(range(SIZE))
            assert any("gradient" in name for name in names), names


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_timeline_of_the_settings_needs_no_init(nodes: tuple[int, ...], timeline: Path) -> None:
    with process_group(nodes):
        dist.broadcast(torch.ones(10), 0)
    if RANK == 0:
        assert "broadcast" in {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
        assert [entry.name for entry in timeline.parent.iterdir()] == [timeline.name]


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_timeline_has_the_steps_of_optimizers_and_what_backward_waits_for(
    nodes: tuple[int, ...], timeline: Path
) -> None:
    with process_group(nodes):
        layers = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 1))
        model = DistributedDataParallel(layers, bucket_cap_mb=1e-3)
        optimizer = _AroundAnother(model.parameters())
        for _ in range(3):
            model(torch.ones(4, 30)).mean().backward()
            optimizer.step()
    assert not _global_optimizer_pre_hooks  # they end with the group
    if RANK == 0:
        trace = json.loads(timeline.read_text())
        ranks: dict[int, list[tuple[float, float, str]]] = {rank: [] for rank in range(SIZE)}
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and (event["cat"], event["name"]) in _PARTS_OF_A_STEP:
                ranks[event["pid"]].append((event["ts"], event["ts"] + event["dur"], event["cat"]))
        for spans in ranks.values():
            spans.sort()
            assert [lane for _, _, lane in spans] == ["backward", "wait", "optimizer"] * 3
            assert all(end <= start + 1e-3 for (_, end, _), (start, _, _) in pairwise(spans)), spans
        assert len(build_report(trace).steps) == 2


class _AroundAnother(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer is."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self._inside = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self) -> None:  # type: ignore[override]
        self._inside.step()


_PARTS_OF_A_STEP = {("backward", "backward"), ("wait", "hvdlite:all_reduce"), ("optimizer", "step")}


def test_init_begins_the_timeline_of_the_settings_anew(timeline: Path) -> None:
    with process_group():
        dist.broadcast(torch.ones(10), 0)
        hvd.init()
        hvd.allreduce(torch.ones(3), name="gradient")
        dist.all_gather([torch.empty(1) for _ in range(SIZE)], torch.ones(1))
        hvd.shutdown()
    if RANK == 0:
        names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
        assert "all_gather" in names and "broadcast" not in names
        assert any("gradient" in name for name in names), names


def test_statistics_count_what_a_group_has_reduced() -> None:
    with process_group() as group:
        before = group.statistics()
        dist.all_reduce(torch.ones(100))
        after = group.statistics()
        assert after["reduced_bytes"] - before["reduced_bytes"] == 400
        assert after["buckets"] - before["buckets"] == 1
