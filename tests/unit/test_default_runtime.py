"""The default runtime of a process that was started alone; tests/mpi/test_process.py has it on several ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hvdlite.config import Config
from hvdlite.coordinator import in_flight
from hvdlite.coordinator.coordinator import Coordinator
from hvdlite.job_runtime import Runtime


def start(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def run(program: str) -> str:
    """What ``program`` prints; in a process of its own, which hvdlite hooks itself into."""
    done = start(program)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_A_RUNTIME = """
import hvdlite

def refused(call):
    try:
        call()
    except hvdlite.NotInitializedError as error:
        return isinstance(error, hvdlite.ShutDownError) and isinstance(error, ValueError) and "hvd.init()" in str(error)

calls = (hvdlite.runtime, hvdlite.rank, hvdlite.statistics)
print(all(map(refused, calls)), refused(hvdlite.restart))
hvdlite.init()
hvdlite.shutdown()
print(all(map(refused, calls)))
hvdlite.restart()
print(hvdlite.rank(), hvdlite.is_initialized())
"""


def test_before_init_and_after_shutdown() -> None:
    assert run(WITHOUT_A_RUNTIME) == "True True\nTrue\n0 True\n"


FORGOTTEN = """
import sys
import {library} as hvd

def before(*_):
    print("seen before")

def forgets():
    {call}

{hook}
forgets()
"""


@pytest.mark.parametrize(
    ("library", "call"),
    [
        ("hvdlite", "hvd.size()"),
        ("hvdlite.torch", "hvd.broadcast_object(1)"),
        ("hvdlite.torch", "hvd.mpi_threads_supported()"),
    ],
)
def test_who_forgets_init_sees_his_own_line_last(library: str, call: str) -> None:
    done = start(FORGOTTEN.format(library=library, call=call, hook=""))
    assert done.returncode == 1
    first, *frames = done.stderr.splitlines()
    assert "call hvd.init() first" in first
    assert sum(line.startswith("  File") for line in frames) == 2
    assert all("<string>" in line for line in frames if line.startswith("  File"))


def test_a_hook_of_the_program_is_called_where_init_is_forgotten_or_comes_later() -> None:
    hook = "sys.excepthook = before"
    assert start(FORGOTTEN.format(library="hvdlite", call="hvd.size()", hook=hook)).stdout == "seen before\n"
    late = "try: hvd.size()\n    except ValueError: hvd.init()\n    raise KeyError"
    assert start(FORGOTTEN.format(library="hvdlite", call=late, hook=hook)).stdout == "seen before\n"


def test_an_error_of_a_thread_shows_the_lines_of_the_program() -> None:
    thread = "threading.Thread(target=lambda: hvd.broadcast(3, 0))"
    call = f"hvd.init()\n    thread = {thread}\n    thread.start()\n    thread.join()"
    program = FORGOTTEN.format(library="hvdlite.torch", call=call, hook="import threading")
    first, message, _, *frames = start(program).stderr.splitlines()
    assert first.startswith("Exception in thread") and message.startswith("ValueError: broadcast")
    assert [line for line in frames if line.startswith("  File")] == ['  File "<string>", line 10, in <lambda>']


MANY_THREADS = """
import threading
import hvdlite

together = threading.Barrier(8)
found = []

def start():
    together.wait()
    hvdlite.init()
    found.append(hvdlite.runtime())

threads = [threading.Thread(target=start) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
coordinators = [thread for thread in threading.enumerate() if thread.name.startswith("hvdlite-coordinator")]
print(len(found), len(set(map(id, found))), len(coordinators))
"""


def test_init_from_many_threads_starts_once() -> None:
    assert run(MANY_THREADS) == "8 1 1\n"


FORKED = """
import os
import hvdlite

hvdlite.init()
if os.fork() == 0:
    try:
        hvdlite.init()
    except hvdlite.StartupError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
hvdlite.restart()
print(hvdlite.size())
"""


def test_a_forked_child_cannot_start() -> None:
    refusal, size = run(FORKED).splitlines()
    assert refusal.startswith("this process was forked from one that runs hvdlite")
    assert size == "1"


MISSPELT = """
import logging, os
import hvdlite

os.environ["HVDLITE_LOGLEVEL"] = "info"
logging.getLogger("hvdlite").addHandler(handler := logging.Handler())
handler.emit = lambda record: print(record.getMessage())
for _ in range(2):
    hvdlite.init()
    hvdlite.shutdown()
"""


def test_a_misspelt_setting_is_named_once() -> None:
    assert run(MISSPELT) == "HVDLITE_LOGLEVEL is no setting, and is ignored: is HVDLITE_LOG_LEVEL meant?\n"


FAILS_MEANWHILE = """
import os, time
import hvdlite
from hvdlite import default_runtime, job_runtime
from hvdlite.recovery.roster import Generation

class Member:
    generation = Generation(1, (0,), are_alike=False)

    def join(self, *_, **__):
        return self.generation

def make_timeline(world, worlds, make=job_runtime.JobTimeline):
    world.health.rank_failed(1, "rank 1 died")
    return make(world, worlds)

os.environ["HVDLITE_FAILURE_GRACE_SECONDS"] = "0"
default_runtime.peers().membership = Member()
job_runtime.JobTimeline = make_timeline
hvdlite.init()
time.sleep(0.5)
print("goes on", flush=True)
os._exit(0)
"""


def test_a_rank_of_an_elastic_job_goes_on_though_another_fails_before_init_returns() -> None:
    """It is not ended after HVDLITE_FAILURE_GRACE_SECONDS, as one is that does not go on."""
    assert run(FAILS_MEANWHILE) == "goes on\n"


IN_A_POOL = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import hvdlite

if __name__ == "__main__":
    for start_method in ("fork", "spawn"):
        hvdlite.init()
        with ProcessPoolExecutor(1, get_context(start_method)) as pool:
            try:
                print(pool.submit(hvdlite.rank).result())
            except hvdlite.NotInitializedError as error:
                print(error)
"""


def test_a_worker_that_is_forked_knows_its_rank_and_one_that_is_spawned_says_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(IN_A_POOL)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    forked, spawned = done.stdout.splitlines()
    assert forked == "0"
    assert spawned.endswith(
        "A rank's own worker (of a DataLoader, for example) cannot: hand it what it needs, as hvd.rank()"
    )


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(lambda coordinator: coordinator._worker.at_work, id="at work"),
        pytest.param(lambda coordinator: coordinator._in_flight.lock, id="submitting"),
    ],
)
def test_a_signal_handler_that_has_interrupted_hvdlite_cannot_shut_down(
    held: Callable[[Coordinator], AbstractContextManager[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator could not end before the handler does."""
    raised: list[RuntimeError] = []

    def handle(runtime: Runtime) -> None:
        with held(runtime.world.coordinator), monkeypatch.context() as patch:
            patch.setattr(in_flight, "_KEPT_S", 0.01)
            try:
                runtime.close()
            except RuntimeError as error:
                raised.append(error)

    with Runtime(None, Config()) as runtime:
        handler = threading.Thread(target=handle, args=(runtime,), daemon=True)
        handler.start()
        handler.join(10)
        assert len(raised) == 1 and "by a signal handler that interrupted hvdlite at work" in str(raised[0])
        assert not runtime.closed
    assert runtime.closed
