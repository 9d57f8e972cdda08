"""DistributedOptimizer with op=hvd.Adasum: every rank steps by its own gradients, and the steps are combined.

Adasum is meant for what an optimizer does to parameters, not for gradients, from which it may be far (Adam divides them
by their size): ``p = start + adasum over ranks(p after the rank's own step - start)``. State of the wrapped optimizer,
such as momentum, stays a matter of each rank, and nothing overlaps backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvdlite
from hvdlite.errors import HorovodInternalError
from hvdlite.torch.adasum import check_adasum
from hvdlite.torch.alike import compare_parameters
from hvdlite.torch.allreduce import allreduce, allreduce_, allreduce_async
from hvdlite.torch.handle import Handle
from hvdlite.torch.numerics import GradientCheck
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.reduce_options import Adasum, Max
from hvdlite.torch.same_parameters import check_same_parameters
from hvdlite.torch.state_check import StateCheck
from hvdlite.torch.wrapped_optimizer import WrappedOptimizer, parameters_of

_IN_FLIGHT_BYTES = 64 << 20
"""Parameters whose steps are combined at a time; each needs memory for the steps of all ranks."""


class AdasumOptimizer(WrappedOptimizer):
    """Gradients are not reduced: `synchronize` does nothing, clipping and unscaling concern the rank's own ones, and
    any number of backward passes may come before a step. A copy of all parameters is kept during a step.
    """

    _hvd_numbered: tuple[object, int] = (None, 0)  # (group, number of this optimizer there)

    _hvd_compared: object = None  # the group whose ranks' parameters were compared
    _hvd_numerics: GradientCheck | None = None
    _hvd_state_check: StateCheck | None = None

    def synchronize(self) -> None:
        """Nothing: there is nothing to wait for before step()."""

    def synchronize_pending(self) -> None:
        """Nothing."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Do the step of the wrapped optimizer, combine what it did to the parameters with what it did on other ranks.

        Returns:
            What it returns; this rank's loss where ``closure`` is given, which is called on every rank as often as the
            optimizer there wants.

        Raises:
            HorovodInternalError: steps could not be combined; says why. The parameters concerned are as before.
        """
        if closure is not None:
            kwargs["closure"] = closure
        process_set = self._hvd_arguments["process_set"]
        check_adasum(process_set)
        prefix = self._hvd_prefix()
        if self._hvd_overflowed(prefix):
            return None
        recorder = process_set.group().recorder
        if process_set.size() == 1:
            return self._hvd_step_inside(recorder, kwargs)
        named = parameters_of(self.param_groups, self._hvd_arguments["named_parameters"])
        self._hvd_watch(named, prefix, process_set)
        if self._hvd_numerics is not None:
            self._hvd_numerics.look_at(named)
            self._hvd_numerics.end_step()
        starts = [parameter.detach().clone() for _, parameter in named]
        result = self._hvd_step_inside(recorder, kwargs)
        with torch.no_grad():
            self._hvd_combine(named, starts, prefix)
        if self._hvd_state_check is not None:  # of the parameters: what the optimizer keeps is a matter of each rank
            self._hvd_state_check.after_step(named, None, f"{prefix}.check")
        return result

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True, so that `torch.amp.GradScaler` calls step() also on a rank that had an overflow, and all can agree."""
        return True

    def _hvd_prefix(self) -> str:
        """Of the names of operations; unlike that of any other optimizer."""
        process_set = self._hvd_arguments["process_set"]
        group = process_set.group()
        if self._hvd_numbered[0] is not group:  # or hvdlite was shut down and started again
            self._hvd_numbered = group, group.next_number(group.joins, "optimizer")
        return f"optimizer{self._hvd_numbered[1]}"

    def _hvd_watch(self, named: Sequence[tuple[str, torch.Tensor]], prefix: str, process_set: ProcessSet) -> None:
        """With the first step of a group: compare what ranks begin with, and make the checks that are asked for."""
        group = process_set.group()
        if self._hvd_compared is not group:
            self._hvd_compared = group
            check_same_parameters(named, prefix, group, process_set)
            compare_parameters(named, prefix, group, process_set)
            self._hvd_numerics = GradientCheck.wanted(group.config, hvdlite.runtime().rank)
            self._hvd_state_check = StateCheck.wanted(group, process_set)

    def _hvd_overflowed(self, prefix: str) -> bool:
        """Whether the scaler of any rank found an overflow; otherwise unscales gradients. Collective under a scaler."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        process_set = self._hvd_arguments["process_set"]
        if allreduce(found, name=f"{prefix}.overflow", op=Max, process_set=process_set).item():
            return True
        self._hvd_unscale()
        return False

    def _hvd_combine(
        self, named: Sequence[tuple[str, torch.Tensor]], starts: Sequence[torch.Tensor], prefix: str
    ) -> None:
        """Make each parameter its start and Adasum of the steps of all ranks. Collective."""
        process_set, compression = self._hvd_arguments["process_set"], self._hvd_arguments["compression"]
        changed = torch.tensor(
            [not torch.equal(parameter, start) for (_, parameter), start in zip(named, starts, strict=True)],
            dtype=torch.uint8,
            device="cpu",
        )
        allreduce_(changed, name=f"{prefix}.changed", op=Max, process_set=process_set)
        failure: HorovodInternalError | None = None
        under_way: deque[tuple[torch.Tensor, torch.Tensor, Handle[torch.Tensor], Any]] = deque()
        nbytes = 0

        def finish_oldest() -> None:
            nonlocal failure, nbytes
            parameter, start, handle, context = under_way.popleft()
            nbytes -= start.nbytes
            try:
                parameter.copy_(start + compression.decompress(handle.synchronize(), context))
            except HorovodInternalError as error:  # raised only when nothing of it is in flight any more
                parameter.copy_(start)
                failure = failure or error

        for (name, parameter), start, some_rank_changed_it in zip(named, starts, changed.tolist(), strict=True):
            if not some_rank_changed_it:
                continue
            step, context = compression.compress(parameter.detach() - start)
            handle = allreduce_async(step, name=f"{prefix}.{name}", op=Adasum, process_set=process_set)
            under_way.append((parameter, start, handle, context))
            nbytes += start.nbytes
            while nbytes > _IN_FLIGHT_BYTES:
                finish_oldest()
        while under_way:
            finish_oldest()
        if failure is not None:
            raise failure
