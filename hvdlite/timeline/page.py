"""A report as one HTML page that needs no network: the verdict, charts, and under each chart its figures as a table.

Charts are Plotly's (the extra ``report``): maintained for long, with values under the pointer, and a library in one
file that a page can carry. That file is most of the page, 4.5 MB. Of its Python side only that file is used.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.counted import counted
from hvdlite.timeline.long_steps import (
    LONG,
    LONG_STEP_HEADER,
    LONG_STEPS_SHOWN,
    LongStep,
    long_step_cells,
    long_steps,
)
from hvdlite.timeline.report import Bucket, RankStep, Report, Step
from hvdlite.timeline.verdict import verdict

STEPS_SHOWN = 500
_PARAMETERS_SHOWN = 12  # under the pointer; the table has all

# Okabe and Ito's colours, which people who see few colours can tell apart, on light and dark.
_PHASES = (
    ("rest_ms", "forward and the rest", "#999999"),
    ("backward_ms", "backward", "#0072B2"),
    ("optimizer_ms", "optimizer", "#009E73"),
    ("exposed_ms", "waiting for communication", "#D55E00"),
)


class PlotlyMissingError(Exception):
    """The extra is not installed."""


@dataclass(frozen=True)
class Chart:
    """A figure of Plotly, and the same as a table.

    Args:
        traces, axes: in Plotly's words.
        height: in pixels.
    """

    name: str
    title: str
    explanation: str
    traces: Sequence[dict[str, Any]]
    axes: dict[str, Any]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    height: int = 340


def page(title: str, report: Report) -> str:
    """The page.

    Raises:
        PlotlyMissingError: says what to install.
    """
    charts = [chart for chart in _charts(report) if chart.rows]
    figures = {chart.name: {"traces": chart.traces, "axes": chart.axes, "height": chart.height} for chart in charts}
    return _PAGE.format(
        title=html.escape(title),
        verdict=html.escape(verdict(report)),
        facts=html.escape(_facts(report)),
        charts="\n".join(map(_figure, charts)),
        plotly=_plotly(),
        figures=json.dumps(figures).replace("</", "<\\/"),
        style=_STYLE,
        script=_SCRIPT,
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PlotlyMissingError("a page needs Plotly: pip install 'hvdlite[report]'") from error
    text: str = get_plotlyjs()
    return text.replace("</script", "<\\/script")


def _facts(report: Report) -> str:
    shown = f"; the charts over time show the last {STEPS_SHOWN}" * (len(report.steps) > STEPS_SHOWN)
    dropped = f"; {report.dropped} events were dropped, so times are too low" * bool(report.dropped)
    return f"{counted(report.ranks, 'rank')}, {counted(len(report.steps), 'complete step')}{shown}{dropped}"


def _charts(report: Report) -> Iterable[Chart]:
    steps = report.steps[-STEPS_SHOWN:]
    if report.median is not None:
        yield _phases(report.median.ranks)
        yield _communication(steps)
        yield _stragglers(steps, [each.rank for each in report.median.ranks])
        yield _long_steps(long_steps(report)[:LONG_STEPS_SHOWN], len(report.steps))
    yield _buckets(report.buckets)
    yield _bandwidth(report.buckets)


def _phases(ranks: Sequence[RankStep]) -> Chart:
    names = [f"rank {each.rank}" for each in ranks]
    return Chart(
        "phases",
        "A step of each rank",
        "Medians over the steps. What is waited is exposed communication: on the rank that waits least it is the cost "
        "of communication, on the others the price of slower ranks as well.",
        [_bars(label, colour, x=names, y=[getattr(each, field) for each in ranks]) for field, label, colour in _PHASES],
        {"yaxis": {"title": {"text": "ms"}}},
        ["rank", *(f"{label}, ms" for _, label, _ in _PHASES), "step, ms"],
        [
            [str(each.rank), *(f"{getattr(each, field):.2f}" for field, _, _ in _PHASES), f"{each.step_ms:.2f}"]
            for each in ranks
        ],
    )


def _communication(steps: Sequence[Step]) -> Chart:
    numbers = [step.number for step in steps]
    hidden = [max(step.communication_ms - step.exposed_ms, 0.0) for step in steps]
    return Chart(
        "communication",
        "Exposed and hidden communication over time",
        "Means over ranks. Hidden communication lasts while a rank computes, and costs nothing. Exposed time above all "
        "of communication is waiting for slower ranks.",
        [
            _bars("exposed", "#D55E00", x=numbers, y=[step.exposed_ms for step in steps]),
            _bars("hidden", "#56B4E9", x=numbers, y=hidden),
        ],
        {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "ms"}}},
        ["step", "step, ms", "communication, ms", "exposed, ms", "hidden, ms"],
        [
            [
                str(step.number),
                f"{step.step_ms:.2f}",
                f"{step.communication_ms:.2f}",
                f"{step.exposed_ms:.2f}",
                f"{hidden_ms:.2f}",
            ]
            for step, hidden_ms in zip(steps, hidden, strict=True)
        ],
    )


def _points(places: Sequence[tuple[int, float, str]], colour: str, shown: str) -> dict[str, Any]:
    """Of (x, y, text); ``shown`` is Plotly's template of what is seen above one."""
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {"color": colour, "size": 9},
        "x": [x for x, _, _ in places],
        "y": [y for _, y, _ in places],
        "text": [text for _, _, text in places],
        "hovertemplate": shown,
    }


