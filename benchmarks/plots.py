"""Pictures of the reports in results/: bandwidth against size, step times, scaling.

    python plots.py                     # results/*.json to results/*.png
    python plots.py --results DIRECTORY

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from measure import size

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, GREY = (
    *("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"),
    "#7f7f7f",
)
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
}
LABEL_GAP = 0.045  # of the height of the axes, between two labels
CAPTION_INCHES = 0.36
Report = dict[str, Any]
Line = tuple[str, str, str, Sequence[float], Sequence[float]]
"""Label, colour, line style, x, y."""


def draw_all(results: Path) -> list[Path]:
    """Draw what the reports in ``results`` allow; returns the files."""
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    drawn = []
    for name, draw in PLOTS.items():
        if name in reports:
            drawn.append(results / f"{name}.png")
            with matplotlib.rc_context(STYLE):
                draw(reports).savefig(drawn[-1], dpi=110)
    return drawn


def bandwidth(reports: dict[str, Report]) -> Figure:
    """Bus bandwidth against size, log-log, beside that of a memcpy of as many bytes on every rank.

    A memcpy is no bound: it reads and writes each byte on every rank, an allreduce in place less than that.
    """
    report = reports["allreduce"]
    found: list[Line] = []
    factor = 2 * (report["ranks"] - 1) / report["ranks"]
    for label, colour, style, source, way in (
        ("memcpy on every rank", GREY, "--", "allreduce", "memcpy"),
        ("hvdlite backend", SKY, "-", "allreduce", "hvdlite backend"),
        ("hvd, in its slot", BLUE, "-", "allreduce", "hvd, in its slot"),
        ("hvd, elsewhere", BLUE, ":", "allreduce", "hvd, elsewhere"),
        ("Open MPI", VERMILION, "-", "allreduce", "MPI"),
        ("Open MPI, in pieces", VERMILION, ":", "allreduce", "MPI, pieces"),
        ("Open MPI, coll/sm", VERMILION, "-.", "allreduce", "MPI coll/sm"),
        ("MPICH", ORANGE, "-", "allreduce_mpich", "MPI"),
        ("Intel MPI", ORANGE, ":", "allreduce_intelmpi", "MPI"),
        ("Gloo", GREEN, "-", "allreduce", "Gloo"),
    ):
        rows = [row for row in reports.get(source, {"rows": []})["rows"] if row["way"] == way]
        if rows:
            busbw = [(1 if way == "memcpy" else factor) * row["algbw_gbps"] for row in rows]
            found.append((label, colour, style, [row["bytes"] for row in rows], busbw))
    figure = Figure(figsize=(8, 5.2))
    axes = figure.subplots()
    draw_lines(axes, found)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size(int(nbytes))))
    axes.set_xticks([4 << 4 * i for i in range(7)])
    axes.set(xlabel="bytes", ylabel="bus bandwidth (of a memcpy: bytes / time), GB/s")
    axes.set_title(f"Allreduce of float32 in place, {report['ranks']} ranks on one machine")
    return with_caption(figure, report)


def step_times(reports: dict[str, Report]) -> Figure:
    """Of each model and way, the step without communication and what communication adds, with its interval."""
    report = reports["train_step"]
    models = report["models"]
    columns = min(len(models), 3)
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(2.9 * columns + 1.2, 2.8 * rows + 0.6))
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    for axes, model in zip(grid.flat, models, strict=False):
        ways = [*model["ways"]]
        alone = model["ways"][ways[0]]["median_ms"]
        exposed = [model["ways"][way]["exposed_ms"] for way in ways]
        colours = [BLUE if way == "hvdlite" else ORANGE for way in ways]
        places = np.arange(len(ways))
        axes.barh(places, alone, color="#c8c8c8", height=0.66)
        axes.barh(places, [max(0.0, each["value"]) for each in exposed], left=alone, color=colours, height=0.66)
        right = max(alone + max(0.0, each["high"]) for each in exposed)
        for place, each in zip(places[1:], exposed[1:], strict=True):
            axes.plot([alone + each["low"], alone + each["high"]], [place, place], color="black", linewidth=1)
            at = alone + max(0.0, each["high"])
            axes.text(at + 0.02 * right, place, f"{each['value']:+.1f} ms", va="center", fontsize=8)
        axes.set_xlim(0, 1.36 * right)
        axes.set_yticks(places, ways)
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{model['model']}\n{model['gradient_bytes'] / 2**20:.1f} MiB of gradients")
        axes.set_xlabel("ms per step")
    grid[0][0].invert_yaxis()
    title = "Step without communication (grey), and what communication adds, with its 95 % interval (line)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return with_caption(figure, report)


def scaling(reports: dict[str, Report]) -> Figure:
    """What communication adds to a step, against ranks, as the model has it."""
    report = reports["scale_model"]
    rows = report["rows"]
    colours = {"hvdlite": BLUE, "flat ring": VERMILION, "rings": GREEN}
    found: list[Line] = [
        (
            {"hvdlite": "hvdlite: hierarchical", "rings": "hierarchical, rings"}.get(way, way),
            colours.get(way, PURPLE),
            "-",
            [row["ranks"] for row in rows],
            [row["exposed_ms"][way] for row in rows],
        )
        for way in rows[0]["exposed_ms"]
    ]
    figure = Figure(figsize=(8, 4.2))
    axes = figure.subplots()
    draw_lines(axes, found)
    axes.axhline(report["compute_ms"], color=GREY, linestyle="--", linewidth=1)
    axes.text(rows[0]["ranks"], 1.15 * report["compute_ms"], "compute of a step", color=GREY, fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ranks, _: f"{ranks:.0f}"))
    axes.set_xticks([row["ranks"] for row in rows][::2])
    axes.set(xlabel="ranks", ylabel="exposed communication, ms per step")
    step = f"{len(report['buckets'])} buckets, {report['compute_ms']:.0f} ms of compute"
    axes.set_title(f"{report['model']} on virtual ranks: {step}")
    return with_caption(figure, report)


def draw_lines(axes: Axes, found: Sequence[Line]) -> None:
    """Log-log, each line with its label at its right end."""
    axes.set(xscale="log", yscale="log")
    axes.grid(True)
    for _, colour, style, x, y in found:
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.6)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    low, high = np.log10(axes.get_ylim())
    ends = [(np.log10(y[-1]) - low) / (high - low) for *_, y in found]
    for (label, colour, style, *_), height in zip(found, apart(ends, LABEL_GAP), strict=True):
        where = {"transform": axes.transAxes, "clip_on": False, "color": colour}
        axes.plot([1.01, 1.05], [height, height], linestyle=style, linewidth=1.6, **where)
        axes.text(1.06, height, label, va="center", **where)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """``heights``, in the same order, moved as little as it takes for ``gap`` between any two."""
    order = np.argsort(heights)
    placed = np.array(heights, dtype=float)[order]
    groups = [[i] for i in range(len(placed))]
    centres = [float(height) for height in placed]
    i = 0
    while i + 1 < len(groups):
        between = gap * (len(groups[i]) + len(groups[i + 1])) / 2
        if centres[i + 1] - centres[i] < between:  # they touch: one group, around the mean of its members
            groups[i] += groups.pop(i + 1)
            del centres[i + 1]
            centres[i] = float(np.mean(placed[groups[i]]))
            i = max(0, i - 1)
        else:
            i += 1
    result = [0.0] * len(placed)
    for members, centre in zip(groups, centres, strict=True):
        for k, member in enumerate(members):
            result[int(order[member])] = centre + gap * (k - (len(members) - 1) / 2)
    return result


def with_caption(figure: Figure, report: Report) -> Figure:
    machine, versions = report["machine"], report.get("versions", {})
    where = f"{machine['cores']} cores of {machine['processor']}; " if "processor" in machine else ""
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("mpi", "torch", "hvdlite"))
    figure.tight_layout(rect=(0, CAPTION_INCHES / figure.get_figheight(), 1, 1))
    text = f"{report['command'].split(' --json')[0]}\n{where}{said}".strip()
    figure.text(0.01, 0.01, text, fontsize=7, color="#555555", va="bottom")
    return figure


PLOTS: dict[str, Callable[[dict[str, Report]], Figure]] = {
    "allreduce": bandwidth,
    "train_step": step_times,
    "scale_model": scaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results")
    for path in draw_all(parser.parse_args().results):
        print(path)


if __name__ == "__main__":
    main()
