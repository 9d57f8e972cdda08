"""Process groups over hvdlite: who is late is named, by calls, messages and waits."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distributed_lab import NODES, RANK, SIZE, process_group, told
from hvdlite.distributed import late_watch
from hvdlite.distributed.engine_moves import EngineMoves
from hvdlite.distributed.pump import Pump
from hvdlite.errors import StartupError

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.up_to_three_ranks,
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]
LAST = SIZE - 1


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_who_is_late_is_named(nodes: tuple[int, ...]) -> None:
    with process_group(nodes, timeout_s=1.0):
        if RANK == LAST:
            told(None)
        else:
            with pytest.raises(RuntimeError, match=f"rank {LAST} did not come within the timeout of 1 s"):
                dist.all_reduce(torch.ones(3))
            told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
def test_who_does_not_come_to_a_new_group_is_named_with_the_timeout_that_the_group_was_given() -> None:
    ranks = list(range(1, SIZE)) if SIZE > 2 else [0, 1]
    with process_group((0,) * SIZE):
        if RANK in ranks and RANK != LAST:
            late = (
                f"start of process group .*, but rank {LAST} did not come within 0.5 s; .* raise the timeout that the"
            )
            with pytest.raises(StartupError, match=late):
                dist.new_group(ranks, timeout=timedelta(seconds=0.5))
        told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
def test_who_has_left_is_not_waited_for_by_a_new_group() -> None:
    with process_group((0,) * SIZE) as group:
        dist.barrier()
        if RANK == LAST:
            group.shutdown()
        else:
            said = f"start of process group .*, but rank {LAST} left the group of all ranks before, by destroy_process_"
            with pytest.raises(StartupError, match=said):
                dist.new_group(timeout=timedelta(hours=1), use_local_synchronization=True)
        told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_wait_that_is_too_short_names_who_is_late_and_the_call_goes_on(
    nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_watch, "_DECLARED_S", 0.02)
    with process_group(nodes):
        if RANK == LAST:
            told(None)
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        if RANK != LAST:
            late = f"hvdlite:all_reduce of process group .*, to which rank {LAST} did not come, .* 0.1 s of its wait"
            with pytest.raises(RuntimeError, match=late):
                work.wait(timedelta(seconds=0.1))
            told(None)
        work.wait()
        assert tensor[0] == SIZE


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_timeout_that_is_set_is_that_of_later_calls(nodes: tuple[int, ...]) -> None:
    with process_group(nodes) as group:
        if hasattr(dist, "set_timeout"):  # from torch 2.14 on
            dist.set_timeout(timedelta(seconds=0.2))
        else:
            with pytest.warns(UserWarning, match="only supported for either nccl or gloo"):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2))
            assert group.membership.timeout_s == 60  # type: ignore[attr-defined]
            group.set_timeout(timedelta(seconds=0.2))
        if RANK != LAST:
            with pytest.raises(RuntimeError, match=f"rank {LAST} did not send within the timeout"):
                dist.recv(torch.empty(3), LAST)
            with pytest.raises(RuntimeError, match=f"rank {LAST} did not come within the timeout of 0.2 s"):
                dist.all_reduce(torch.ones(3))
        told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody to send to")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_message_that_nobody_takes_names_the_rank(nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor copies, as a rank does otherwise with what it does not want yet: nobody serves its pump."""
    if RANK == LAST:
        monkeypatch.setattr(Pump, "start", lambda pump: None)
    with process_group(nodes, timeout_s=0.3):
        if RANK == 0:
            with pytest.raises(RuntimeError, match=f"rank {LAST} did not take a message within the timeout of process"):
                dist.send(torch.ones(10_000_000), LAST)
        told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_call_has_the_timeout_of_its_options(nodes: tuple[int, ...]) -> None:
    with process_group(nodes) as group:
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=0.1)
        if RANK == LAST:
            told(None)
        else:
            with pytest.raises(RuntimeError, match=f"rank {LAST} did not come within the timeout of 0.1 s"):
                group.barrier(options).wait()
            told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("from_anybody", [False, True])