def _long_steps(steps: Sequence[LongStep], count: int) -> Chart:
    """Of all ``count`` steps, also those before the last ones that other charts show."""
    return Chart(
        "long_steps",
        "The longest steps",
        f"Those of more than {LONG} times the median, {LONG_STEPS_SHOWN} at most. The ranks that are named computed "
        "longer than in their other steps.",
        [
            _points(
                [(step.number, step.step_ms, f"{step.time_of_day}: {step.cause}") for step in steps],
                "#D55E00",
                "step %{x}: %{y:.2f} ms<br>%{text}<extra></extra>",
            )
        ],
        {
            "xaxis": {"title": {"text": "step"}, "range": [0, count + 1]},
            "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        },
        LONG_STEP_HEADER,
        [long_step_cells(step) for step in steps],
    )


def _stragglers(steps: Sequence[Step], ranks: Sequence[int]) -> Chart:
    """By how much a rank waits less than the others on average, which is how late it comes."""
    late = []
    for step in steps:
        waits = {each.rank: each.exposed_ms for each in step.ranks}
        others = {rank: [wait for other, wait in waits.items() if other != rank] for rank in waits}
        late.append(
            {rank: max(sum(rest) / len(rest) - waits[rank], 0.0) if rest else 0.0 for rank, rest in others.items()}
        )
    rows = []
    for rank in ranks:
        own = [each[rank] for each in late if rank in each]
        first = sum(step.slowest_rank == rank for step in steps)
        rows.append([str(rank), f"{sum(own) / len(own):.2f}" if own else "-", f"{max(own, default=0):.2f}", str(first)])
    return Chart(
        "stragglers",
        "Who is late",
        "By how many ms a rank waits less than the others do on average: they wait for it. Cells are empty where a "
        "rank's step has no counterpart.",
        [
            {
                "type": "heatmap",
                "x": [step.number for step in steps],
                "y": [f"rank {rank}" for rank in ranks],
                "z": [[each.get(rank) for each in late] for rank in ranks],
                "colorscale": "Cividis",
                "colorbar": {"title": {"text": "ms"}, "thickness": 12},
                "hovertemplate": "step %{x}, %{y}: %{z:.2f} ms late<extra></extra>",
            }
        ],
        {"xaxis": {"title": {"text": "step"}}},
        ["rank", "late on average, ms", "at most, ms", "steps in which it was the slowest"],
        rows if len(ranks) > 1 else [],
        height=max(200, 130 + 24 * len(ranks)),
    )


def _buckets(buckets: Sequence[Bucket]) -> Chart:
    ordered = list(reversed(buckets))  # Plotly's first is at the bottom
    return Chart(
        "buckets",
        "The costliest buckets",
        "Time in which a rank's coordinator works on the bucket in the whole trace; means over ranks.",
        [
            {
                "type": "bar",
                "orientation": "h",
                "name": "total",
                "marker": {"color": "#0072B2"},
                "x": [bucket.total_ms for bucket in ordered],
                "y": [bucket.name for bucket in ordered],
                "customdata": [_few(bucket.parameters) for bucket in ordered],
                "hovertemplate": "%{y}: %{x:.2f} ms<br>%{customdata}<extra></extra>",
            }
        ],
        {"xaxis": {"title": {"text": "ms"}}, "yaxis": {"automargin": True}},
        ["bucket", "total, ms", "bytes", "algbw, GB/s", "parameters"],
        [
            [
                bucket.name,
                f"{bucket.total_ms:.2f}",
                f"{bucket.nbytes:,}",
                f"{bucket.algbw_gbps:.2f}",
                ", ".join(bucket.parameters) or "-",
            ]
            for bucket in buckets
        ],
        height=max(200, 130 + 26 * len(buckets)),
    )


def _bandwidth(buckets: Sequence[Bucket]) -> Chart:
    return Chart(
        "bandwidth",
        "Bandwidth of the costliest buckets",
        "algbw = bytes / time. What this machine reaches with nothing else to do, `python -m hvdlite bench` measures: "
        "buckets far below that share cores or network with something, or are small.",
        [
            _points(
                [(bucket.nbytes, bucket.algbw_gbps, bucket.name) for bucket in buckets],
                "#009E73",
                "%{text}: %{x:,} bytes, %{y:.2f} GB/s<extra></extra>",
            )
        ],
        {
            "xaxis": {"title": {"text": "bytes in the whole trace"}, "type": "log"},
            "yaxis": {"title": {"text": "GB/s"}, "rangemode": "tozero"},
        },
        ["bucket", "bytes", "algbw, GB/s"],
        [[bucket.name, f"{bucket.nbytes:,}", f"{bucket.algbw_gbps:.2f}"] for bucket in buckets],
    )


def _bars(name: str, colour: str, *, x: Sequence[Any], y: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "marker": {"color": colour},
        "x": x,
        "y": y,
        "hovertemplate": f"%{{x}}: %{{y:.2f}} ms {name}<extra></extra>",
    }


def _few(parameters: Sequence[str]) -> str:
    shown = "<br>".join(map(html.escape, parameters[:_PARAMETERS_SHOWN]))
    more = len(parameters) - _PARAMETERS_SHOWN
    return f"{shown}<br>and {more} more" if more > 0 else shown


def _figure(chart: Chart) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in chart.header)
    body = "\n".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in chart.rows)
    return f"""<section>
<h2 id="{chart.name}-title">{html.escape(chart.title)}</h2>
<p>{html.escape(chart.explanation)}</p>
<div class="chart" id="{chart.name}" role="img" aria-labelledby="{chart.name}-title"></div>
<details><summary>The figures</summary><div class="table"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div></details>
</section>"""


_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --back: #ffffff; --line: #d6d6d6; --soft: #f2f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --back: #15181b; --line: #3a4046; --soft: #20252a; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 1100px; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0; } p { margin: .3rem 0; }
.verdict { font-size: 1.25rem; background: var(--soft); border-left: 4px solid #0072B2;
  padding: .8rem 1rem; margin: 1rem 0; }
.chart { width: 100%; } .table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; }
summary { cursor: pointer; }
"""

_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
const style = () => getComputedStyle(document.documentElement);
function layout(figure) {
  const text = style().getPropertyValue("--text").trim(), line = style().getPropertyValue("--line").trim();
  const axis = (name) => Object.assign({automargin: true, gridcolor: line, zerolinecolor: line}, figure.axes[name]);
  return {
    barmode: "stack", height: figure.height, font: {color: text}, paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 8, r: 8, t: 8, b: 8}, dragmode: false,
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, xaxis: axis("xaxis"), yaxis: axis("yaxis"),
  };
}
function draw() {
  for (const [name, figure] of Object.entries(figures))
    Plotly.react(name, figure.traces, layout(figure), {responsive: true, displayModeBar: false, displaylogo: false});
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{facts}</p>
<p class="verdict">{verdict}</p>
{charts}
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""
