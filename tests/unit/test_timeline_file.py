"""The trace file is valid JSON after each write, whoever writes, reads or is killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdlite.timeline import trace_file
from hvdlite.timeline.trace_file import TraceError, TraceFile, anew_path, merge_traces, node_path, read_trace

INTRODUCTION = [b'{"ph":"M","pid":0,"name":"process_name"}']

WRITER = """
import sys
import time
from hvdlite.timeline.trace_file import TraceFile
path, rank, rounds, pause_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
file = TraceFile(path, 7)
file.open([b'{"ph":"M","pid":%d,"name":"process_name"}' % rank])
print("started", flush=True)
sys.stdin.read()  # all begin together
done = 0
while done != rounds:
    file.append(b'{"ph":"X","pid":%d,"name":"%d.%d"}' % (rank, done, i) for i in range(200))
    done += 1
    time.sleep(pause_s)
"""


def names(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_bytes())["traceEvents"]]


def span(name: str, length: int = 0) -> bytes:
    return json.dumps({"ph": "X", "pid": 0, "name": name, "pad": "x" * length}).encode()


def start_writers(
    path: Path, ranks: list[int], rounds: int = -1, pause_s: float = 0.0
) -> list[subprocess.Popen[bytes]]:
    """Processes that append 200 events at a time; negative ``rounds``: until they are killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writers = []
    for rank in ranks:
        command = [sys.executable, "-c", WRITER, str(path), str(rank), str(rounds), str(pause_s)]
        writers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"started\n"
        writer.stdout.close()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    return writers


def test_the_file_is_valid_after_every_single_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    writes: list[tuple[int, int]] = []
    real_write, real_replace = os.pwrite, os.replace

    def pwrite(descriptor: int, data: Any, position: int) -> int:
        written = real_write(descriptor, data, position)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # not the copy that is being made
            writes.append((position, len(data)))
            json.loads(path.read_bytes())
        return written

    replaced = []

    def replace(source: str, target: str) -> None:
        real_replace(source, target)
        replaced.append(len(names(path)))

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "replace", replace)
    file = TraceFile(str(path), 1)
    file.open(INTRODUCTION)
    expected = ["process_name"]
    for batch in range(60):
        batch_names = [f"{batch}.{i}" for i in range(batch)]
        file.append(span(name, length=37 * i % 900) for i, name in enumerate(batch_names))
        expected += batch_names
        assert names(path) == expected
    assert len(writes) > 100
    assert len(replaced) > 3
    # What the kernel may cut short, and another program may see in part, never leaves a page.
    assert all(position // 4096 == (position + length - 1) // 4096 for position, length in writes)
    file.complete([span("last")])
    assert names(path) == [*expected, "last"]
    assert file.events()[-1] == span("last")
    assert b" \n" not in path.read_bytes()
    file.append([span("later")])
    assert names(path) == [*expected, "last", "later"]


@pytest.mark.parametrize("length", [4096 - 2, 4096 - 3, 4096 // 2 - 2, 4096 // 2 - 1])
def test_events_that_just_fill_a_page(tmp_path: Path, length: int) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), 1)
    file.open(INTRODUCTION)
    frame = len(span("00"))
    events = [span(f"{i:02}", length - frame) for i in range(40)]
    assert {len(event) for event in events} == {length}
    for event in events[:20]:
        file.append([event])
    other = TraceFile(str(path), 1)  # knows nothing about where the end is
    other.append(events[20:])
    file.append([span("end")])
    assert names(path) == ["process_name", *(f"{i:02}" for i in range(40)), "end"]
    assert file.events() == [*INTRODUCTION, *events, span("end")]


def test_a_file_that_nobody_could_begin_is_no_other_jobs(tmp_path: Path) -> None:
    """A full file system has room for the name alone."""
    path = tmp_path / "trace.json"
    path.touch()
    with pytest.raises(TraceError, match="is empty: no rank could begin it, as where its file system is full"):
        TraceFile(str(path), 1).append([b"{}"])


def test_ranks_of_a_node_share_a_file_and_what_was_there_before_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    old = TraceFile(str(path), 1)
    old.open([span("old")])
    ranks = [TraceFile(str(path), 2) for _ in range(3)]
    for rank, file in enumerate(ranks):
        file.open([span(f"rank {rank}")])
    assert names(path) == ["rank 0", "rank 1", "rank 2"]
    with pytest.raises(TraceError, match="another job"):
        old.append([span("x")])
    assert names(path) == ["rank 0", "rank 1", "rank 2"]


def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writers = start_writers(path, [0, 1, 2], rounds=30)
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    events = json.loads(path.read_bytes())["traceEvents"]
    for rank in range(3):
        mine = [event["name"] for event in events if event["pid"] == rank]
        assert mine == ["process_name", *(f"{done}.{i}" for done in range(30) for i in range(200))]


def test_anyone_may_read_while_others_write(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writers = start_writers(path, [1, 2], pause_s=0.05)
    try:
        sizes = [len(read_trace(str(path))["traceEvents"])]
        deadline_s = time.monotonic() + 30
        while len(sizes) < 40 or (sizes[-1] == sizes[0] and time.monotonic() < deadline_s):
            sizes.append(len(read_trace(str(path))["traceEvents"]))
        assert all(writer.poll() is None for writer in writers)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_a_reader_waits_for_the_end_of_a_write(tmp_path: Path) -> None:
    """Whoever reads in its middle may see part of it."""
    path = tmp_path / "trace.json"
    TraceFile(str(path), 1).open(INTRODUCTION)
    whole = path.read_bytes()
    with path.open("r+b") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.pwrite(file.fileno(), b'{"na', whole.rindex(b"]}"))
        reader = pool.submit(read_trace, str(path))
        time.sleep(0.05)
        assert not reader.done()
        os.pwrite(file.fileno(), whole[-4:], whole.rindex(b"]}") - 1)
        file.truncate(len(whole))
        fcntl.flock(file, fcntl.LOCK_UN)
        assert [event["name"] for event in reader.result(10)["traceEvents"]] == ["process_name"]


def test_ranks_write_while_a_reader_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), 7)
    file.open(INTRODUCTION)
    parse = json.loads

    def slowly(content: bytes) -> object:
        file.append([span("meanwhile")])
        return parse(content)

    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", slowly)
        patch.setattr(json, "load", lambda file: slowly(file.read()))
        read_trace(str(path))
    assert names(path) == ["process_name", "meanwhile"]


