"""The server of `hvdlite.metrics`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from hvdlite.links.wire import SHORTAGE_S, SHORTAGES

HOST = "127.0.0.1"  # the text names no secrets, but nobody else is asked to read it
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE_S = 10.0  # for a request
_MOST_AT_ONCE = 16  # connections, each of which has a thread and a descriptor of the rank


class _Server(ThreadingHTTPServer):
    """Any user of the machine may connect, as often as it likes; that must cost the rank little."""

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # HTTPServer's asks for the name of the address: a name server, where /etc/hosts does not have it.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in SHORTAGES:
                time.sleep(SHORTAGE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: who has left, or said nothing in time, is no news either."""


class MetricsServer:
    """Answers GET /metrics on 127.0.0.1 with ``text()``, on threads of its own, until `close`.

    Args:
        port: 0 lets the system choose.

    Attributes:
        port: on which it listens.

    Raises:
        OSError: the port is taken.
        RuntimeError: no thread is to be had.
    """

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S

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

        self._server = _Server((HOST, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="hvdlite metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._server.server_close()
            raise

    def close(self) -> None:
        """Listen no more. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def abandon(self) -> None:
        """In a forked child, which would hold the port when its parent listens no more."""
        self._server.socket.close()
