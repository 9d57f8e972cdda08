"""Ranks that raise, leave, are killed or stopped in the middle of an allreduce: the others end, and say who it was.

Ranks 0 and 1 play one node, 2 and 3 another: 0 leads the job, 2 its node, 1 and 3 lead nothing.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fault_lab import check_end, run
from launching import Result

DEATHS = """
kind, victim = sys.argv[1], int(sys.argv[2])
hvdlite.init()
step()
if hvdlite.rank() == victim:
    def die():
        say("dying at", time.time())
        if kind == "raise":
            raise ValueError("the loss is not a number")
        if kind == "exit":
            sys.exit(0)
        if kind == "_exit":
            os._exit(0)
        os.kill(os.getpid(), getattr(signal, kind))
    time.sleep(0.2)  # the others are in an allreduce by now, for which this rank is missing
    if kind == "SIGKILL":
        threading.Timer(0.3, die).start()  # in the middle of one, at any point
        while True:
            step()
    die()
while True:
    step()
"""


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_killed_rank_is_named_by_the_others(victim: int) -> None:
    result = run(DEATHS, "SIGKILL", str(victim), machines="0011", alone=True)
    check_end(result, f"rank {victim} (pid", "died without a word")


@pytest.mark.parametrize("mpi", ["current", "none"])
@pytest.mark.parametrize("victim", [0, 2])
def test_on_one_node_too(victim: int, mpi: str) -> None:
    result = run(DEATHS, "SIGKILL", str(victim), n=3, alone=True, mpi=mpi)
    check_end(result, f"rank {victim} (pid", "died without a word")


@pytest.mark.parametrize(
    ("kind", "said"), [("SIGKILL", "on "), ("raise", "rank 1 (started as rank 2) raised ValueError")]
)
def test_of_ranks_that_init_has_named_the_launchers_number_is_said_too(kind: str, said: str) -> None:
    some = "from hvdlite.launched import launched_rank\nif launched_rank() == 0:\n    time.sleep(60)\n"
    result = run(some + DEATHS.replace("init()", "init(comm=[1, 2])"), kind, "1", n=3, mpi="none")
    check_end(result, said, "started as rank 2)", "rank 1 (")
    assert "hvdlite run: rank 2 (pid" in result.launcher_output, result


@pytest.mark.parametrize(("victim", "machines"), [(3, "0011"), (0, "0011"), (1, "0000")])
def test_an_exception_is_shown_by_the_others(victim: int, machines: str) -> None:
    result = run(DEATHS, "raise", str(victim), machines=machines, alone=True)
    check_end(result, f"rank {victim} raised ValueError: the loss is not a number", "script.py", "in die")
    assert "ValueError: the loss is not a number" in result.ranks[victim].stderr


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_leaves_early_ends_the_job(victim: int) -> None:
    result = run(DEATHS, "exit", str(victim), machines="0011")
    reason = f"rank {victim} has shut down hvdlite (its process ended)"
    check_end(result, "ShutDownError", reason, "hvd.join()", "DistributedSampler")


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_job_whose_rank_leaves_early_has_failed(mpi: str) -> None:
    """MPICH's mpirun takes the status of a rank that leaves MPI before the others for that of the job."""
    result = run(DEATHS, "exit", "1", n=2, mpi=mpi)
    check_end(result, "ShutDownError", "rank 1 has shut down hvdlite (its process ended)")


@pytest.mark.parametrize(("victim", "kind"), [(2, "_exit"), (1, "SIGSEGV")])
def test_a_process_that_ends_without_python(victim: int, kind: str) -> None:
    result = run(DEATHS, kind, str(victim), machines="0011", alone=True)
    check_end(result, f"rank {victim} (pid", "died without a word")


@pytest.mark.parametrize("victim", [0, 3])
def test_a_stopped_process_is_noticed_by_its_silence(victim: int) -> None:
    impatient = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "3"}
    result = run(DEATHS, "SIGSTOP", str(victim), machines="0011", env=impatient)
    check_end(result, f"rank {victim} (pid", "has not answered for", "HVDLITE_HEARTBEAT_TIMEOUT_SECONDS")


