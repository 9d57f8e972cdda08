"""How `TorchState` saves, restores and synchronizes values of types of your own, in Horovod's words."""

from __future__ import annotations

import copy
from typing import Any

from hvdlite.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """Of one value. Register a subclass for the value's type::

        get_handler_registry().append((MyType, MyHandler))

    Models, optimizers, samplers, and what has state_dict and load_state_dict, need none.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state, to which `restore` goes back."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another value takes the place of this one."""
        self.value = value
        self.save()


class LRSchedulerStateHandler(StateHandler):
    """Of whatever has state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(LRSchedulerStateHandler):
    """Of a `torch.nn.Module`."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(LRSchedulerStateHandler):
    """Of a `torch.optim.Optimizer`."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Of an `ElasticSampler`; `save` is collective."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = value.state_dict()

    def save(self) -> None:
        """Keep what any rank has processed."""
        processed = set().union(*allgather_object(self.value.processed_indices))
        self._saved = {**self.value.state_dict(), "processed_indices": processed}

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = []  # of the process, as Horovod's is


def get_handler_registry() -> Registry:
    """Types, and the handlers of their values; the first whose type fits is taken. What is added to it counts."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """For each `TorchState` that is made from here on."""
    global _registry
    _registry = registry


def handlers_of(values: dict[str, Any]) -> dict[str, StateHandler]:
    """A handler for each of ``values`` whose type is registered."""
    found = {}
    for name, value in values.items():
        kind = next((handler for wanted, handler in _registry if isinstance(value, wanted)), None)
        if kind is not None:
            found[name] = kind(value)
    return found