@pytest.mark.parametrize("lock", [fcntl.LOCK_EX, None], ids=["a rank that is stopped", "no locks"])
def test_a_reader_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: int | None) -> None:
    path = tmp_path / "trace.json"
    TraceFile(str(path), 1).open(INTRODUCTION)
    monkeypatch.setattr(trace_file, "_LOCK_TIMEOUT_S", 0.05)
    with path.open("r+b") as file:
        if lock is not None:
            fcntl.flock(file, lock)
        else:

            def flock(*_: int) -> None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

            monkeypatch.setattr(fcntl, "flock", flock)
        assert [event["name"] for event in read_trace(str(path))["traceEvents"]] == ["process_name"]


@pytest.mark.parametrize("round_", range(5))
def test_killed_writers_leave_a_valid_file(tmp_path: Path, round_: int) -> None:
    path = tmp_path / "trace.json"
    survivor = TraceFile(str(path), 7)
    survivor.open(INTRODUCTION)
    writers = start_writers(path, [1, 2])
    size = path.stat().st_size
    while path.stat().st_size == size:  # until they have written more than there was room for
        time.sleep(0.001 * round_)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    for writer in writers:
        writer.wait()
    before = names(path)
    survivor.append([span("survivor")])
    assert names(path) == [*before, "survivor"]


def test_no_room_on_the_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), 1)
    file.open(INTRODUCTION)
    before = path.read_bytes()

    def no_room(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "sendfile", no_room)
        with pytest.raises(OSError, match="No space left"):
            file.append(span(str(i), 1000) for i in range(1000))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.json"]
    file.append([span("small")])  # there are blanks for it
    assert names(path) == ["process_name", "small"]


def test_a_lock_that_is_never_released_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), 7)
    file.open(INTRODUCTION)
    with trace_file._locked(str(path), os.O_RDWR), pytest.raises(TimeoutError, match="locked by another process"):
        file.append([span("x")])
    file.append([span("x")])


def test_a_waiting_rank_follows_the_copy_that_takes_the_place(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), 7)
    file.open(INTRODUCTION)
    other = TraceFile(str(path), 7)
    with trace_file._locked(str(path), os.O_RDWR) as descriptor:
        waiting = threading.Thread(target=other.append, args=([span("waited")],))
        waiting.start()
        content = path.read_bytes().replace(b"process_name", b"renamed_name")
        (tmp_path / "copy").write_bytes(content)
        os.replace(tmp_path / "copy", path)
        assert os.fstat(descriptor).st_nlink == 0
    waiting.join(timeout=10)
    assert names(path) == ["renamed_name", "waited"]


# Reading and merging


