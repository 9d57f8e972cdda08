"""`hvdliterun --elastic`: ranks die, are stopped or leave; the others go on, and each sample counts once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdlite.timeline.trace_file import read_trace
from launching import Result, launch

# Gradients are counts of samples: the weights say how often each sample went into them. `MISHAP` happens in the worker
# that was started as the second one, between backward and step of the sixth batch.
TRAINING = """
import os, signal, sys, time
import torch
import hvdlite.torch as hvd

SAMPLES, BATCH = 240, 2

hvd.init()
me = int(os.environ["HVDLITE_WORKER"])
weights = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
optimizer = torch.optim.SGD([weights], lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, [("weights", weights)], op=hvd.Sum)
model = torch.nn.ParameterList([weights])
sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
committed = 0

def say(*words):
    print(*words, flush=True)

def mishap():
    {mishap}

@hvd.elastic.run
def train(state):
    global committed
    say("starts on rank", hvd.rank(), "of", hvd.size(), "at batch", state.batch, "as", os.getpid())
    for number, batch in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=sampler)):
        optimizer.zero_grad()
        (-weights[batch].sum()).backward()
        if me == 1 and state.batch == 5:
            say("mishap at", time.time())
            mishap()
        optimizer.step()
        sampler.record_batch(number, BATCH)
        state.batch += 1
        state.commit()
        while state.batch == 9 and hvd.size() < {least}:
            time.sleep(0.05)
            state.check_host_updates()

try:
    train(state)
    say("counts", sorted(set(weights.tolist())), "rank", hvd.rank(), "of", hvd.size())
except hvd.HorovodInternalError as error:
    time.sleep(1.5)
    say("saved batch", state.batch, "on rank", hvd.rank(), "after", error)
    raise
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
NEWCOMER_FAILS = """
import os, pathlib
if int(os.environ["HVDLITE_WORKER"]) > 1:
    pathlib.Path("{failed}").touch()
    os._exit(7)
"""


def run(
    mishap: str, *options: str, n: int = 3, least: int = 1, victims: tuple[int, ...] = (1,), **settings: str
) -> Result:
    """Train on ``n`` ranks, of which workers ``victims`` come to grief, and wait at batch 9 for ``least`` ranks."""
    script = TRAINING.replace("{mishap}", mishap).replace("{least}", str(least)).replace("me == 1", f"me in {victims}")
    return launch(n, script, mpi="none", options=["--elastic", *options], env=settings, timeout=200)


@dataclass(frozen=True)
class Start:
    rank: int
    size: int
    batch: int
    pid: int


def starts(result: Result) -> list[Start]:
    found = re.findall(r"starts on rank (\d+) of (\d+) at batch (\d+) as (\d+)", result.stdout)
    return [Start(*map(int, numbers)) for numbers in found]


def check_counts(result: Result, ranks: int) -> None:
    """All ranks have ended with weights in which each sample is counted once."""
    assert sorted(re.findall(r"counts (\[.*?\]) rank (\d+) of (\d+)", result.stdout)) == [
        ("[1.0]", str(rank), str(ranks)) for rank in range(ranks)
    ], result


def recorded_ranks(trace: Path) -> set[int]:
    return {event["pid"] for event in read_trace(str(trace))["traceEvents"]}


def test_survivors_of_a_killed_rank_go_on_and_count_each_sample_once() -> None:
    result = run(KILLED, "--restarts", "0").check()
    check_counts(result, 2)
    assert {(start.size, start.batch) for start in starts(result)} == {(3, 0), (2, 5)}  # of the last commit
    assert sorted(Counter(start.pid for start in starts(result)).values()) == [1, 2, 2]  # the same processes
    assert "rank 1 (pid" in result.launcher_output and "goes on with 2 ranks" in result.launcher_output


def test_a_new_process_takes_the_place_of_the_dead_one(tmp_path: Path) -> None:
    """At a commit of the others, who go on until it has come, and then with the state that they have by then."""
    result = run(KILLED, n=2, least=2, HVDLITE_TIMELINE=str(tmp_path / "trace.json")).check()
    check_counts(result, 2)
    assert {(start.size, start.batch) for start in starts(result)} == {(2, 0), (1, 5), (2, 9)}
    assert len({start.pid for start in starts(result)}) == 3
    recorded = {part: recorded_ranks(tmp_path / f"trace{part}.json") for part in ("", ".generation2", ".generation3")}
    assert recorded == {"": {0, 1}, ".generation2": {0}, ".generation3": {0, 1}}


