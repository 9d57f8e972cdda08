"""Recording, rows, clocks, and the timeline of a job of several nodes."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hvdlite.config import Config
from hvdlite.job_runtime import Runtime
from hvdlite.recorder import INSTANT, Event, Lane, Recorder
from hvdlite.timeline.chrome_trace import TraceWriter
from hvdlite.timeline.clock import estimate_offset
from hvdlite.timeline.timeline import Timeline


def load(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events


def rows(lines: list[bytes]) -> dict[str, list[tuple[str, float, float]]]:
    """The spans of a trace by the name of their row."""
    events = [json.loads(line) for line in lines]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    return found


# Recorder


def test_nothing_is_recorded_before_start_and_after_stop() -> None:
    recorder = Recorder()
    for step in ("before", "during", "after"):
        if step == "during":
            recorder.start()
        if step == "after":
            recorder.stop()
        with recorder.span(Lane.PACK, step):
            pass
        recorder.add(Lane.RING, step, 1, 2)
        recorder.mark(Lane.CYCLE, step)
    events, dropped = recorder.drain()
    assert [(event[1], event[2]) for event in events] == [
        (Lane.PACK, "during"),
        (Lane.RING, "during"),
        (Lane.CYCLE, "during"),
    ]
    assert dropped == 0


def test_a_span_is_timed_and_kept_when_its_block_raises() -> None:
    recorder = Recorder()
    recorder.start()
    inside_ns = 0

    def fail() -> None:
        nonlocal inside_ns
        inside_ns = time.monotonic_ns()
        raise KeyError

    before_ns = time.monotonic_ns()
    with pytest.raises(KeyError), recorder.span(Lane.RING, "bucket 0", 4096, "float32"):
        fail()
    after_ns = time.monotonic_ns()
    ((_, lane, name, start_ns, end_ns, nbytes, dtype),), _ = recorder.drain()
    assert (lane, name, nbytes, dtype) == (Lane.RING, "bucket 0", 4096, "float32")
    assert before_ns <= start_ns <= inside_ns <= end_ns <= after_ns


def test_a_disabled_span_lets_exceptions_through() -> None:
    with pytest.raises(KeyError), Recorder().span(Lane.RING, "bucket 0"):
        raise KeyError


def test_a_full_ring_drops_the_oldest_and_counts_them() -> None:
    recorder = Recorder(max_events=10)
    recorder.start()
    for round_ in range(2):
        for i in range(25):
            recorder.add(Lane.PACK, f"{round_}.{i}", i, i + 1)
        events, dropped = recorder.drain()
        assert [event[2] for event in events] == [f"{round_}.{i}" for i in range(15, 25)]
        assert dropped == 15
    recorder.add(Lane.PACK, "last", 0, 1)
    assert [event[2] for event in recorder.drain()[0]] == ["last"]
    assert recorder.drain() == ([], 0)


def test_every_event_of_every_thread_is_drained_or_counted() -> None:
    threads, each = 4, 5000
    recorder = Recorder(max_events=100)
    recorder.start()

    def record() -> None:
        for i in range(each):
            recorder.add(Lane.PACK, "x", i, i + 1)

    workers = [threading.Thread(target=record) for _ in range(threads)]
    for worker in workers:
        worker.start()
    drained = dropped = 0
    while any(worker.is_alive() for worker in workers):
        events, missing = recorder.drain()
        drained, dropped = drained + len(events), dropped + missing
    for worker in workers:
        worker.join()
    events, missing = recorder.drain()
    drained, dropped = drained + len(events), dropped + missing
    # What was dropped since the ring was last seen full is counted when it is next full.
    for i in range(100):
        recorder.add(Lane.PACK, "x", i, i + 1)
    events, missing = recorder.drain()
    assert drained + dropped + len(events) + missing == threads * each + 100


# Clock


def test_the_shortest_round_trip_gives_the_offset() -> None:
    offset_ns = 5_000_000_000
    # (there, back) in ns; only the second is symmetric, and it is the shortest.
    trips, now = [], 1_000
    for there, back in [(900, 100), (50, 50), (100, 700)]:
        trips.append((now, now + there + offset_ns, now + there + back))
        now += 10_000
    assert estimate_offset(trips) == offset_ns
    # However unequal the two ways, it is wrong by half a round trip at most.
    assert abs(estimate_offset(trips[:1]) - offset_ns) <= 500


# Rows


def event(lane: Lane, name: str, start: int, end: int, nbytes: int = 0, dtype: str = "") -> Event:
    return (0, lane, name, start, end, nbytes, dtype)


def test_lanes_have_a_fixed_order_and_events_keep_their_nanoseconds() -> None:
    writer = TraceWriter(rank=3, node_index=1, offset_ns=-1000)
    lines = writer.introduction() + writer.lines(
        [
            event(Lane.UNPACK, 'a "quoted" name\n', 2_001_234, 2_001_235, 4096, "bfloat16"),
            event(Lane.BACKWARD, "backward", 1_000, 2_000_000),
            event(Lane.CYCLE, "cycle", 5_000, INSTANT),
        ]
    )
    events = [json.loads(line) for line in lines]
    assert {e["pid"] for e in events} == {3}
    assert events[0]["args"]["name"] == "rank 3 (node 1)"
    assert events[1] == {"ph": "M", "name": "process_sort_index", "pid": 3, "tid": 0, "args": {"sort_index": 3}}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(order, key=lambda tid: order[tid])] == ["backward", "unpack", "cycle"]
    unpack, backward, cycle = (e for e in events if e["ph"] != "M")
    assert unpack["name"] == 'a "quoted" name\n'
    assert (unpack["ts"], unpack["dur"], unpack["cat"]) == (2000.234, 0.001, "unpack")
    assert unpack["args"] == {"bytes": 4096, "dtype": "bfloat16"}
    assert (backward["ts"], backward["dur"]) == (0, 1999.0)
    assert (cycle["ph"], cycle["ts"], names[cycle["tid"]]) == ("i", 4.0, "cycle")


def test_the_time_of_day_at_which_the_recording_began_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000_000_005_000)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 7_000_000)
    process = json.loads(TraceWriter(0, 0, offset_ns=-4_000_000).introduction()[0])
    assert process["args"]["start_time_since_epoch_in_micros"] == 1_800_000_000_000_005 - 3_000


def test_what_began_before_the_recording_begins_with_it() -> None:
    lines = TraceWriter(0, 0, offset_ns=-10_000).lines([event(Lane.NEGOTIATION, "early", 4_000, 12_000)])
    assert rows(lines)["negotiation"] == [("early", 0.0, 2.0)]


def test_spans_that_overlap_in_part_go_to_rows_of_their_own() -> None:
    writer = TraceWriter(0, 0, 0)
    spans = [("a", 0, 40), ("b", 10, 50), ("c", 20, 60), ("d", 40, 70), ("e", 60, 80), ("around e", 55, 90)]
    # In two batches, as the background thread sees them.
    lines = writer.lines([event(Lane.NEGOTIATION, n, s * 1000, e * 1000) for n, s, e in spans[:3]])
    lines += writer.lines([event(Lane.NEGOTIATION, n, s * 1000, e * 1000) for n, s, e in spans[3:]])
    assert rows(lines) == {
        "negotiation": [("a", 0, 40), ("d", 40, 70)],
        "negotiation 2": [("b", 10, 50), ("e", 60, 80), ("around e", 55, 90)],
        "negotiation 3": [("c", 20, 60)],
    }


def test_rows_never_hold_spans_that_overlap_in_part() -> None:
    # 40 tensors wait at a time, as with many small parameters.
    spans = sorted(((i * 7, i * 7 + 280 + i * 37 % 50) for i in range(2000)), key=lambda span: span[1])
    writer = TraceWriter(0, 0, 0)
    found = rows(writer.lines([event(Lane.NEGOTIATION, "t", s * 1000, e * 1000) for s, e in spans]))
    assert sum(map(len, found.values())) == 2000
    assert len(found) < 100
    for row in found.values():
        open_until: list[float] = []
        for _, start, end in sorted(row, key=lambda span: (span[1], -span[2])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_an_event_always_fits_a_page() -> None:
    (*_, line) = TraceWriter(2**20, 0, 0).lines([event(Lane.RING, "\U0001f600" * 500, 1, 2, 2**60, "\U0001f600" * 500)])
    assert len(line) < 4000
    assert json.loads(line)["name"] == "\U0001f600" * 150


# Timeline


class Leaders:
    """The communicator of node leaders, among threads: a gather to the first of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: queue.Queue[bytes] = queue.Queue()

    def gather(self, index: int, data: bytes) -> list[bytes] | None:
        self._queue.put(data)
        return [self._queue.get(timeout=10) for _ in range(self._size)] if index == 0 else None


