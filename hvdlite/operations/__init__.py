"""The operations that there are, one file each, and how they are known on the wire."""

from __future__ import annotations

import json

from hvdlite.coordinator.request import Request
from hvdlite.operations.allgather import Allgather
from hvdlite.operations.allocate import Allocate
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.alltoall import Alltoall
from hvdlite.operations.barrier import Barrier
from hvdlite.operations.broadcast import Broadcast
from hvdlite.operations.configure import Configure
from hvdlite.operations.join import Join
from hvdlite.operations.operation import Operation
from hvdlite.operations.process_sets import AddProcessSet, RemoveProcessSet
from hvdlite.operations.reducescatter import Reducescatter

OPERATIONS: dict[str, type[Operation]] = {
    kind.label: kind
    for kind in (
        Allreduce,
        Allgather,
        Broadcast,
        Reducescatter,
        Alltoall,
        Barrier,
        Join,
        Allocate,
        Configure,
        AddProcessSet,
        RemoveProcessSet,
    )
}


def decode(data: bytes) -> Request:
    """The request of which `Request.encode` made ``data``."""
    label, *content = json.loads(data)
    return OPERATIONS[label].decode(*content)