def test_the_end_of_those_that_go_on_counts_and_not_that_of_a_newcomer_which_failed(tmp_path: Path) -> None:
    failed = tmp_path / "failed"
    newcomer = NEWCOMER_FAILS.replace("{failed}", str(failed))
    waits = TRAINING.replace("hvd.size() < {least}", f"not os.path.exists({str(failed)!r})")
    script = newcomer + waits.replace("{mishap}", KILLED)
    result = launch(2, script, mpi="none", options=["--elastic", "--restarts", "1"], timeout=200).check()
    check_counts(result, 1)
    assert "which is no rank yet, (pid" in result.launcher_output and "exit status 7" in result.launcher_output


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 2])
def test_too_few_wait_for_a_new_process(victim: int) -> None:
    result = run(KILLED, "--min-np", "3", victims=(victim,)).check()
    check_counts(result, 3)
    assert {(start.size, start.batch) for start in starts(result)} == {(3, 0), (3, 5)}


@pytest.mark.thorough
def test_a_stopped_rank_is_ended_and_left_out() -> None:
    stopped = "os.kill(os.getpid(), signal.SIGSTOP)"
    limits = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "8", "HVDLITE_FAILURE_GRACE_SECONDS": "2"}
    result = run(stopped, "--restarts", "0", **limits).check()
    check_counts(result, 2)
    assert "rank 1 is stopped, and does not come to the others after a failure, and is ended" in result.launcher_output


@pytest.mark.thorough
def test_a_rank_that_is_stopped_while_another_dies_is_not_waited_for() -> None:
    """The others hear of the death, and no heartbeats after it."""
    both = "os.kill(os.getpid(), signal.SIGSTOP) if me == 1 else time.sleep(1); " + KILLED
    limits = {"HVDLITE_HEARTBEAT_TIMEOUT_SECONDS": "8"}
    result = run(both, "--restarts", "0", n=4, victims=(1, 2), **limits).check()
    check_counts(result, 2)
    assert "rank 1 is stopped, and does not come to the others after a failure, and is ended" in result.launcher_output


@pytest.mark.thorough
def test_a_rank_that_raises_is_replaced() -> None:
    result = run('raise ValueError("of the data")', "--min-np", "3").check()
    check_counts(result, 3)
    assert "rank 1 (pid" in result.launcher_output and "ended with exit status 1" in result.launcher_output


def test_who_cannot_go_on_has_time_to_save() -> None:
    """Rank 0, too, is no more, which otherwise saves for all."""
    result = run(KILLED, "--min-np", "3", "--restarts", "0", victims=(0,))
    assert result.returncode == 128 + 9 and not result.leftovers, result
    for rank in (1, 2):
        assert f"saved batch 5 on rank {rank} after hvd.elastic.run cannot go on: 2 ranks are left of --min-np 3" in (
            result.ranks[rank].stdout
        ), result


@pytest.mark.thorough
def test_a_rank_that_leaves_ends_the_job() -> None:
    result = run("sys.exit(0)", n=2)
    assert result.returncode != 0 and not result.leftovers, result
    assert "saved batch 5 on rank 0 after hvd.elastic.run cannot go on: rank 1 has ended by itself" in result.stdout
    assert "exit status 0" in result.stdout


GROWING = """
import os, sys, time
import torch
import hvdlite.torch as hvd

hvd.init()
state = hvd.elastic.ObjectState(sizes=[])

def give(slots):
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(slots))
    os.replace(sys.argv[1] + ".new", sys.argv[1])

@hvd.elastic.run
def train(state):
    while state.sizes != [2, 3, 1]:
        size = int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="size").item())
        if size not in state.sizes:
            state.sizes = [*state.sizes, size]
        if hvd.rank() == 0:
            give({1: 4, 2: 1}.get(len(state.sizes), 1))
        time.sleep(0.05)
        state.commit()

train(state)
print("has seen", state.sizes)
"""


def test_ranks_come_and_go_as_a_script_says(tmp_path: Path) -> None:
    slots, script = tmp_path / "slots", tmp_path / "discover.sh"
    slots.write_text("2")
    script.write_text(f"#!/bin/sh\necho localhost:$(cat {slots})\n")
    script.chmod(0o755)
    options = ["--host-discovery-script", str(script), "--max-np", "3"]
    result = launch(2, GROWING, str(slots), mpi="none", options=options, timeout=200).check()
    assert result.stdout == "has seen [2, 3, 1]\n"


