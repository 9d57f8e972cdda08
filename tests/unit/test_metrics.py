"""Statistics as Prometheus and TensorBoard read them, each by its own client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hvdlite import metrics_server
from hvdlite.links.link_watch import LinkRates, Turns, watch
from hvdlite.metrics import prometheus_text, serve
from hvdlite.metrics_server import MetricsServer


def samples(text: str) -> dict[str, tuple[dict[str, str], float]]:
    """As Prometheus' own client reads them: (labels, value) by name."""
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def get(port: int, path: str = "/metrics") -> Any:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)


def test_counts_are_counters_with_a_rank() -> None:
    text = prometheus_text({"submissions": 7, "reduced_bytes": 1 << 40}, 3, 8)
    found = samples(text)
    assert found["hvdlite_submissions_total"] == ({"rank": "3"}, 7)
    assert found["hvdlite_reduced_bytes_total"] == ({"rank": "3"}, float(1 << 40))
    assert found["hvdlite_info"][0]["size"] == "8"
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert kinds["hvdlite_submissions"] == "counter"


def test_who_connects_and_says_nothing_takes_few_threads_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of the machine may; that must not take the descriptors and threads of a rank."""
    monkeypatch.setattr(metrics_server, "_MOST_AT_ONCE", 3)
    monkeypatch.setattr(metrics_server, "_PATIENCE_S", 0.5)
    server = MetricsServer(0, lambda: "a 1\n")
    before = threading.active_count()
    silent = [socket.create_connection((server._server.server_address[0], server.port)) for _ in range(20)]
    for link in silent:
        link.settimeout(20)
        with suppress(ConnectionResetError):
            assert link.recv(1) == b""  # the last are hung up on at once, the first three after a while
        assert threading.active_count() <= before + 3
        link.close()
    for _ in range(100):  # the last thread may be on its way out
        with suppress(urllib.error.URLError, ConnectionError), get(server.port) as answer:
            assert samples(answer.read().decode()) == {"a": ({}, 1.0)}
            break
        time.sleep(0.05)
    else:
        raise AssertionError("no answer")
    server.close()


def test_the_server_answers_this_machine_only_and_ends() -> None:
    server = MetricsServer(0, lambda: "a 1\n")
    assert server._server.server_address[0] == "127.0.0.1"
    with get(server.port) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert samples(answer.read().decode()) == {"a": ({}, 1.0)}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server.port, "/secrets")
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server.port)


def test_no_name_server_is_asked_for_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for question in ("getfqdn", "gethostbyaddr", "getnameinfo"):
        monkeypatch.setattr(socket, question, lambda *words: asked.append(words) or "localhost")
    MetricsServer(0, lambda: "").close()
    assert not asked


def test_a_port_that_is_taken_is_no_reason_not_to_train(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(port - 1, 1, str) is None
    assert f"no metrics on port {port} of 127.0.0.1 (HVDLITE_METRICS_PORT)" in caplog.text
    assert serve(0, 1, str) is None


def test_that_no_thread_is_to_be_had_is_no_reason_either(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(threading.Thread, "start", start)
    assert serve(port, 0, str) is None
    assert watch(LinkRates(0, {}), Turns("no thread"), 1.0, lambda: False) is None
    assert caplog.text.count("can't start new thread") == 2
    socket.create_server(("127.0.0.1", port)).close()  # nobody listens there


PROGRAM = """
import sys, urllib.request
import torch, hvdlite, hvdlite.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(5))
print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=10).read().decode())
hvd.shutdown()
"""


def run_with_port(program: str) -> subprocess.CompletedProcess[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = {**os.environ, "HVDLITE_METRICS_PORT": port}
    command = [sys.executable, "-c", program, port]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)


def test_a_job_with_the_setting() -> None:
    done = run_with_port(PROGRAM)
    assert samples(done.stdout)["hvdlite_submissions_total"] == ({"rank": "0"}, 1.0)


FORKING_PROGRAM = """
import os, sys, time, urllib.request, warnings
import hvdlite
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: of fork() beside threads
hvdlite.init()
child = os.fork()  # a worker of a DataLoader, say
if child == 0:
    time.sleep(120)
try:
    hvdlite.shutdown()
    hvdlite.init()
    print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=10).read().decode())
    hvdlite.shutdown()
finally:
    os.kill(child, 9)
"""


def test_a_forked_child_does_not_hold_the_port() -> None:
    done = run_with_port(FORKING_PROGRAM)
    assert samples(done.stdout)["hvdlite_submissions_total"] == ({"rank": "0"}, 0.0)
    assert not done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own imports
def test_tensorboard_reads_what_was_counted_since(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from hvdlite.integrations import tensorboard

    first: dict[str, int] = {}
    counts = iter([{"submissions": 5}, {"submissions": 12}, {"submissions": 13}, {"submissions": 40}])
    monkeypatch.setattr(tensorboard, "hvd", SimpleNamespace(statistics=lambda process_set: next(counts)))
    monkeypatch.setattr(tensorboard, "counted_before", lambda: first)
    with SummaryWriter(str(tmp_path)) as writer:
        statistics = tensorboard.StatisticsWriter(writer)
        statistics.write(100)
        statistics.write(200)
        first = {"submissions": 3}  # of process groups, which go on
        statistics.write(300)  # after hvd.shutdown() and hvd.init()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("hvdlite/submissions")]
    assert points == [(100, 7.0), (200, 1.0), (300, 37.0)]


def test_counts_of_tensorboard_begin_anew_with_init_and_not_with_restart() -> None:
    program = """
import hvdlite, torch
import hvdlite.torch as hvd
from hvdlite.integrations.tensorboard import StatisticsWriter

class Printer:
    def add_scalar(self, tag, value, step):
        if tag == "hvdlite/submissions":
            print(int(value), end=" ")

def reduce(times):
    for _ in range(times):
        hvd.allreduce(torch.ones(1))

hvd.init()
writers = [StatisticsWriter(Printer(), chosen) for chosen in (None, hvd.global_process_set)]
for times, again in (1, hvdlite.restart), (2, None), (5, None):
    reduce(times)
    for writer in writers:
        writer.write(0)
    if again:
        again()
    else:
        hvd.shutdown()
        hvd.init()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "1", "2", "2", "5", "5"], done.stderr
