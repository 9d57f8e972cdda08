"""Pictures of docs/tensor_parallel.md: what ranks and streams do when, in an exchange of each kind.

    python tools/draw_schedules.py      # writes docs/pictures/*.svg

Needs matplotlib (`pip install hvdlite[benchmarks]`). Lengths say what comes after what, not how long it takes. Pictures
have a ground of their own, so that they can be read on light and on dark pages.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DIRECTORY = Path(__file__).resolve().parents[1] / "docs" / "pictures"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "hvdlite", "font.family": "sans-serif", "font.size": 9}
# Of Okabe and Ito, which colour-blind people can tell apart; light enough for dark text.
COMPUTE, MOVE, MEET = "#9fd0ee", "#f3cf87", "#c9c9c9"
KINDS = {COMPUTE: "matmul", MOVE: "copy, add up", MEET: "ranks meet"}
INK, PAPER, LINE = "#1f2328", "#ffffff", "#8c959f"
LANE, MARGIN, TITLE = 0.42, 0.55, 0.34  # inches
WIDTH, LABELS = 7.6, 1.45


@dataclass(frozen=True)
class Bar:
    """What is done from ``start`` to ``end``."""

    text: str
    start: float
    end: float
    kind: str = COMPUTE


@dataclass(frozen=True)
class Schedule:
    """The bars of every lane: of a rank, or of a stream."""

    title: str
    lanes: dict[str, list[Bar]]


def ranks(title: str, bars: list[Bar]) -> Schedule:
    """Of two ranks that do the same."""
    return Schedule(title, {"rank 0": bars, "rank 1": bars})


def streams(title: str, own: list[Bar], of_hvdlite: list[Bar]) -> Schedule:
    return Schedule(title, {"your stream": own, "hvdlite's streams": of_hvdlite})


PICTURES = {
    "window": [
        ranks(
            "all-gather and matmul",
            [
                Bar("own rows to the window", 0, 3.4, MOVE),
                Bar("meet", 3.4, 4.4, MEET),
                Bar("one matmul reads all rows in the window", 4.4, 12),
            ],
        ),
        ranks(
            "matmul and reduce-scatter",
            [
                Bar("the matmul writes its product into the window", 0, 7.6),
                Bar("meet", 7.6, 8.6, MEET),
                Bar("own rows of both: add up", 8.6, 12, MOVE),
            ],
        ),
    ],
    "gather_in_parts": [
        streams(
            "all-gather and matmul by ring_exchange and pipeline, rank 0 of 3",
            [Bar("own rows", 0, 4), Bar("rows of rank 1", 4, 8), Bar("rows of rank 2", 8, 12)],
            [Bar("meet", 0, 1, MEET), Bar("rows of rank 1", 1, 4, MOVE), Bar("rows of rank 2", 4.5, 8, MOVE)],
        )
    ],
    "scatter_by_ring_exchange": [
        streams(
            "matmul and reduce-scatter by ring_exchange, rank 0 of 3",
            [Bar("product for rank 1", 0, 4), Bar("product for rank 2", 4, 8), Bar("own product", 8, 12)],
            [
                Bar("to rank 1", 4, 7, MOVE),
                Bar("to rank 2", 8, 11, MOVE),
                Bar("meet", 12, 13, MEET),
                Bar("add up", 13, 14.5, MOVE),
            ],
        )
    ],
    "scatter_by_pipeline": [
        streams(
            "matmul and reduce-scatter by pipeline",
            [Bar("first half of all products", 0, 6), Bar("second half", 6, 12)],
            [
                Bar("meet", 6, 7, MEET),
                Bar("add up", 7, 9.5, MOVE),
                Bar("meet", 12, 13, MEET),
                Bar("add up", 13, 14.5, MOVE),
            ],
        )
    ],
    "multicast": [
        streams(
            "matmul and reduce-scatter, then all-gather and matmul, by multicast",
            [Bar("all products", 0, 5), Bar("one matmul of all rows", 10.2, 14.5)],
            [
                Bar("meet", 5, 6, MEET),
                Bar("add up", 6, 7.2, MOVE),
                Bar("own rows to all", 7.2, 9.2, MOVE),
                Bar("meet", 9.2, 10.2, MEET),
            ],
        )
    ],
    "bulk": [
        streams(
            "all-gather and matmul by bulk",
            [Bar("all rows", 5, 11)],
            [Bar("meet", 0, 1, MEET), Bar("rows of the others", 1, 5, MOVE)],
        ),
        streams(
            "matmul and reduce-scatter by bulk",
            [Bar("all products", 0, 6)],
            [Bar("meet", 6, 7, MEET), Bar("add up", 7, 11, MOVE)],
        ),
        streams(
            "backward of all_gather_matmul by bulk",
            [Bar("gradient of x", 0, 6), Bar("gradient of the weight", 6, 12)],
            [
                Bar("meet", 0, 1, MEET),
                Bar("gather rows of x", 1, 5, MOVE),
                Bar("meet", 6, 7, MEET),
                Bar("scatter the gradient of x", 7, 11.5, MOVE),
            ],
        ),
    ],
}


def draw(schedules: list[Schedule]) -> Figure:
    """One below the other, on the same scale, with a key."""
    lanes = sum(len(each.lanes) for each in schedules)
    height = len(schedules) * TITLE + lanes * LANE + MARGIN
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))  # in inches, from the top
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    end = max(bar.end for each in schedules for bars in each.lanes.values() for bar in bars)
    scale = (WIDTH - LABELS - 0.15) / end
    top = 0.0
    for each in schedules:
        top += TITLE
        axes.text(0.15, top - 0.1, each.title, color=INK, weight="bold")
        for name, bars in each.lanes.items():
            axes.text(0.15, top + LANE / 2, name, color=INK, va="center")
            axes.plot([LABELS, WIDTH - 0.15], [top + LANE / 2] * 2, color=LINE, linewidth=0.6, zorder=0)
            for bar in bars:
                _draw_bar(figure, bar, LABELS + bar.start * scale, (bar.end - bar.start) * scale, top)
            top += LANE
    left = LABELS
    for colour, meaning in KINDS.items():
        axes.add_patch(FancyBboxPatch((left, top + 0.22), 0.14, 0.12, "square,pad=0", facecolor=colour, edgecolor=LINE))
        axes.text(left + 0.22, top + 0.28, meaning, color=INK, va="center", size=8)
        left += 1.3
    axes.text(WIDTH - 0.15, top + 0.28, "time →", color=INK, va="center", ha="right", size=8)
    return figure


def _draw_bar(figure: Figure, bar: Bar, left: float, width: float, top: float) -> None:
    (axes,) = figure.axes
    box = FancyBboxPatch(
        (left + 0.015, top + 0.05),
        width - 0.03,
        LANE - 0.1,
        "round,pad=0,rounding_size=0.04",
        facecolor=bar.kind,
        edgecolor=LINE,
        linewidth=0.6,
    )
    axes.add_patch(box)
    axes.text(left + width / 2, top + LANE / 2, bar.text, color=INK, size=8, ha="center", va="center")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    DIRECTORY.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, schedules in PICTURES.items():
            path = DIRECTORY / f"{name}.svg"
            draw(schedules).savefig(path, metadata={"Date": None})
            print(f"drawn: {path}")


if __name__ == "__main__":
    main()