def test_who_waits_for_a_message_learns_that_the_group_has_failed(nodes: tuple[int, ...], from_anybody: bool) -> None:
    with process_group(nodes, timeout_s=3600.0) as group:  # which ends no wait of the test
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.5)
        with pytest.raises(RuntimeError, match="all_reduce.* did not come within the timeout of 0.5 s"):
            if RANK == LAST:
                group.allreduce([torch.ones(3)], options).wait()
            else:
                dist.recv(torch.ones(3), None if from_anybody else LAST)
        told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody waits")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_an_interruption_between_the_steps_of_a_call_ends_the_group(
    nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception of a signal handler comes as soon as the ranks have met; what the others wait for never does."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    half_done = f"all_reduce.*: rank {LAST} has left it half done, by KeyboardInterrupt"
    with process_group(nodes):
        if RANK == LAST:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(EngineMoves, "allreduce", interrupted)
                dist.all_reduce(torch.ones(3))
        with pytest.raises(RuntimeError, match=half_done):
            dist.all_reduce(torch.ones(3))
        told(None)


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_monitored_barrier_says_what_gloos_does(nodes: tuple[int, ...], wait_all_ranks: bool) -> None:
    with process_group(nodes):
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        dist.monitored_barrier(dist.new_group(backend="gloo"))
        if RANK != LAST:
            missed = f"Rank{'s' if wait_all_ranks else ''} {LAST} failed to pass monitoredBarrier in 200 ms, of process"
            reached = f"Rank {RANK} successfully reached monitoredBarrier, but .* from rank 0: "
            with pytest.raises(RuntimeError, match=missed if RANK == 0 else f"{reached}.*{missed}"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.2), wait_all_ranks=wait_all_ranks)
        told(None)


@pytest.mark.skipif(SIZE == 1, reason="no other rank fails")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_who_is_about_to_leave_leaves_when_another_rank_fails(nodes: tuple[int, ...]) -> None:
    """Across nodes it waits for the others to leave."""
    with process_group(nodes) as group:
        dist.barrier()
        if RANK == 0:
            time.sleep(0.3)
            group.membership.fail(ArithmeticError("on purpose"))


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_who_is_late_for_long_is_warned_of(
    nodes: tuple[int, ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLITE_STALL_CHECK_TIME_SECONDS", "0.2")
    monkeypatch.setattr(late_watch, "_DECLARED_S", 0.02)
    with process_group(nodes):
        with caplog.at_level(logging.WARNING, logger="hvdlite"):
            work = dist.barrier(async_op=True) if RANK != LAST else None
            while work is not None and "did not come for" not in caplog.text:
                time.sleep(1e-3)
            told(None)
        if work is None:
            dist.barrier()
        else:
            assert f"barrier() of process group 0: rank {LAST} did not come for 0 s" in caplog.text
            work.wait()


@pytest.mark.skipif(SIZE == 1, reason="nobody is late")
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_short_forms_of_calls_have_a_timeout(nodes: tuple[int, ...]) -> None:
    soon = timedelta(seconds=0.1)
    calls = [
        lambda group: group.allreduce(torch.ones(3), dist.ReduceOp.MAX, soon),
        lambda group: group.allreduce([torch.ones(3)], op=dist.ReduceOp.SUM, timeout=soon),
        lambda group: group.reduce(tensor=torch.ones(3), root=LAST, op=dist.ReduceOp.SUM, timeout=soon),
        lambda group: group.broadcast(torch.ones(3), root=LAST, timeout=soon),
        lambda group: group.allgather([torch.ones(3)] * SIZE, torch.ones(3), timeout=soon),
        lambda group: group.barrier(timeout=soon),
    ]
    for call in calls:
        with process_group(nodes) as group:
            if RANK != LAST:
                with pytest.raises(RuntimeError, match=f"rank {LAST} did not come within the timeout of 0.1 s"):
                    call(group).wait()
            told(None)
