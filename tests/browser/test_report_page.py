"""The page of `timeline report --html` in a real browser: no errors, no network, charts with data, at any width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.cli.timeline import main
from hvdlite.recorder import Lane
from hvdlite.timeline.chrome_trace import TraceWriter
from hvdlite.timeline.trace_file import TraceFile
from web_driver import Browser, missing

STEPS, RANKS = 12, 3
CHARTS = ["phases", "communication", "stragglers", "long_steps", "buckets", "bandwidth"]
LONG_NAME = "transformer.encoder.layers.11.self_attention.output_projection.weight"


def write_trace(path: Path) -> None:
    """A step takes 20 ms, the last one 60; rank 2 is 3 ms late in backward in every step, and others wait for it."""
    file = TraceFile(str(path), 0)
    for rank in range(RANKS):
        late = 3 * (rank == 2)
        spans: list[tuple[Lane, str, float, float, int, str]] = []
        for i in range(STEPS + 1):
            t = 20 * i + 40 * (i == STEPS)
            spans += [
                (Lane.BACKWARD, "backward", t + 5, t + 11 + late, 0, ""),
                (Lane.WAIT, "synchronize", t + 11 + late, t + 16, 0, ""),
                (Lane.NODE_ALLREDUCE, "optimizer0.assignment2.bucket0", t + 14, t + 15, 1 << 20, "float32"),
                (Lane.NODE_ALLREDUCE, "optimizer0.assignment2.bucket1", t + 9, t + 9.5, 1 << 16, "float32"),
                (Lane.PARAMETER, LONG_NAME, t + 14, t + 15, 1 << 20, "optimizer0.assignment2.bucket0"),
                (Lane.OPTIMIZER, "step", t + 16, t + 18, 0, ""),
            ]
        writer = TraceWriter(rank, 0, 0)
        file.open(writer.introduction())
        file.append(
            writer.lines(
                (0, lane, name, round(s * 1e6), round(e * 1e6), n, detail) for lane, name, s, e, n, detail in spans
            )
        )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("page")
    write_trace(directory / "trace.json")
    assert main(["report", str(directory / "trace.json"), "--html", str(directory / "report.html")]) == 0
    return (directory / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Browser() as started:
        yield started


DRAWN = """
const marks = {phases: ".bars .point path", communication: ".bars .point path", stragglers: ".heatmaplayer image",
               long_steps: ".scatterlayer .point", buckets: ".bars .point path", bandwidth: ".scatterlayer .point"};
const drawn = {};
for (const [name, mark] of Object.entries(marks)) {
  const chart = document.getElementById(name);
  const box = chart.getBoundingClientRect();
  drawn[name] = {marks: chart.querySelectorAll(mark).length, width: box.width, right: box.right, height: box.height};
}
return drawn;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page(browser: Browser, page: str, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.run("return document.documentElement.scrollWidth") <= width
    drawn: dict[str, Any] = browser.run(DRAWN)
    marks = {name: chart["marks"] for name, chart in drawn.items()}
    # Three ranks with four phases; exposed and hidden of every step; two buckets, once as bars and once as points.
    over_time = {"communication": 2 * STEPS, "stragglers": 1, "long_steps": 1}
    assert marks == {"phases": 4 * RANKS, **over_time, "buckets": 2, "bandwidth": 2}
    for name, chart in drawn.items():
        assert chart["width"] > 0.8 * min(width, 1068), name
        assert chart["height"] > 150, name
    colours = browser.run(
        "const s = getComputedStyle(document.body);"
        "const label = document.querySelector('#phases .ytick text, #phases .xtick text');"
        "return [s.color, s.backgroundColor, getComputedStyle(label).fill];"
    )
    text, back = ("rgb(232, 232, 232)", "rgb(21, 24, 27)") if dark else ("rgb(27, 27, 27)", "rgb(255, 255, 255)")
    assert colours == [text, back, text]


def test_the_verdict_comes_first_and_tables_have_the_figures(browser: Browser, page: str) -> None:
    browser.open(page, width=1280, dark=False)
    assert browser.run("return document.querySelector('.verdict').textContent") == (
        "Communication costs 10% of a step (2.00 of 20.00 ms); rank 2 is late in 92% of the steps, by 3.00 ms, in "
        "backward. 1 of 12 steps took more than 2 times the median, which cost 14% of the time; the longest, step 12 "
        "at 0.238 s, took 60.00 ms: all ranks in forward, its data or other code of the program."
    )
    top = "return document.querySelector('.verdict').getBoundingClientRect().top"
    assert browser.run(top) < browser.run(top.replace(".verdict", "section"))
    rows = browser.run(
        "return [...document.querySelector('#phases').closest('section').querySelectorAll('tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent));"
    )
    assert rows == [
        ["0", "7.00", "6.00", "2.00", "5.00", "20.00"],
        ["1", "7.00", "6.00", "2.00", "5.00", "20.00"],
        ["2", "7.00", "9.00", "2.00", "2.00", "20.00"],
    ]
    assert LONG_NAME in browser.run("return document.querySelector('#buckets').closest('section').textContent")
    summaries = "document.querySelectorAll('summary').length, document.querySelectorAll('[role=img]').length"
    assert browser.run(f"return [{summaries}]") == [len(CHARTS)] * 2
