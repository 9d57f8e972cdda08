"""Steps of DistributedOptimizer that Ctrl-C has ended: what comes after them goes on, or says how to."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from typing import Any

import pytest

import hvdlite.torch as hvd
from hvdlite.errors import UsageError
from scales_lab import Scales, check, needs_two, total, wrap

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


def interrupt_step(optimizer: Any, kind: type[BaseException] = KeyboardInterrupt) -> None:
    """Ctrl-C, or another exception of a signal handler, while this rank waits for others that do not come."""

    def interrupt(*_: object) -> None:
        raise kind

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(kind):
            optimizer.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("groups", "kind"), [(1, KeyboardInterrupt), (2, KeyboardInterrupt), (2, TimeoutError)])
def test_after_a_step_that_was_interrupted(groups: int, kind: type[BaseException]) -> None:
    needs_two()
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum, groups=groups)

    def check_step() -> None:
        model.loss(hvd.rank() + 1).backward()
        optimizer.synchronize()
        check(model, lambda _: total())
        with optimizer.skip_synchronize():
            optimizer.step()

    for _ in range(4):
        check_step()
        optimizer.zero_grad()
    if hvd.rank() == 0:
        model.loss(1.0).backward()
        interrupt_step(optimizer, kind)
        for go_on in (optimizer.zero_grad, model.loss(1.0).backward, optimizer.step):
            with pytest.raises(UsageError, match=r"was interrupted .* hvd\.init\(\) on every rank"):
                go_on()
        hvd.barrier()
    else:
        hvd.barrier()
        model.loss(1.0).backward()
        optimizer.step()
    hvd.barrier()
    with pytest.warns(UserWarning, match="was interrupted") if hvd.rank() == 0 else nullcontext():
        optimizer.zero_grad()
    check_step()


@pytest.mark.parametrize("interrupted", ["step", "backward"])
def test_shutdown_and_init_after_an_interrupt(interrupted: str) -> None:
    needs_two()
    model = Scales()
    optimizer = wrap(model, op=hvd.Sum)
    model.loss(1.0).backward()
    if hvd.rank() == 0 and interrupted == "step":
        interrupt_step(optimizer)
        with pytest.raises(UsageError, match="was interrupted"):
            optimizer.zero_grad()
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(hvd.rank() + 1).backward()
        optimizer.step()
        check(model, lambda _: total())
