"""What `hvdlite.statistics` counts, for Prometheus to scrape: text over HTTP, on this machine only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hvdlite.version import __version__

if TYPE_CHECKING:
    from hvdlite.metrics_server import MetricsServer

_LOG = logging.getLogger("hvdlite")


def prometheus_text(counts: Mapping[str, int], rank: int, size: int) -> str:
    """``counts`` in Prometheus' text format, each as a counter ``hvdlite_..._total`` with the label rank."""
    lines = [
        "# HELP hvdlite_info Version of hvdlite, and how many ranks the job has.",
        "# TYPE hvdlite_info gauge",
        f'hvdlite_info{{rank="{rank}",size="{size}",version="{__version__}"}} 1',
    ]
    for name, value in counts.items():
        lines += [
            f"# HELP hvdlite_{name}_total See hvd.statistics().",
            f"# TYPE hvdlite_{name}_total counter",
            f'hvdlite_{name}_total{{rank="{rank}"}} {value}',
        ]
    return "\n".join(lines) + "\n"


def serve(first_port: int, local_rank: int, text: Callable[[], str]) -> MetricsServer | None:
    """Listen on ``first_port`` + ``local_rank``; None where no port was asked for, or that, or a thread, is not to be
    had."""
    if not first_port:
        return None
    from hvdlite.metrics_server import HOST, MetricsServer  # whose http.server nobody else needs

    try:
        return MetricsServer(first_port + local_rank, text)
    except (OSError, OverflowError, RuntimeError) as error:
        _LOG.warning("no metrics on port %d of %s (HVDLITE_METRICS_PORT): %s", first_port + local_rank, HOST, error)
        return None