AT_ONCE = """
import pathlib, random
import torch
import hvdlite.torch as hvd
victim, way, told = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
hvd.init()
world = hvdlite.runtime().group.world
largest = 100_000 if world.engine.early is None else world.engine.early.most_bytes // 4
values = [torch.ones(numel) for numel in (1, 1000, largest)]
model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if way == "optimizer":
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def blocking():
    for value in values:
        hvd.allreduce_(value, name=str(len(value)))

def burst():
    handles = [hvd.allreduce_async_(values[i % 2], name=f"in burst {i}") for i in range(24)]
    for handle in handles:
        hvd.synchronize(handle)

def few():
    hvd.synchronize(hvd.allreduce_async_(values[0], name="alone"))
    handles = [hvd.allreduce_async_(values[0].clone(), name=f"of few {i}") for i in range(4)]
    for handle in handles:
        hvd.synchronize(handle)

def others():
    hvd.broadcast_(values[0], 0, name="b")
    hvd.allgather(values[1], name="g")
    hvd.alltoall(values[1][: 4 * hvd.size()], name="t")
    hvd.reducescatter(values[1], name="r")
    hvd.allgather(values[2], name="large g")
    hvd.reducescatter(values[2], name="large r")
    hvd.barrier()

def training():
    optimizer.zero_grad()
    model(torch.ones(4, 50)).sum().backward()
    optimizer.step()

step = {"blocking": blocking, "burst": burst, "few": few, "optimizer": training, "others": others}[way]
for _ in range(30):
    step()
assert world.coordinator.runs_free or way != "blocking"
if hvd.rank() == victim:
    new = told.with_suffix(".new")
    new.write_text(str(os.getpid()))
    new.rename(told)
while True:
    step()
    if random.random() < 0.1:
        time.sleep(random.uniform(0.0, 2e-3))
"""
WAYS = ["blocking", "burst", "few", "optimizer", "others"]


def strike(told: Path, number: int, ended: threading.Event) -> None:
    """Send signal ``number`` to the process that ``told`` names, and have its output say when."""
    while not told.exists():
        if ended.wait(0.01):
            return
    pid = int(told.read_text())
    time.sleep(random.uniform(0.0, 0.3))
    with Path(f"/proc/{pid}/fd/1").open("a") as output:
        output.write(f"dying at {time.time()}\n")
    os.kill(pid, number)


def run_and_strike(
    directory: Path, victim: int, machines: str, way: str = "blocking", number: int = signal.SIGKILL, **how: Any
) -> Result:
    """From outside it comes at any instruction; a thread of the victim's would first wait for the GIL."""
    told = directory / "pid"
    ended = threading.Event()
    striker = threading.Thread(target=strike, args=(told, number, ended))
    striker.start()
    try:
        return run(AT_ONCE, str(victim), way, str(told), n=len(machines), machines=machines, **how)
    finally:
        ended.set()
        striker.join()


@pytest.mark.parametrize(("victim", "machines"), [(0, "0011"), (3, "0011"), (1, "012")])
def test_those_that_wait_for_another_node_too(tmp_path: Path, victim: int, machines: str) -> None:
    result = run_and_strike(tmp_path, victim, machines, alone=True)
    check_end(result, f"rank {victim} (pid", "died without a word")


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(200))
def test_killed_at_any_point(tmp_path: Path, number: int) -> None:
    number, which = divmod(number, len(WAYS))
    victim, layout = divmod(number, 4)
    machines = ("000", "0011", "012", "01")[layout]
    mpi = "none" if len(set(machines)) == 1 else "current"
    victim %= len(machines)
    result = run_and_strike(tmp_path, victim, machines, WAYS[which], alone=True, mpi=mpi)
    check_end(result, f"rank {victim} (pid", "died without a word")


@pytest.mark.parametrize(
    ("victim", "way", "number"),
    [
        (0, "burst", signal.SIGKILL),
        pytest.param(2, "few", signal.SIGKILL, marks=pytest.mark.thorough),
        (1, "optimizer", signal.SIGKILL),
        pytest.param(1, "others", signal.SIGKILL, marks=pytest.mark.thorough),
        (2, "blocking", signal.SIGSTOP),
    ],
)
def test_ranks_that_need_no_coordinator_for_an_operation_hear_of_it_too(
    tmp_path: Path, victim: int, way: str, number: int
) -> None:
    impatient = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "3"} if number == signal.SIGSTOP else {}
    result = run_and_strike(tmp_path, victim, "000", way, number, mpi="none", env=impatient)
    check_end(result, f"rank {victim} (pid", "has not answered for" if impatient else "died without a word")


