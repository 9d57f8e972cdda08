"""Tables of the README pages and of docs, from the reports of the benchmarks; each lies between marks with its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from figures import Target
from measure import size
from targets import ELSEWHERE, IN_SLOT, KIB, MIB

Report = dict[str, Any]

ALLREDUCE_BYTES = (16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
ALLREDUCE_WAYS = {
    "memcpy": "memcpy on both ranks",
    "hvdlite backend": "node backend",
    IN_SLOT: "`hvd.allreduce_`, in its slot",
    ELSEWHERE: "`hvd.allreduce_`, elsewhere",
    "MPI": "MPI_Allreduce",
    "MPI, pieces": "in 4 MiB pieces",
    "MPI coll/sm": "coll/sm",
    "Gloo": "Gloo",
}
STEP_WAYS = {
    "hvdlite": "hvdlite",
    "DDP": "DDP over Gloo",
    "DDP, views": "DDP, `gradient_as_bucket_view`",
    "MPI": "MPI_Allreduce per parameter",
    "MPI, pieces": "in 4 MiB pieces",
    "MPI, one buffer": "of one buffer",
}


SPLIT_WAYS = {
    "hvdlite, chosen": "hvdlite",
    "hvdlite, unfused": "hvdlite, unfused",
    "MPI": "MPI",
    "Gloo": "Gloo",
    "DTensor, Gloo": "DTensor over Gloo",
}


def refresh(page: Path, name: str, table: str) -> None:
    """Put ``table`` between the marks ``name`` of ``page``.

    Raises:
        ValueError: the page does not have both marks, once each.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}{table}\n{end}{after}")


def targets_table(found: Iterable[Target]) -> str:
    """A line for each target; what misses it is bold."""
    rows = []
    for target in found:
        wanted = ", ".join(dict.fromkeys(each.wanted for each in target.figures if each.limit is not None))
        cells = []
        for each in target.figures:
            cells.append(f"{each.label}: " + (each.measured if each.is_met else f"**{each.measured}**"))
        rows.append([target.what, wanted.replace("<=", "≤").replace(">=", "≥"), "; ".join(cells), target.verdict])
    return _table(["", "wanted", "measured", "met"], rows)


def allreduce_table(report: Report) -> str:
    """Medians in milliseconds, of some sizes; a cell is empty where a way has not been measured."""
    medians = {(row["way"], row["bytes"]): row["median_us"] / 1e3 for row in report["rows"]}
    rows = []
    for nbytes in ALLREDUCE_BYTES:
        times = [medians.get((way, nbytes)) for way in ALLREDUCE_WAYS]
        rows.append([size(nbytes), *("" if ms is None else _two_digits(ms) for ms in times)])
    return _table(["bytes", *ALLREDUCE_WAYS.values()], rows)


def operations_table(report: Report) -> str:
    """Medians in microseconds of what is not an allreduce, and in brackets MPI's; and of steps with one of these."""
    sizes = list(dict.fromkeys(row["bytes"] for row in report["operations"]))
    rows: dict[str, list[str]] = {}
    for row in report["operations"]:
        ours, mpi = (_two_digits(row["ways"][way]["median_us"]) for way in ("hvd", "MPI"))
        rows.setdefault(f"`hvd.{row['operation']}`", []).append(f"{ours} ({mpi})")
    first = _table(["us", *map(size, sizes)], [[name, *cells] for name, cells in rows.items()])
    steps = [_two_digits(found["median_us"]) for found in report["steps"].values()]
    second = _table(["20 allreduces of 256 B, and", *report["steps"]], [["us", *steps]])
    return f"{first}\n\n{second}"


def steps_table(report: Report) -> str:
    """How many times as long as without communication a step takes, of every model."""
    rows = []
    for model in report["models"]:
        alone = model["ways"]["no communication"]["median_ms"]
        cells = [f"{model['model']}, {_two_digits(model['gradient_bytes'] / MIB)} MiB", f"{_two_digits(alone)} ms"]
        for way in STEP_WAYS:
            found = model["ways"].get(way)
            ratio = None if found is None else found["relative"]
            cells.append("" if ratio is None else f"{ratio['value']:.3f} ({ratio['low']:.2f}, {ratio['high']:.2f})")
        rows.append(cells)
    return _table(["model, bytes of gradients", "no communication", *STEP_WAYS.values()], rows)


def split_table(report: Report) -> str:
    """How many times as long as its compute alone each way of tensor parallelism takes; bold: longer than wanted."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        form = {"rows": ", sequence parallel", "whole": "", None: ""}[row.get("form")]
        what = f"{row.get('what') or row['direction']}, {row['dtype']}, {row['rows']} rows of {row['hidden']}{form}"
        cases.setdefault(what, {})[row["way"]] = row
    ways = [way for way in SPLIT_WAYS if any(way in found for found in cases.values())]
    rows = []
    for what, found in cases.items():
        wanted = next(row["limit"] for row in found.values() if "limit" in row)
        rows.append([what, f"≤ {wanted:g}", *(_ratio(found[way]) if way in found else "" for way in ways)])
    return _table(["time over its compute alone", "wanted", *(SPLIT_WAYS[way] for way in ways)], rows)


def collectives_table(report: Report) -> str:
    """How many times as fast as over Gloo a call of torch.distributed is, and in brackets a memcpy; and steps."""
    sizes = list(dict.fromkeys(row["bytes"] for row in report["collectives"]))
    rows: dict[str, list[str]] = {}
    for row in report["collectives"]:
        bound = f" ({row['bound']['value']:.1f})" if "bound" in row else ""
        rows.setdefault(row["collective"], []).append(f"{row['times_as_fast']['value']:.1f}{bound}")
    steps = [
        [
            f"{kind}: {found['model']}",
            *(_two_digits(found["ways"][way]["median_ms"]) for way in ("hvdlite", "Gloo")),
            _interval(found["exposed"]) if "exposed" in found else "",
        ]
        for kind, key in (("DDP", "ddp"), ("FSDP2", "fsdp2"))
        for found in report[key]
    ]
    first = _table(["times as fast as Gloo", *map(size, sizes)], [[name, *cells] for name, cells in rows.items()])
    second = _table(["step, ms", "hvdlite", "Gloo", "exposed communication / Gloo's"], steps)
    return f"{first}\n\n{second}"


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["over_alone"]["value"]
    return f"**{ratio:.3f}**" if "limit" in row and ratio > row["limit"] else f"{ratio:.3f}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [titles, *rows]]
    lines.insert(1, "|---" * len(titles) + "|")
    return "\n".join(lines)