def test_node_files_lie_beside_the_root_s() -> None:
    assert node_path("/a/trace.json", 0) == "/a/trace.json"
    assert node_path("/a/trace.json", 12) == "/a/trace.node12.json"
    assert node_path("/a.b/trace", 1) == "/a.b/trace.node1.json"


def test_who_begins_anew_leaves_what_was_before() -> None:
    assert anew_path("/a/trace.json", 1, 1) == "/a/trace.json"
    assert anew_path("/a/trace.json", 1, 2) == "/a/trace.generation2.json"
    assert anew_path("/a.b/trace", 3, 1) == "/a.b/trace.start3"
    assert node_path(anew_path("/a/trace.json", 2, 12), 1) == "/a/trace.start2.generation12.node1.json"


def test_merge_puts_nodes_together(tmp_path: Path) -> None:
    parts = []
    for node in range(3):
        path = tmp_path / f"part{node}.json"
        file = TraceFile(str(path), 5)
        file.open([b'{"ph":"M","pid":%d,"name":"process_name"}' % node])
        file.append(b'{"ph":"X","pid":%d,"name":"%d","ts":%d.250}' % (node, i, i) for i in range(100 * node))
        parts.append(str(path))
    assert merge_traces(parts[0], parts) == 303  # the root's own file may be the target
    trace = read_trace(parts[0])
    assert Counter(event["pid"] for event in trace["traceEvents"]) == {0: 1, 1: 101, 2: 201}
    assert trace["traceEvents"][50]["ts"] == 48.25
    assert trace["otherData"]["origin_ns"] == "5"
    with pytest.raises(TraceError, match=r"rank 1 is in both .*part0.json and .*part1.json"):
        merge_traces(parts[0], parts)
    with pytest.raises(TraceError, match=r"rank 1 is in both .*part1.json and .*part1.json"):
        merge_traces(parts[0], [parts[1], parts[1]])
    TraceFile(parts[2], 6).open(INTRODUCTION)
    with pytest.raises(TraceError, match="not of the same recording"):
        merge_traces(str(tmp_path / "out.json"), parts[1:])
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"[]", b"{}", b'{"traceEvents":[]}', b"\xff\xfe\x00"])
def test_other_files_are_not_taken_for_traces(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.json is not"):
        read_trace(str(path))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.tmp"])
def test_a_link_at_a_name_that_is_known_beforehand_is_not_followed(tmp_path: Path, name: str) -> None:
    """Whoever may write to the directory could have had any file of this user overwritten."""
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    (tmp_path / name).symlink_to(treasure)
    file = TraceFile(str(tmp_path / "trace.json"), 7)
    if name == "trace.json":
        with pytest.raises(OSError, match="symbolic link"):
            file.open(INTRODUCTION)
    else:
        file.open(INTRODUCTION)
        assert names(tmp_path / "trace.json") == ["process_name"]
    assert treasure.read_text() == "mine"


def test_a_link_that_is_there_again_once_it_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    (tmp_path / "trace.json.tmp").symlink_to(treasure)
    monkeypatch.setattr(os, "unlink", lambda path: None)
    with pytest.raises(FileExistsError):
        TraceFile(str(tmp_path / "trace.json"), 7).open(INTRODUCTION)
    assert treasure.read_text() == "mine"


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """As of /dev/null and /dev/stdout, which root could; a pipe is no more of a file than they are."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(OSError, match="not a regular file"):
            TraceFile(str(path), 7).write(INTRODUCTION)
        with pytest.raises(OSError, match="not a regular file|symbolic link"):
            TraceFile(str(path), 7).complete()
    assert pipe.is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_a_file_that_cannot_be_made_is_named_itself(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "trace.json")
    with pytest.raises(FileNotFoundError) as caught:
        TraceFile(path, 7).write(INTRODUCTION)
    assert caught.value.filename == path


def test_a_link_that_takes_the_place_of_the_file_while_it_is_written(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "trace.json"), 7)
    file.open(INTRODUCTION)
    (tmp_path / "trace.json").rename(tmp_path / "elsewhere")
    (tmp_path / "trace.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        file.append([span("a")])
    assert names(tmp_path / "elsewhere") == ["process_name"]


def test_a_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    TraceFile(str(tmp_path / "link" / "trace.json"), 7).open(INTRODUCTION)
    assert names(tmp_path / "real" / "trace.json") == ["process_name"]


def test_room_in_a_long_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), 0)
    file.open([b"{}"])
    event = b'{"a":"' + b"x" * 4000 + b'"}'
    while path.stat().st_size < 32 << 20:
        file.append([event] * 200)
    size = path.stat().st_size
    tracemalloc.start()
    try:
        while path.stat().st_size == size:
            file.append([event] * 200)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