BUSY = """
where = sys.argv[1]
hvdlite.init()
step()
if hvdlite.rank() == 1:
    time.sleep(0.2)  # the others are back from the step by now
    say("dying at", time.time())
    hvdlite.runtime().fail(ValueError("a fault of its own"))  # it does not end, so the launcher ends nobody
if where == "C":
    time.sleep(60)
else:
    while True:
        pass
"""


@pytest.mark.parametrize("where", ["C", "Python"])
def test_who_is_busy_elsewhere_ends_after_the_grace(where: str) -> None:
    result = run(BUSY, where, n=3, machines="001", env={"HVDLITE_FAILURE_GRACE_SECONDS": "0.5"})
    check_end(
        result, "rank 1 raised ValueError: a fault of its own", "ends, since it did not end by itself within 0.5 s"
    )


CAUGHT = """
hvdlite.init()
step()
try:
    if hvdlite.rank() == 1:
        say("dying at", time.time())
        raise ValueError("the loss is not a number")
    while True:
        step()
except hvdlite.RankFailedError as error:
    assert error.rank == 1, error.rank
    runtime = hvdlite.runtime()
    assert runtime.world.survivors() == (0, 2), runtime.world.survivors()
    group = runtime.group
    for again in (lambda: reduce("another", tensor()), lambda: barrier_async(group), lambda: allocate(group, 8)):
        try:
            again()
        except hvdlite.RankFailedError:
            continue
        say("went on")
    print("saved my work", file=sys.stderr, flush=True)
    hvdlite.shutdown()
"""


def test_a_program_may_save_its_work_after_a_failure_and_fails_all_the_same() -> None:
    result = run(CAUGHT, n=3, machines="001")
    check_end(result, "saved my work")


HUNG_AT_THE_END_OF_MPI = """
import types
import hvdlite.mpi
hvdlite.init()
step()
mpi = hvdlite.mpi
mpi._FINALIZE_S = 0.5
if hvdlite.rank() == 1:
    from mpi4py import MPI
    def hang():
        time.sleep(60)
    sys.modules["mpi4py.MPI"] = types.SimpleNamespace(**{**vars(MPI), "Finalize": hang})
else:
    meet = mpi._meet
    # This one was stopped, or a link was down, as the last one came.
    mpi._meet = lambda played, *limits: meet(played, *limits) and meet_nobody(*limits)
    def meet_nobody(timeout_s, is_hopeless):
        while not is_hopeless():
            time.sleep(0.01)
        return False
"""


def test_who_is_lost_inside_mpi_finalize_had_finished() -> None:
    result = run(HUNG_AT_THE_END_OF_MPI, n=2, alone=True)
    died, lived = result.ranks[1].stderr, result.ranks[0].stderr
    assert "rank 1 has finished, but MPI_Finalize did not come back within 0 s; the process ends without it" in died
    assert "had finished; its process ended inside MPI_Finalize" in lived, result
    assert "without a word" not in lived


STARTING = """
victim, where, what = int(sys.argv[1]), *sys.argv[2:]
from hvdlite.launched import launched_rank
if launched_rank() == victim:
    def fail(*args):
        say("dying at", time.time())
        raise ValueError("no room on this host")
    sys.modules[where].__dict__[what] = fail
try:
    hvdlite.init()
except Exception as error:
    say(f"{type(error).__name__}: {error}")
    time.sleep(0.5)  # the launcher ends all as soon as one ends
    raise
say("went on")
"""


@pytest.mark.parametrize(
    ("where", "what", "said", "mpi"),
    [
        ("hvdlite.bootstrap", "discover", "", "current"),  # the others are inside MPI
        ("hvdlite.bootstrap", "discover", "but rank {victim} ended with exit status 1", "none"),
        ("hvdlite.node", "_core_mask", "StartupError: rank {victim}: no room on this host", "current"),
        ("hvdlite.world", "HostMemory", "StartupError: rank {victim}: no room on this host", "current"),
        ("hvdlite.world", "HostMemory", "StartupError: rank {victim}: no room on this host", "none"),
    ],
)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_an_error_during_the_start_ends_the_job(victim: int, where: str, what: str, said: str, mpi: str) -> None:
    result = run(STARTING, str(victim), where, what, n=3, mpi=mpi)
    assert result.returncode != 0
    assert not result.leftovers
    assert "went on" not in result.stdout
    assert "ValueError: no room on this host" in result.ranks[victim].stdout
    others = [rank.stdout for number, rank in enumerate(result.ranks) if number != victim]
    assert all(said.format(victim=victim) in text for text in others), others
    assert result.elapsed_s < 20