SHRINKING = """
import os, sys, time
import torch
import hvdlite.torch as hvd

me = int(os.environ["HVDLITE_WORKER"])
hvd.init()
state = hvd.elastic.ObjectState(batch=0)

@hvd.elastic.run
def train(state):
    print("starts at", state.batch, "as", me, "of", hvd.size(), flush=True)
    while state.batch < 40:
        hvd.allreduce(torch.ones(1), name="gradient")
        state.batch += 1
        state.commit()
        time.sleep(0.1)
        if state.batch == 10 and me == 0:
            {mishap}

train(state)
"""


@pytest.mark.parametrize("comes_first", ["death", pytest.param("news", marks=pytest.mark.thorough)])
def test_the_only_rank_that_is_left_does_not_leave(comes_first: str, tmp_path: Path) -> None:
    """Whether rank 0 dies before the script gives its slot alone, or after."""
    slots, script = tmp_path / "slots", tmp_path / "discover.sh"
    slots.write_text("2")
    script.write_text(f"#!/bin/sh\necho localhost:$(cat {slots})\n")
    script.chmod(0o755)
    fewer = f"open({str(slots)!r}, 'w').write('1')"
    dies = "os._exit(7)" if comes_first == "death" else "time.sleep(2.0); os._exit(7)"  # between two commits
    program = SLOW_NEWCOMER + SHRINKING.replace("{mishap}", f"{fewer}; {dies}")
    options = ["--host-discovery-script", str(script)]
    result = launch(2, program, mpi="none", options=options, timeout=200).check()
    assert re.findall("starts at (.*)", result.stdout)[-1] == "10 as 1 of 1", result


STARTS_A_PROGRAM = """
import os, subprocess, sys
import torch
import hvdlite.torch as hvd

if len(sys.argv) > 1:
    hvd.init()
hvd.init()
done = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True)
assert done.returncode != 0 and "a program that a rank has started calls hvd.init() as well" in done.stderr, done.stderr
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
print("goes on")
"""


@pytest.mark.thorough
def test_a_program_that_a_rank_starts_is_no_rank() -> None:
    result = launch(2, STARTS_A_PROGRAM, mpi="none", options=["--elastic"], timeout=200).check()
    assert result.stdout == "goes on\n" * 2


# Worker 1 dies before the training function, or while the state is shared anew; the others have no time limit there.
DIES_OUTSIDE = """
import os, time
import torch
import hvdlite.torch as hvd

MOMENT = {moment!r}
me = int(os.environ["HVDLITE_WORKER"])
hvd.init()

class State(hvd.elastic.ObjectState):
    def sync(self):
        if me == 1 and self.batch == 2 and MOMENT == "in sync":
            os._exit(7)
        super().sync()

def wait(moment):
    if MOMENT == moment:
        if me == 1:
            os._exit(7)
        time.sleep(2.0)

wait("before")
state = State(batch=0)
state.register_reset_callbacks([lambda: wait("in a callback")])

@hvd.elastic.run
def train(state):
    while state.batch < 5:
        hvd.allreduce(torch.ones(1), name="gradient")
        state.batch += 1
        state.commit()
        if state.batch == 2 and me < 2 and hvd.size() == 2 and MOMENT != "before":
            raise hvd.HorovodInternalError("of one's own")
    print("trained", state.batch, "as", me, flush=True)

train(state)
"""
SLOW_NEWCOMER = """
import os, time
if int(os.environ["HVDLITE_WORKER"]) > 1:
    time.sleep(2.0)
"""


@pytest.mark.parametrize("moment", ["before", "in sync", pytest.param("in a callback", marks=pytest.mark.thorough)])
def test_who_dies_outside_of_the_training_function_is_no_more_than_replaced(moment: str) -> None:
    """However long the others take to notice, or wait for a new process."""
    script = SLOW_NEWCOMER + DIES_OUTSIDE.replace("{moment!r}", repr(moment))
    options = ["--elastic", *(["--min-np", "2"] if moment == "in sync" else [])]
    limits = {"HVDLITE_FAILURE_GRACE_SECONDS": "0.5"}
    result = launch(2, script, mpi="none", options=options, env=limits, timeout=200).check()
    assert "trained 5 as 0" in result.stdout, result


