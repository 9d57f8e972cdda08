"""``python -m hvdlite timeline report | merge``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hvdlite.cli.reader import ends_with_reader, printable
from hvdlite.counted import counted
from hvdlite.rank_list import rank_list
from hvdlite.timeline.groups import groups_of_ranks, restricted
from hvdlite.timeline.long_steps import LONG, LONG_STEP_HEADER, LONG_STEPS_SHOWN, long_step_cells, long_steps
from hvdlite.timeline.page import PlotlyMissingError, page
from hvdlite.timeline.report import Bucket, Report, Step, build_report
from hvdlite.timeline.trace_file import TraceError, later_recordings, merge_traces, missing_parts, read_trace
from hvdlite.timeline.verdict import verdict

_DEFINITIONS = """\
A step lasts from the end of one step() of hvd.DistributedOptimizer to the end of the next; the first one has no
known beginning.
  compute        the main thread does not wait
  communication  a lane of the coordinator is busy, negotiation excluded, or a window of split layers
  exposed        the main thread waits for communication or for slower ranks, or moves rows of split layers
  of it tp       what of that is due to split layers (tensor parallelism), if there are any
  hidden         1 - exposed / communication, not below 0
  exposed > communication   ranks wait for one another longer than communication lasts: some rank is late
  hidden 0 %     all of communication was waited for; nothing of it overlapped with compute
  slowest rank   the one that waits least, since the others wait for it, and by how much less
