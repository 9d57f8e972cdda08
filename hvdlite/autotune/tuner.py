"""Tuner: measures the steps of an optimizer, and changes settings between them on all ranks alike until it has decided.

A sample is some steps with the same settings. The first of them do not count: the gradients have moved, and the order
of operations is frozen anew (coordinator/plan_member.py). Then the ranks agree on the times of the others, the slowest
rank's for each step, so that all decide alike; and `configure` changes the settings between the same two
operations everywhere.

A rank that has joined measures nothing. The others notice when they want to agree, leave everything as it is, and all
take the same sample once more when all are back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hvdlite.autotune.log import TuningLog, Workload
from hvdlite.autotune.search import Search
from hvdlite.autotune.settings import Space
from hvdlite.config import Tunable
from hvdlite.dtypes import ReduceOp, Reduction
from hvdlite.errors import MismatchError
from hvdlite.group import Group
from hvdlite.job_runtime import Runtime
from hvdlite.memory.views import TensorView
from hvdlite.operations.allreduce import allreduce_async
from hvdlite.operations.configure import configure

_LOG = logging.getLogger("hvdlite")
_SETTLING_STEPS = 3  # an order is frozen once it has come three times


class Tuner:
    """Tunes ``group`` by the steps of one optimizer.

    Args:
        move_gradients: makes the optimizer's buckets anew, by ``group.config``.
        clock: in seconds.
    """

    def __init__(
        self,
        group: Group,
        search: Search,
        log: TuningLog,
        move_gradients: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group = group
        self._search = search
        self._log = log
        self._move_gradients = move_gradients
        self._clock = clock
        self._sample_steps = _SETTLING_STEPS + group.config.autotune_steps_per_sample
        self._steps = 0
        self._times: list[float] = []  # of the steps of this sample, in seconds
        self._since_s = 0.0
        self._joins = group.world.joins
        self._lacks_ranks = False

    def after_step(self) -> bool:
        """At the end of every step, when nothing of the optimizer is in flight. Collective.

        Returns:
            Whether it wants to see another step.
        """
        self._steps += 1
        if self._group.world.joins != self._joins:
            self._joins = self._group.world.joins
            self._lacks_ranks = False
            self._times.clear()
        elif self._steps > 1 and not self._lacks_ranks:
            self._times.append(self._clock() - self._since_s)
            if len(self._times) == self._sample_steps:
                self._end_sample()
        self._since_s = self._clock()
        return not self._search.over

    def _end_sample(self) -> None:
        times = np.array(self._times[_SETTLING_STEPS:])
        self._times.clear()
        view = TensorView.of_numpy(times)
        try:
            allreduce_async(
                self._group,
                [view],
                [view],
                Reduction(ReduceOp.MAX),
                name="autotune.step_times",
                needs_all=True,
            ).wait()
        except MismatchError:  # a rank has joined
            self._lacks_ranks = True
            return
        search, measured = self._search, self._search.settings
        verdict = search.record(times.tolist())
        self._log.sample(self._steps, measured, float(np.median(times)), verdict)
        if search.settings != measured:
            configure(self._group, search.settings)
            if search.settings.bucket_bytes != measured.bucket_bytes:
                self._move_gradients()
        if search.over:
            self._log.choice(self._steps, search.settings)
            _say(self._group, logging.INFO, f"after {self._steps} steps: {search.outcome}; {_text(search.settings)}")


def start_tuning(
    runtime: Runtime,
    group: Group,
    number: int,
    gradient_bytes: int,
    bucket_bytes: int,
    bucket_sizes: Callable[[int], tuple[int, ...]],
    move_gradients: Callable[[], None],
) -> Tuner | None:
    """The tuner of an optimizer that is about to plan its buckets; None where nothing is to be measured.

    If there is a choice that fits, `configure` has been called with it. If the user does not get what the
    settings ask for, rank 0's log says why. Collective.

    Args:
        group: on which the optimizer works.
        number: of the optimizer, which counts those on ``group`` from 0.
        gradient_bytes: of all its gradients.
        bucket_bytes: of its buckets, where the settings name none.
        bucket_sizes: bytes of each of its buckets, by bucket_bytes.
    """
    config, choice = group.config, runtime.choice
    if not config.autotune and choice is None:
        return None
    if group is not runtime.group or number > 0:
        is_of_all = group is runtime.group
        if number == int(is_of_all):  # the first of them; it speaks for those after it
            which = "another one" if is_of_all else "one of a process set"
            _say(group, logging.WARNING, f"only the first DistributedOptimizer of all ranks is tuned; this is {which}")
        return None
    workload = Workload(group.size, len(group.world.topology.nodes), gradient_bytes)
    if choice is not None and choice.workload == workload:
        _say(group, logging.INFO, f"loaded from {config.autotune_load}: {_text(choice.settings)}")
        configure(group, choice.settings)
        return None
    if choice is not None:
        text = (
            f"the choice in {config.autotune_load} was made for {choice.workload}; this job has {workload}; not taken"
        )
        _say(group, logging.WARNING, text)
    if not config.autotune:
        return None
    default = Tunable.of(replace(config, bucket_bytes=config.bucket_bytes or bucket_bytes))
    space = Space(default, workload.nodes, group.world.topology.rails, bucket_sizes)
    search = Search(
        space.default,
        space.ladders(),
        space.effect,
        warmup=config.autotune_warmup_samples,
        samples=config.autotune_max_samples,
    )
    log = TuningLog(config.autotune_log if group.rank == 0 else "", workload)
    if search.over:
        _say(group, logging.WARNING, search.outcome)
        log.choice(0, search.settings)
        return None
    return Tuner(group, search, log, move_gradients)


def _say(group: Group, level: int, text: str) -> None:
    if group.rank == 0:
        _LOG.log(level, "autotuning: %s", text)


def _text(settings: Tunable) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings._asdict().items())