SECOND_FUNCTION = """
import os, time
import torch
import hvdlite
import hvdlite.torch as hvd

me = int(os.environ["HVDLITE_WORKER"])
hvd.init()

def train(state):
    while state.batch < 5:
        hvd.allreduce(torch.ones(1), name="gradient")
        state.batch += 1
        if state.name == "second" and state.batch == 2 and hvd.size() == 2:
            if me == 1:
                os._exit(7)
            hvdlite.runtime().wait_for_failure(30)
            time.sleep(1.0)
        state.commit()
        while state.batch == 3 and hvd.size() < {least}:
            time.sleep(0.05)
            state.check_host_updates()
    print(state.name, "trained", state.batch, "as", me, flush=True)

for name in ("first", "second"):
    hvd.elastic.run(train)(hvd.elastic.ObjectState(batch=0, name=name))
"""


def test_a_second_training_function_has_as_much_time_to_notice_a_death() -> None:
    options, limits = ["--elastic", "--restarts", "0"], {"HVDLITE_FAILURE_GRACE_SECONDS": "0.5"}
    script = SECOND_FUNCTION.replace("{least}", "1")
    result = launch(2, script, mpi="none", options=options, env=limits, timeout=200).check()
    assert "second trained 5 as 0" in result.stdout, result


def test_who_comes_to_a_second_training_function_leaves_out_the_first() -> None:
    script = SECOND_FUNCTION.replace("{least}", "2")
    result = launch(2, script, mpi="none", options=["--elastic"], timeout=200).check()
    assert sorted(re.findall("(.*) trained 5 as (.)", result.stdout)) == [
        ("first", "0"), ("first", "1"), ("second", "0"), ("second", "2"),
    ]  # fmt: skip


DIE_WHILE_STARTING = """
import os
from hvdlite import default_runtime
if 2 <= int(os.environ["HVDLITE_WORKER"]) < 6:
    default_runtime._build = lambda *arguments: os._exit(7)
"""


def test_as_many_may_die_while_ranks_start_as_hvdliterun_restarts() -> None:
    """The one that has the state waits for each of them in the same start."""
    script = DIE_WHILE_STARTING + DIES_OUTSIDE.replace("{moment!r}", "'in sync'")
    result = launch(2, script, mpi="none", options=["--elastic", "--min-np", "2"], timeout=200).check()
    assert "trained 5 as 0" in result.stdout and result.launcher_output.count("ended with exit status 7") == 5, result


WITHOUT_COLLECTIONS = """
import gc, os, weakref
import torch
import hvdlite
import hvdlite.torch as hvd

hvd.init()
me = int(os.environ["HVDLITE_WORKER"])
model = torch.nn.Linear(100, 100)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, batch=0)
hvd.add_process_set([0, 1])
worlds = []

@hvd.elastic.run
def train(state):
    gc.disable()
    worlds.append(weakref.ref(hvdlite.runtime().world))
    while state.batch < 6:
        hvd.allreduce(torch.ones(10), name="sum")
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.batch += 1
        state.commit()
        if (state.batch, me) in [(2, 2), (4, 1)]:
            os._exit(7)
    print("living worlds:", [world() is not None for world in worlds], flush=True)

train(state)
"""


def test_memory_of_ranks_that_went_on_is_free_before_garbage_is_collected() -> None:
    result = launch(3, WITHOUT_COLLECTIONS, mpi="none", options=["--elastic", "--restarts", "0"], timeout=200).check()
    assert "living worlds: [False, False, True]" in result.stdout, result


PROCESS_GROUP = """
import os, signal, time
import torch, torch.distributed as dist
import hvdlite.torch as hvd

if os.environ["HVDLITE_WORKER"] == "2":
    time.sleep(2)  # longer than ranks may live on that do not begin anew
hvd.init()
state = hvd.elastic.ObjectState(batch=0)

@hvd.elastic.run
def train(state):
    for _ in range(2):  # one after the other
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("hvdlite")
        total = torch.tensor([hvd.rank() + 1.0])
        dist.all_reduce(total)
    print("total", total.item(), "of", hvd.size(), flush=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    if state.batch == 0:
        state.batch = 1
        state.commit()
        if os.environ["HVDLITE_WORKER"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, 1)).sum().backward()  # by C++, which makes another exception of it

train(state)
"""


def test_each_generation_may_have_process_groups_of_torch() -> None:
    options, settings = ["--elastic", "--min-np", "2"], {"HVDLITE_FAILURE_GRACE_SECONDS": "0.5"}
    result = launch(2, PROCESS_GROUP, mpi="none", options=options, env=settings, timeout=100).check()
    assert re.findall("total .*", result.stdout) == ["total 3.0 of 2"] * 4