def make(path: Path, rank: int, node: int, leader: bool, offset_ns: int = 0) -> tuple[Timeline, Recorder]:
    recorder = Recorder()
    timeline = Timeline(rank, node, leader, recorder, offset_ns)
    timeline.start(str(path), mark_cycles=False, origin_ns=1_000)
    return timeline, recorder


def test_all_ranks_of_all_nodes_end_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    # Rank 2's clock is 100 us behind the root's.
    places = [(0, 0, True, 0), (1, 0, False, 0), (2, 1, True, 100_000)]
    jobs = [make(path, *place) for place in places]
    assert [timeline.is_recording for timeline, _ in jobs] == [True] * 3
    for (_, recorder), (_, _, _, offset_ns) in zip(jobs, places, strict=True):
        recorder.add(Lane.RING, "bucket 0", 501_000 - offset_ns, 601_000 - offset_ns, 64, "float32")
    for timeline, _ in jobs:
        timeline.flush_and_close()
        timeline.flush_and_close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.json", "trace.node1.json"]
    leaders = Leaders(2)
    merging = [
        threading.Thread(target=lambda t=timeline, n=place[1]: t.merge(lambda data: leaders.gather(n, data)))
        for (timeline, _), place in zip(jobs, places, strict=True)
    ]
    for thread in merging:
        thread.start()
    for thread in merging:
        thread.join(timeout=10)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    events = load(path)
    ring = [e for e in events if e["ph"] == "X"]
    assert sorted((e["pid"], e["ts"], e["dur"]) for e in ring) == [(0, 500, 100), (1, 500, 100), (2, 500, 100)]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (node 0)", 1: "rank 1 (node 0)", 2: "rank 2 (node 1)"}
    assert not path.read_bytes().endswith(b"  \n]}\n")


