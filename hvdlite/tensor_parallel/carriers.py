"""What moves the rows of a team in one world: for tensors of the host, and for those of GPUs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch

from hvdlite.config import answers
from hvdlite.errors import UsageError
from hvdlite.group import Group
from hvdlite.rank_list import rank_list
from hvdlite.tensor_parallel.alone import LoneCarrier
from hvdlite.tensor_parallel.carrier import Carrier
from hvdlite.tensor_parallel.chosen import ChosenCarrier
from hvdlite.tensor_parallel.device import DeviceCarrier
from hvdlite.tensor_parallel.device_windows import DeviceWindows
from hvdlite.tensor_parallel.meeting import LoneMeeting, Meeting
from hvdlite.tensor_parallel.methods import NEED_ONE_NODE, Method, on_gpus, on_host
from hvdlite.tensor_parallel.multicast_trial import why_not_to_use
from hvdlite.tensor_parallel.shared_meeting import SharedMeeting
from hvdlite.tensor_parallel.tuning import Tuner
from hvdlite.tensor_parallel.unfused import OperationMeeting, UnfusedCarrier
from hvdlite.tensor_parallel.window import PairCarrier, WindowCarrier
from hvdlite.torch.device import Now
from hvdlite.torch.process_set import ProcessSet

_LOG = logging.getLogger("hvdlite")
_BY_COPIES = (Method.RING_EXCHANGE, Method.PIPELINE, Method.BULK)


class Carriers:
    """Of ``process_set``, as ``group`` is in this world. Collective to build.

    Args:
        methods: by function, as `methods.parse` returns them; the same on every rank.

    Attributes:
        meeting: of the ranks, before each exchange.

    Raises:
        UsageError: a method needs all ranks on one node, and they are on several.
    """

    def __init__(self, process_set: ProcessSet, group: Group, methods: Mapping[str, Method]) -> None:
        check_nodes(group, methods)
        self.group = group
        self._methods = methods
        self._name = f"tensor_parallel{group.next_number(group.joins, 'tensor_parallel')}"
        if group.world.topology.rank == 0:
            for answer in answers():
                _LOG.warning("%s", answer)
        self._on_host: Carrier
        self._on_gpus: Carrier | None = None
        self.meeting: Meeting
        if group.size == 1:
            self.meeting = LoneMeeting(group.ranks, group.rank)
            self._on_host = self._on_gpus = LoneCarrier(self.meeting)
            return
        if len(group.world.topology.nodes) == 1:
            self.meeting = meeting = SharedMeeting(group, f"{self._name}.page")
            self._unfused = UnfusedCarrier(meeting, process_set, self._name)
            window = WindowCarrier(meeting, self._name)
            options: dict[Method, Carrier] = {Method.WINDOW: window, Method.UNFUSED: self._unfused}
            if group.size == 2:
                options[Method.RING_EXCHANGE] = PairCarrier(window)
            self._tuner = Tuner(meeting, group.config.ub_tuning_file)
            # What two ranks do by RING_EXCHANGE, two matmuls for one, has never been the fastest.
            tried = [Method.WINDOW, Method.UNFUSED]
            translate = partial(on_host, size=group.size)
            self._on_host = ChosenCarrier(meeting, options, methods, translate, self._tuner, tried)
            return
        self.meeting = OperationMeeting(process_set, f"{self._name}.cards")
        self._on_host = self._on_gpus = UnfusedCarrier(self.meeting, process_set, self._name)
        if Method.AUTO in methods.values():
            self._say(
                f"{_whereabouts(group)} and cannot map each other's memory: they go by hvdlite's operations, unfused. "
                "A tp_size that divides the ranks of a node is faster"
            )

    def carrier_for(self, tensor: torch.Tensor) -> Carrier:
        """Of exchanges of what is on the same kind of device as ``tensor``; the first for GPUs is collective."""
        if tensor.is_cpu:
            return self._on_host
        if self._on_gpus is None:
            assert isinstance(self.meeting, SharedMeeting)
            self._on_gpus = self._build_on_gpus(self.meeting, tensor)
        return self._on_gpus

    def _build_on_gpus(self, meeting: SharedMeeting, tensor: torch.Tensor) -> Carrier:
        where = Now().on_device(tensor)
        assert where is not None
        meeting.meet("the first exchange on GPUs")
        windows = DeviceWindows.build(meeting, where, f"{self._name}.gpus")
        gpus = f"tensor parallelism: the GPUs of ranks {list(meeting.ranks)}"
        if isinstance(windows, str):
            self._say(
                f"{gpus} do not reach one another's memory: they go by hvdlite's operations, unfused, which here is "
                f"{windows}"
            )
            return self._unfused
        options: dict[Method, Carrier] = {method: DeviceCarrier(meeting, windows, method) for method in _BY_COPIES}
        if not windows.no_multicast:
            multicast = DeviceCarrier(meeting, windows, Method.MULTICAST)
            why_not = why_not_to_use(multicast, where.ordinal)
            if why_not:
                windows.give_up_multicast(why_not)
            else:
                options[Method.MULTICAST] = multicast
                self._say(f"{gpus} exchange rows by multicast or by copies", logging.INFO)
        else:
            is_wanted = Method.MULTICAST in self._methods.values()
            self._say(
                f"{gpus} exchange rows by copies, not by multicast: {windows.no_multicast}",
                logging.WARNING if is_wanted else logging.INFO,
            )
        options[Method.UNFUSED] = self._unfused
        translate = partial(on_gpus, has_multicast=Method.MULTICAST in options)
        return ChosenCarrier(meeting, options, self._methods, translate, self._tuner)

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if self.group.rank == 0:
            _LOG.log(level, "%s", text)


def check_nodes(group: Group, methods: Mapping[str, Method]) -> None:
    """Raise UsageError where one of ``methods`` needs the ranks of ``group`` on one node, and they are on several."""
    needing = sorted(method.value for method in NEED_ONE_NODE & set(methods.values()))
    if needing and len(group.world.topology.nodes) > 1:
        raise UsageError(
            f"{_whereabouts(group)}, and method={needing[0]!r} needs them on one; pass method='auto' or a smaller "
            "tp_size"
        )


def _whereabouts(group: Group) -> str:
    nodes = group.world.topology.nodes
    where = ", ".join(f"{rank_list(ranks)} on one" for ranks in nodes)
    return f"tensor parallelism: ranks {list(group.ranks)} are on {len(nodes)} nodes ({where})"
