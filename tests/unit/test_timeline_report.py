"""The report's figures, on a trace small enough to compute them by hand, and its command line."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdlite.cli.timeline import main
from hvdlite.recorder import Lane
from hvdlite.timeline.chrome_trace import TraceWriter
from hvdlite.timeline.groups import ALONE, groups_of_ranks
from hvdlite.timeline.long_steps import long_steps
from hvdlite.timeline.report import BusyTime, build_report
from hvdlite.timeline.trace_file import TraceFile, read_trace
from hvdlite.timeline.verdict import verdict

MS = 1_000_000
MIB = 1 << 20

# (lane, name, start ms, end ms, bytes). Both ranks end their steps at 10, 30 and 60 ms, rank 1 half a ms later.
RANKS: dict[int, list[tuple[Lane, str, float, float, int]]] = {
    0: [
        (Lane.OPTIMIZER, "step", 8, 10, 0),
        # Step 1: 20 ms; communication 12 to 21 and 22 to 24 = 11 ms; waits 20 to 24 = 4 ms.
        (Lane.BACKWARD, "backward", 11, 19, 0),
        (Lane.NEGOTIATION, "a", 11, 28, 0),
        (Lane.PACK, "a", 12, 13, 4 * MIB),
        (Lane.RING, "a", 13, 20, 2 * MIB),
        (Lane.RING, "b", 18, 21, MIB),
        (Lane.UNPACK, "a", 22, 24, 4 * MIB),
        (Lane.WAIT, "wait", 20, 24, 0),
        (Lane.WAIT, "wait inside", 21, 23, 0),
        (Lane.OPTIMIZER, "step", 25, 30, 0),
        # Step 2: 30 ms; communication 40 to 50 = 10 ms; waits 44 to 50 = 6 ms.
        (Lane.RING, "a", 40, 50, 6 * MIB),
        (Lane.WAIT, "wait", 44, 50, 0),
        (Lane.OPTIMIZER, "step", 55, 60, 0),
        (Lane.RING, "a", 70, 80, 4 * MIB),  # after the last complete step
    ],
    1: [
        (Lane.OPTIMIZER, "step", 8, 10.5, 0),
        # Step 1: 20 ms; communication 13 to 20 = 7 ms; waits 19 to 20 = 1 ms: the slowest.
        (Lane.RING, "a", 13, 20, 4 * MIB),
        (Lane.WAIT, "wait", 19, 20, 0),
        (Lane.OPTIMIZER, "step", 25, 30.5, 0),
        # Step 2: 30 ms; communication 40 to 50 = 10 ms; waits 20 ms, for rank 0.
        (Lane.RING, "a", 40, 50, 4 * MIB),
        (Lane.WAIT, "wait", 32, 52, 0),
        (Lane.OPTIMIZER, "step", 55, 60.5, 0),
    ],
}


def write_trace(path: Path, ranks: dict[int, list[tuple[Lane, str, float, float, int]]], dropped: int = 0) -> str:
    file = TraceFile(str(path), 0)
    for rank, spans in ranks.items():
        writer = TraceWriter(rank, 0, 0)
        file.open(writer.introduction())
        file.append(
            writer.lines((0, lane, name, round(s * MS), round(e * MS), size, "") for lane, name, s, e, size in spans)
        )
        if dropped:
            file.append([writer.dropped(dropped, 0)])
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "trace.json", RANKS)


def test_steps(trace: str) -> None:
    report = build_report(read_trace(trace))
    assert (report.ranks, report.dropped) == (2, 0)
    first, second = report.steps
    assert first.number == 1
    assert first.step_ms == pytest.approx(20)
    assert first.communication_ms == pytest.approx((11 + 7) / 2)
    assert first.exposed_ms == pytest.approx((4 + 1) / 2)
    assert first.compute_ms == pytest.approx(20 - 2.5)
    assert first.hidden_share == pytest.approx(1 - 2.5 / 9)
    assert first.slowest_rank == 1
    assert first.behind_ms == pytest.approx(3)
    assert second.number == 2
    assert second.step_ms == pytest.approx(30)
    assert second.communication_ms == pytest.approx(10)
    assert second.exposed_ms == pytest.approx((6 + 20) / 2)
    assert second.hidden_share == 0
    assert second.slowest_rank == 0
    assert second.behind_ms == pytest.approx(14)
    assert report.median is not None
    assert report.median.step_ms == pytest.approx(25)
    assert report.median.communication_ms == pytest.approx(9.5)
    assert report.median.hidden_share == pytest.approx((1 - 2.5 / 9) / 2)


def test_buckets(trace: str) -> None:
    a, b = build_report(read_trace(trace)).buckets
    assert (a.name, b.name) == ("a", "b")
    # Rank 0: 12 to 20, 22 to 24, 40 to 50, 70 to 80; the ring handled the most: 2 + 6 + 4 MiB.
    assert a.total_ms == pytest.approx((30 + 17) / 2)
    assert a.nbytes == (12 + 8) * MIB / 2
    assert a.algbw_gbps == pytest.approx(10 * MIB / 23.5e-3 / 1e9)
    assert b.total_ms == pytest.approx(3)  # rank 1 had none
    assert b.nbytes == MIB


def test_the_ten_costliest_buckets(tmp_path: Path) -> None:
    spans = [(Lane.RING, f"bucket {i}", 100.0 * i, 101.0 * i, 1) for i in range(1, 16)]
    report = build_report(read_trace(write_trace(tmp_path / "trace.json", {0: spans})))
    assert [bucket.name for bucket in report.buckets] == [f"bucket {i}" for i in range(15, 5, -1)]


def test_a_rank_that_misses_steps_is_left_out_of_them(tmp_path: Path) -> None:
    step = [(Lane.OPTIMIZER, "step", 10.0 * i, 10.0 * i + 1, 0) for i in range(1, 6)]
    wait = [(Lane.WAIT, "wait", 10.0 * i + 3, 10.0 * i + 5, 0) for i in range(1, 5)]
    # Rank 1 recorded one step earlier, waited less, and was killed after step 3.
    early = [(Lane.OPTIMIZER, "step", 10.0 * i, 10.0 * i + 1.25, 0) for i in range(4)]
    report = build_report(read_trace(write_trace(tmp_path / "trace.json", {0: step + wait, 1: early})))
    assert [step.exposed_ms for step in report.steps] == [1, 1, 2, 2]
    assert [step.slowest_rank for step in report.steps] == [1, 1, None, None]
    assert [step.step_ms for step in report.steps] == [pytest.approx(10)] * 4
    assert [step.hidden_share for step in report.steps] == [None] * 4


def test_busy_time_is_a_union() -> None:
    busy = BusyTime([(10, 20), (15, 17), (18, 30), (40, 50), (30, 31)])
    assert busy.total == 31
    for start, end, expected in [(0, 100, 31), (0, 10, 0), (12, 19, 7), (25, 45, 11), (31, 40, 0), (50, 60, 0)]:
        assert busy.within(start, end) == expected
    assert BusyTime([]).within(0, 10) == 0


def test_the_printed_table_is_aligned(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", trace]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "trace.json: 2 ranks, 2 complete steps"
    assert output[1] == (
        "Communication costs 14% of a step (3.50 of 25.00 ms); ranks are late in turn, in 100% of the steps, by "
        "8.50 ms, in forward, its data or other code of the program."
    )
    header, first, second, median = output[3:7]
    assert {len(line) for line in (header, first, second, median)} == {len(header)}
    assert first.split() == ["1", "20.00", "17.50", "9.00", "2.50", "72%", "1", "3.00"]
    assert second.split() == ["2", "30.00", "17.00", "10.00", "13.00", "0%", "0", "14.00"]
    assert median.split() == ["median", "25.00", "17.25", "9.50", "7.75", "36%", "1", "8.50"]
    assert any(line.split() == ["a", "23.50", "10,485,760", "0.45"] for line in output)


@pytest.mark.parametrize(
    ("late_ranks", "said"),
    [
        ([1, 1, 1, 1], "rank 1 is late in 100% of the steps, by 4.00 ms"),
        ([1, 0, 1, 1], "rank 1 is late in 75% of the steps, by 4.00 ms"),
        ([1, 0, 1, 0], "ranks are late in turn, in 100% of the steps, by 4.00 ms"),
        ([1, None, 0, None], "ranks are late in turn, in 50% of the steps, by 4.00 ms"),
        ([3, 2, 2, 3], "ranks 2 and 3 are late in 100% of the steps, by 4.00 ms"),
        ([3, 2, 1, 0], "ranks are late in turn, in 100% of the steps, by 4.00 ms"),
    ],
)
def test_ranks_are_named_if_few_are_mostly_late(tmp_path: Path, late_ranks: list[int | None], said: str) -> None:
    ranks = {
        rank: [
            *[(Lane.OPTIMIZER, "step", 20.0 * i + 18, 20.0 * i + 20, 0) for i in range(len(late_ranks) + 1)],
            *[
                (Lane.WAIT, "wait", 20.0 * i + (16 if late in (rank, None) else 12), 20.0 * i + 18, 0)
                for i, late in enumerate(late_ranks, start=1)
            ],
        ]
        for rank in (range(4) if 3 in late_ranks else range(2))
    }
    report = build_report(read_trace(write_trace(tmp_path / "trace.json", ranks)))
    assert f"(2.00 of 20.00 ms); {said}, in forward, " in verdict(report)


REST = "forward, its data or other code of the program"


def steps_of_which_one_is_long(phase: dict[int, str]) -> dict[int, list[tuple[Lane, str, float, float, int]]]:
    """Two ranks, six steps of 20 ms; step 3, which begins at 0.06 s, takes 200 ms more, on each rank in that phase."""
    ranks: dict[int, list[tuple[Lane, str, float, float, int]]] = {}
    for rank in range(2):
        spans = ranks[rank] = []
        now = 0.0
        for number in range(7):
            for lane, name, usual in [
                (None, "forward", 5),
                (Lane.BACKWARD, "backward", 6),
                (Lane.WAIT, "synchronize", 4),
                (Lane.OPTIMIZER, "step", 5),
            ]:
                end = now + usual + 200 * (number == 3 and phase[rank] == name)
                if lane is not None:
                    spans.append((lane, name, now, end, 0))
                now = end
    return ranks


@pytest.mark.parametrize(
    ("phases", "ranks", "cause"),
    [
        (("synchronize", "forward"), (1,), f"rank 1 in {REST}"),
        (("backward", "synchronize"), (0,), "rank 0 in backward"),
        (("step", "synchronize"), (0,), "rank 0 in the optimizer's step"),
        (("forward", "forward"), (0, 1), f"all ranks in {REST}"),
        (("synchronize", "synchronize"), (), "all ranks waited for communication"),
    ],
)
def test_a_long_step_among_short_ones_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], phases: tuple[str, str], ranks: tuple[int, ...], cause: str
) -> None:
    path = write_trace(tmp_path / "trace.json", steps_of_which_one_is_long(dict(enumerate(phases))))
    report = build_report(read_trace(path))
    assert report.median is not None
    assert report.median.step_ms == pytest.approx(20)
    (step,) = long_steps(report)
    assert (step.number, step.start_s, step.step_ms, step.over_ms) == (3, 0.06, 220, 200)
    assert (step.ranks, step.cause) == (ranks, cause)
    assert verdict(report).endswith(
        ". 1 of 6 steps took more than 2 times the median, which cost 62% of the time; the longest, step 3 at 0.060 s, "
        f"took 220.00 ms: {cause}."
    )
    assert main(["report", "--steps", "1", path]) == 0  # also where the table of steps does not show it
    printed = capsys.readouterr().out.splitlines()
    place = printed.index("Steps of more than 2 times the median (1):")
    assert printed[place + 2].split() == ["3", *step.time_of_day.split(), "0.060", "220.00", *cause.split()]
    assert main(["report", "--json", path]) == 0
    (told,) = json.loads(capsys.readouterr().out)["long_steps"]
    assert (told["number"], told["ranks"], told["cause"]) == (3, list(ranks), cause)


def test_long_steps_have_a_time_of_day(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.json", steps_of_which_one_is_long({0: "forward", 1: "forward"})))
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            event["args"]["start_time_since_epoch_in_micros"] = 1_700_000_000_940_000
    (step,) = long_steps(build_report(trace))
    assert step.time_of_day == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_001))


def test_only_the_last_steps_are_printed(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--steps", "1", trace]) == 0
    output = capsys.readouterr().out
    assert "The last 1 steps" in output
    assert "17.50" not in output
    assert main(["report", "--steps", "0", trace]) == 0
    assert "17.50" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["merge", "FILE", "TRACE"], ["report", "TRACE", "--html", "FILE"]])
def test_a_file_for_which_the_disk_has_no_room_is_named(
    trace: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hvdlite.cli.timeline.merge_traces", no_room)
    monkeypatch.setattr("hvdlite.cli.timeline.page", lambda *_: "")
    monkeypatch.setattr(Path, "write_text", no_room)
    assert main([{"FILE": "wanted", "TRACE": trace}.get(word, word) for word in words]) == 1
    assert capsys.readouterr().err == "hvdlite timeline: wanted: No space left on device\n"


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json", trace]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["trace"] == trace
    assert [step["slowest_rank"] for step in report["steps"]] == [1, 0]
    assert report["median"]["step_ms"] == 25
    assert report["buckets"][0]["nbytes"] == 10 * MIB


def test_a_trace_without_steps_or_communication(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.json", {0: [(Lane.OPTIMIZER, "step", 1, 2, 0)]}, dropped=5)
    assert main(["report", path]) == 0
    output = capsys.readouterr().out
    assert "1 rank, 0 complete steps" in output
    assert "No step to show: a step lasts from the end of one step() of hvd.DistributedOptimizer to" in output
    assert "No communication" in output
    assert "5 events were dropped" in output


def test_the_command_merges_what_a_killed_job_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_trace(tmp_path / "my trace.json", {0: RANKS[0]})
    other = write_trace(tmp_path / "my trace.node1.json", {1: RANKS[1]})
    assert main(["report", root]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("my trace.json: 1 rank, ")
    command = shlex.split(captured.err)
    assert command[command.index("timeline") + 1 :] == ["merge", root, root, other]
    assert main(["merge", root, root, other]) == 0
    capsys.readouterr()
    assert main(["report", root]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("my trace.json: 2 ranks, 2 complete steps")
    assert captured.err == ""


def test_the_report_names_what_the_job_recorded_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("my trace.json", "my trace.generation2.json", "my trace.start2.json", "my trace.start2.generation2.json")
    paths = [write_trace(tmp_path / name, RANKS) for name in names]
    for path in paths[2:]:
        os.utime(path, (1, 1))  # of an earlier job
    for other in ("my trace.generation2.node1.json", "my trace.generations.json", "my trace2.json"):
        write_trace(tmp_path / other, {7: []})
    assert main(["report", paths[0]]) == 0
    assert capsys.readouterr().err == (
        "hvdlite timeline: what ranks did after others had died or come, or when they were started again, is in "
        f"{shlex.quote(paths[1])}\n"
    )
    os.utime(paths[3])
    assert main(["report", paths[2]]) == 0
    assert capsys.readouterr().err.endswith(f"{shlex.quote(paths[1])} {shlex.quote(paths[3])}\n")


def write_trace_of_sets(path: Path, sets: dict[int, str], step_ms: dict[int, float], wait_ms: dict[int, float]) -> str:
    """Each rank takes 10 steps with an optimizer of that process set."""
    file = TraceFile(str(path), 0)
    for rank, process_set in sets.items():
        writer = TraceWriter(rank, 0, 0)
        file.open(writer.introduction())
        for i in range(1, 11):
            end = i * step_ms[rank]
            spans = [
                (Lane.WAIT, "synchronize", end - 2 - wait_ms[rank], end - 2, ""),
                (Lane.OPTIMIZER, "step", end - 2, end, process_set),
            ]
            file.append(
                writer.lines(
                    (0, lane, name, round(s * MS), round(e * MS), 0, label) for lane, name, s, e, label in spans
                )
            )
    return str(path)


def test_ranks_that_train_apart_have_reports_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 3 is late for rank 2; nobody is for ranks 0 and 1, which wait less than rank 2 does."""
    sets, step_ms = {0: "1", 1: "1", 2: "2", 3: "2"}, {0: 20.0, 1: 20.0, 2: 50.0, 3: 50.0}
    path = write_trace_of_sets(tmp_path / "trace.json", sets, step_ms, {0: 1, 1: 1, 2: 30, 3: 1})
    assert main(["report", path]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[:2] == [
        "trace.json, ranks 0 and 1: 2 ranks, 9 complete steps",
        "Communication costs 5% of a step (1.00 of 20.00 ms); no rank is late.",
    ]
    assert captured.err == (
        "hvdlite timeline: this is of ranks 0 and 1 alone, as the optimizers of others have other process sets: "
        "--rank 2 (ranks 2 and 3)\n"
    )
    assert main(["report", "--rank", "3", path]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "trace.json, ranks 2 and 3: 2 ranks, 9 complete steps",
        "Communication costs 2% of a step (1.00 of 50.00 ms); rank 3 is late in 100% of the steps, by 29.00 ms, in "
        f"{REST}.",
    ]
    assert main(["report", "--rank", "4", path]) == 1
    assert capsys.readouterr().err == f"hvdlite timeline: {path} has no step of rank 4\n"


@pytest.mark.parametrize(
    ("sets", "groups"),
    [
        ({0: "0", 1: "0", 2: "0"}, [(0, 1, 2)]),
        ({0: "", 1: "", 2: ""}, [(0, 1, 2)]),  # of an older version
        ({0: "1", 1: "2", 2: "1"}, [(0, 2), (1,)]),
        ({0: "1", 1: ALONE, 2: ALONE}, [(0,), (1,), (2,)]),
    ],
)
def test_who_trains_together(tmp_path: Path, sets: dict[int, str], groups: list[tuple[int, ...]]) -> None:
    same = dict.fromkeys(sets, 10.0)
    trace = read_trace(write_trace_of_sets(tmp_path / "trace.json", sets, same, same))
    assert groups_of_ranks(trace) == groups


def test_sets_that_share_a_rank_train_together(tmp_path: Path) -> None:
    trace = read_trace(
        write_trace_of_sets(
            tmp_path / "trace.json",
            {0: "1", 1: "1", 2: "2"},
            dict.fromkeys(range(3), 10.0),
            dict.fromkeys(range(3), 1.0),
        )
    )
    shared = {"ph": "X", "cat": "optimizer", "name": "step", "pid": 1, "args": {"process set": "2"}}
    assert groups_of_ranks({"traceEvents": [*trace["traceEvents"], shared]}) == [(0, 1, 2)]


def test_errors_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing.json")
    assert main(["report", missing]) == 1
    assert capsys.readouterr().err == f"hvdlite timeline: {missing}: No such file or directory\n"
    (tmp_path / "other.json").write_text("[]")
    assert main(["merge", missing, str(tmp_path / "other.json")]) == 1
    assert "other.json is not a timeline of hvdlite" in capsys.readouterr().err
    for number in ("-1", "many"):
        with pytest.raises(SystemExit) as stopped:
            main(["report", missing, "--steps", number])
        assert stopped.value.code == 2
        assert f"argument --steps: '{number}': a whole number, 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"gr\\xf6\\xdfe \\udcff"), ("utf-8", b"gr\xc3\xb6\xc3\x9fe \\udcff")]
)
def test_names_that_stdout_cannot_encode(
    encoding: str, shown: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One holds a byte of a file name that is no UTF-8."""
    name = "größe \udcff"
    path = write_trace(tmp_path / "trace.json", {0: [(Lane.RING, name, 1, 2, 1)]})
    html = tmp_path / "report.html"
    monkeypatch.setattr("hvdlite.cli.timeline.page", lambda *_: name)
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding))
    assert main(["report", path, "--html", str(html)]) == 0
    assert shown in output.getvalue()
    assert html.read_text("utf-8") == r"größe \udcff"


def test_split_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are exposed on the main thread, with windows and without."""
    spans = [
        (Lane.OPTIMIZER, "step", 8, 10, 0),
        (Lane.MEETING, "all_gather_matmul", 12, 14, 0),
        (Lane.WINDOW, "all_gather_matmul", 14, 17, MIB),
        (Lane.WAIT, "allgather 'tensor_parallel0.rows'", 18, 19, 0),
        (Lane.WAIT, "synchronize", 20, 24, 0),
        (Lane.OPTIMIZER, "step", 25, 30, 0),
    ]
    path = write_trace(tmp_path / "trace.json", {0: spans})
    report = build_report(read_trace(path))
    (step,) = report.steps
    assert (step.exposed_ms, step.tensor_parallel_ms, step.communication_ms) == (10, 6, 3)
    assert [(bucket.name, bucket.nbytes) for bucket in report.buckets] == [("all_gather_matmul", MIB)]
    assert main(["report", path]) == 0
    header, row = capsys.readouterr().out.splitlines()[3:5]
    assert "exposed ms  of it tp" in header
    assert row.split()[4:6] == ["10.00", "6.00"]