def test_one_node_merges_alone_and_records_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline, recorder = make(path, 0, 0, True)
    recorder.add(Lane.PACK, "first", 2_000, 3_000)
    timeline.flush_and_close()
    timeline.merge(None)
    assert [e["name"] for e in load(path) if e["ph"] == "X"] == ["first"]
    timeline.start(str(path), mark_cycles=True, origin_ns=2_000)
    assert recorder.mark_cycles
    recorder.add(Lane.PACK, "second", 3_000, 4_000)
    timeline.close()
    timeline.close()
    timeline.merge(None)  # nothing to merge after close
    assert [(e["name"], e["ts"]) for e in load(path) if e["ph"] == "X"] == [("second", 1.0)]
    assert not recorder.mark_cycles


def test_events_are_written_while_recording(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline, recorder = make(path, 0, 0, True)
    try:
        recorder.add(Lane.PACK, "bucket 0", 2_000, 3_000)
        deadline_s = time.monotonic() + 20
        while not any(e["name"] == "bucket 0" for e in load(path)):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        timeline.close()


def test_dropped_events_are_counted_in_the_trace(tmp_path: Path) -> None:
    recorder = Recorder(max_events=100)
    timeline = Timeline(0, 0, True, recorder, 0)
    timeline.start(str(tmp_path / "trace.json"), False, 0)
    for i in range(100_000):
        recorder.add(Lane.PACK, "bucket 0", i, i + 1)
    timeline.flush_and_close()
    events = load(tmp_path / "trace.json")
    missing = sum(e["args"]["dropped"] for e in events if e.get("cat") == "dropped")
    assert missing > 0
    assert missing + sum(e["name"] == "bucket 0" for e in events) == 100_000


def test_a_file_that_cannot_be_written_is_logged_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    with caplog.at_level(logging.ERROR, "hvdlite"):
        timeline, recorder = make(tmp_path / "file" / "trace.json", 0, 0, True)
    assert "ends here" in caplog.text
    assert timeline.is_recording  # so that all ranks agree on what to do at the end
    assert not recorder.enabled
    timeline.flush_and_close()
    timeline.merge(None)


def test_a_file_that_vanishes_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    with caplog.at_level(logging.ERROR, "hvdlite"):
        timeline, recorder = make(path, 0, 0, True)
        path.unlink()
        recorder.add(Lane.PACK, "bucket 0", 2_000, 3_000)
        timeline.flush_and_close()
    assert caplog.text.count("No such file") == 1
    assert not recorder.enabled


def test_a_row_for_every_parameter() -> None:
    """With the bucket in which its gradient travels, also where these overlap in part."""
    writer = TraceWriter(0, 0, 0)
    spans = [("fc.weight", 10, 30, "bucket0"), ("fc.bias", 20, 40, "bucket1"), ("fc.weight", 25, 50, "bucket0")]
    events = [(i, Lane.PARAMETER, name, s, e, 8, bucket) for i, (name, s, e, bucket) in enumerate(spans)]
    lines = [json.loads(line) for line in writer.lines(events)]
    rows = {line["args"]["name"]: line["tid"] for line in lines if line["name"] == "thread_name"}
    assert list(rows) == ["fc.weight", "fc.bias"]
    drawn = [(line["name"], line["tid"], line["args"]) for line in lines if line["ph"] == "X"]
    assert drawn == [(name, rows[name], {"bytes": 8, "bucket": bucket}) for name, _, _, bucket in spans]


def test_who_stops_waits_for_that_though_another_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(None, Config()) as runtime:
        notices = queue.Queue[dict[str, Any]]()
        with monkeypatch.context() as patch:
            patch.setattr(runtime.world.coordinator, "announce", notices.put)
            starting = threading.Thread(target=runtime.start_timeline, args=[tmp_path / "trace.json"])
            starting.start()
            start = notices.get()
            stopping = threading.Thread(target=runtime.stop_timeline)
            stopping.start()
            stop = notices.get()
        runtime.world.take_notice(start)
        starting.join()
        stopping.join(0.05)
        assert stopping.is_alive()
        runtime.world.take_notice(stop)
        stopping.join()