Times are means over ranks. algbw = bytes / time. Open the file itself at https://ui.perfetto.dev.
"""


@ends_with_reader
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "merge":
            with _named(options.out):
                count = merge_traces(options.out, options.parts)
            print(printable(f"{options.out}: {counted(count, 'event')} from {counted(len(options.parts), 'file')}"))
        else:
            _report(options.trace, options.rank, options.json, options.steps, options.html)
    except (TraceError, PlotlyMissingError) as error:
        print(f"hvdlite timeline: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"hvdlite timeline: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _named(path: str) -> Iterator[None]:
    """An OSError that says of no file, as that of a full disk, is of ``path``, and not of what is printed."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdlite timeline",
        description="Work with timelines, the files that HVDLITE_TIMELINE or hvd.start_timeline() writes.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="report | merge")
    report = commands.add_parser(
        "report",
        help="print where the time of each step went",
        description="Print where the time of each step went, and the costliest buckets.",
        epilog=_DEFINITIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("trace", help="the timeline, complete or of a job that is running or was killed")
    report.add_argument(
        "--rank", type=_count, metavar="R", help="show the ranks that train with R, if not all train together"
    )
    report.add_argument("--json", action="store_true", help="print all figures of all steps as JSON")
    report.add_argument(
        "--steps", type=_count, default=20, metavar="N", help="show the last N steps; 0 shows all (default: 20)"
    )
    report.add_argument("--html", metavar="FILE", help="write a page with charts as well; needs hvdlite[report]")
    merge = commands.add_parser(
        "merge",
        help="put the files of several nodes into one",
        description="Put the files of several nodes into one. A job that ends in order does so itself; one that was "
        "killed leaves trace.json, trace.node1.json and so on, each on its node.",
    )
    merge.add_argument("out", metavar="OUT", help="the file to write; may be one of the parts")
    merge.add_argument("parts", metavar="PART", nargs="+", help="the files of the nodes")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 0 or more")
    return int(text)


def _report(path: str, rank: int | None, as_json: bool, last: int, html: str | None) -> None:
    trace = read_trace(path)
    title, chosen, notice = os.path.basename(path), trace, ""
    groups = groups_of_ranks(trace)
    if rank is not None and not any(rank in group for group in groups):
        raise TraceError(f"{path} has no step of rank {rank}")
    if len(groups) > 1:
        shown = next((group for group in groups if rank in group), groups[0])
        title, chosen = f"{title}, {rank_list(shown)}", restricted(trace, shown)
        others = ", ".join(f"--rank {group[0]} ({rank_list(group)})" for group in groups if group is not shown)
        notice = f"{rank_list(shown)} alone, as the optimizers of others have other process sets: {others}"
    report = build_report(chosen)
    if html is not None:
        with _named(html):
            Path(html).write_text(page(title, report), encoding="utf-8", errors="backslashreplace")
    if as_json:
        figures = dataclasses.asdict(report)
        figures["long_steps"] = [dataclasses.asdict(step) for step in long_steps(report)]
        print(json.dumps({"trace": path, **figures}, indent=2))
    else:
        print(printable(format_report(title, report, last)))
    if notice:
        print(f"hvdlite timeline: this is of {notice}", file=sys.stderr)
    parts = missing_parts(path, trace)
    if parts:
        print(
            f"hvdlite timeline: other nodes are missing here, their files were not merged yet: "
            f"python -m hvdlite timeline merge {shlex.join([path, path, *parts])}",
            file=sys.stderr,
        )
    if report.origin_epoch_s is not None and (later := later_recordings(path, report.origin_epoch_s)):
        print(
            f"hvdlite timeline: what ranks did after others had died or come, or when they were started again, is in "
            f"{shlex.join(later)}",
            file=sys.stderr,
        )


def format_report(title: str, report: Report, last: int) -> str:
    """The report as text, with the last ``last`` steps, or all for 0."""
    ranks, steps = counted(report.ranks, "rank"), counted(len(report.steps), "complete step")
    lines = [f"{title}: {ranks}, {steps}", verdict(report)]
    if report.dropped:
        lines.append(f"{report.dropped} events were dropped, so times are too low: raise HVDLITE_TIMELINE_EVENTS.")
    lines.append("")
    if report.median is None:
        lines.append(
            "No step to show: a step lasts from the end of one step() of hvd.DistributedOptimizer to the end of the "
            "next, and the trace holds fewer than two. Those of other optimizers, as under DistributedDataParallel, "
            "are recorded in process groups over hvdlite, where HVDLITE_TIMELINE names the file."
        )
    else:
        shown = report.steps[-last:]
        if len(shown) < len(report.steps):
            lines.append(f"The last {len(shown)} steps; --steps 0 shows all.")
        header = ["step", "time ms", "compute ms", "communication ms", "exposed ms", "hidden", "slowest rank", "by ms"]
        rows = [[str(step.number), *_step_cells(step)] for step in shown]
        rows.append(["median", *_step_cells(report.median)])
        if any(step.tensor_parallel_ms for step in report.steps):
            place = header.index("exposed ms") + 1
            header.insert(place, "of it tp")
            for row, step in zip(rows, [*shown, report.median], strict=True):
                row.insert(place, f"{step.tensor_parallel_ms:.2f}")
        lines += _table(header, rows, left=())
        lines += [
            "Medians are over all steps; the slowest rank is the one that was slowest most often.",
            "exposed: the main thread waits; above communication, ranks wait for one another: some rank is late.",
            "hidden: the share of communication that overlapped with compute; 0%: all of it was waited for.",
        ]
    lines.append("")
    found = long_steps(report)
    if found:
        longest = f"; the longest {LONG_STEPS_SHOWN}" * (len(found) > LONG_STEPS_SHOWN)
        lines.append(f"Steps of more than {LONG} times the median ({len(found)}{longest}):")
        lines += _table(LONG_STEP_HEADER, map(long_step_cells, found[:LONG_STEPS_SHOWN]), left=(1, 4))
        lines.append("")
    if report.buckets:
        lines.append(f"The costliest buckets of the whole trace ({len(report.buckets)} shown):")
        lines += _table(["bucket", "total ms", "bytes", "algbw GB/s"], map(_bucket_cells, report.buckets), left=(0,))
    else:
        lines.append("No communication in this trace.")
    return "\n".join(lines)


def _step_cells(step: Step) -> list[str]:
    return [
        f"{step.step_ms:.2f}",
        f"{step.compute_ms:.2f}",
        f"{step.communication_ms:.2f}",
        f"{step.exposed_ms:.2f}",
        "-" if step.hidden_share is None else f"{step.hidden_share:.0%}",
        "-" if step.slowest_rank is None else str(step.slowest_rank),
        "-" if step.behind_ms is None else f"{step.behind_ms:.2f}",
    ]


def _bucket_cells(bucket: Bucket) -> list[str]:
    return [bucket.name, f"{bucket.total_ms:.2f}", f"{bucket.nbytes:,}", f"{bucket.algbw_gbps:.2f}"]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int]) -> list[str]:
    """Align columns: those in ``left`` to the left, the others to the right, as numbers are read."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
