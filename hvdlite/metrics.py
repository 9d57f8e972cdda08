"""What `hvdlite.statistics` counts, for Prometheus to scrape: text over HTTP, on this machine only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hvdlite.version import __version__

_LOG = logging.getLogger("hvdlite")
_HOST = "127.0.0.1"  # the text names no secrets, but nobody else is asked to read it
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


class MetricsServer:
    """Answers GET /metrics on 127.0.0.1 with ``text()``, on threads of its own, until `close`.

    Args:
        port: 0 lets the system choose.

    Attributes:
        port: on which it listens.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                content = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: a scrape is no news."""

        self._server = ThreadingHTTPServer((_HOST, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="hvdlite metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def serve(first_port: int, local_rank: int, text: Callable[[], str]) -> MetricsServer | None:
    """Listen on ``first_port`` + ``local_rank``; None where no port was asked for, or that one is not to be had."""
    if not first_port:
        return None
    try:
        return MetricsServer(first_port + local_rank, text)
    except (OSError, OverflowError) as error:
        _LOG.warning("no metrics on port %d of %s (HVDLITE_METRICS_PORT): %s", first_port + local_rank, _HOST, error)
        return None
