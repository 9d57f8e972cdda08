"""What a training function must not lose: State and its forms, with commit, restore and sync."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.errors import HostsUpdatedInterrupt
from hvdlite.torch.allreduce import allreduce
from hvdlite.torch.elastic.handlers import handlers_of
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.process_set import global_process_set
from hvdlite.torch.reduce_options import Max

ROOT = 0  # the rank whose state all get
HOSTS_REMOVED, HOSTS_ADDED = 1, 2  # bits of what `State.on_hosts_updated` is told


class State(ABC):
    """What `elastic.run` needs of its first argument. All methods but `save` and `restore` are for all ranks alike."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self._updates = 0
        self._updates_lock = threading.Lock()

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory, to which `restore` goes back."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last `save`."""

    def abandon(self) -> None:
        """Forget what was on its way when a collective failed. Called by `elastic.run`, before `restore`."""

    @abstractmethod
    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it."""

    def commit(self) -> None:
        """Save on all ranks, or on none if one of them does not come; then as `check_host_updates`.

        Costs a copy of the state and a small allreduce: where batches are short, not after each of them.
        """
        updates = self._updates_of_all()
        self.save()
        _interrupt_after(updates)

    def check_host_updates(self) -> None:
        """Whether hosts have changed since the last call, on any rank.

        Raises:
            HostsUpdatedInterrupt: on every rank, if they have.
        """
        _interrupt_after(self._updates_of_all())

    def _updates_of_all(self) -> tuple[int, int]:
        """(whether hosts were removed, whether hosts were added), as far as any rank has heard."""
        with self._updates_lock:
            mine, self._updates = self._updates, 0
        flags = torch.tensor([mine & HOSTS_REMOVED, mine & HOSTS_ADDED], device="cpu")
        removed, added = allreduce(flags, op=Max, name="elastic.updates").tolist()
        return removed, added

    def on_hosts_updated(self, timestamp: float, update_result: int) -> None:
        """For whoever watches the hosts, from any thread: the next `check_host_updates` tells all ranks.

        Args:
            timestamp: when; not used.
            update_result: 1 if hosts were removed, 2 if hosts were added, 3 if both.
        """
        with self._updates_lock:
            self._updates |= update_result

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these, in this order, before the training function starts over: to adapt the learning rate to size()."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `elastic.run` before the training function starts over."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Adapt to the ranks there are now. Nothing, unless a subclass has something to do."""


def _interrupt_after(updates: tuple[int, int]) -> None:
    removed, added = updates
    if removed or added:
        raise HostsUpdatedInterrupt(skip_sync=not added)


@dataclass(frozen=True)
class _Copy:
    """A value as it was: ``content`` itself, or what ``owner`` (a scheduler, for example) is to load."""

    owner: Any
    content: Any

    @classmethod
    def of(cls, value: Any) -> _Copy:
        if _has_state_dict(value):
            return cls(value, copy.deepcopy(value.state_dict()))
        return cls(None, copy.deepcopy(value))

    def restored(self) -> Any:
        content = copy.deepcopy(self.content)  # some keep what they load, and change it
        if self.owner is None:
            return content
        self.owner.load_state_dict(content)
        return self.owner


class ObjectState(State):
    """The keyword arguments, as attributes that commit, restore and sync together.

    Objects with state_dict and load_state_dict are saved and loaded by these, all others are copied and pickled.

    Raises:
        ValueError: a name is that of a method.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            if hasattr(self, name):
                raise ValueError(f"{type(self).__name__} has a {name} of its own; choose another name for this value")
            setattr(self, name, value)
        self._names = tuple(values)
        self.save()

    def save(self) -> None:
        self._saved = {name: _Copy.of(value) for name, value in self._values().items()}

    def restore(self) -> None:
        for name, saved in self._saved.items():
            setattr(self, name, saved.restored())

    def sync(self) -> None:
        self._sync_objects(self._values())
        self.save()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _sync_objects(self, values: dict[str, Any]) -> None:
        if not values:
            return
        contents = {name: value.state_dict() if _has_state_dict(value) else value for name, value in values.items()}
        received = broadcast_object(contents, ROOT, name="elastic.sync")
        if global_process_set.rank() == ROOT:
            return
        for name, value in values.items():
            if _has_state_dict(value):
                value.load_state_dict(received[name])
            else:
                setattr(self, name, received[name])


class TorchState(ObjectState):
    """A model, its optimizer, and whatever else a training function must not lose, by keyword.

    Models, optimizers and samplers may come by any name, several of them; a sampler's ranks are united by `sync`::

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, batch=0)

    Args:
        model: as ``state.model``; its state_dict is saved.
        optimizer: as ``state.optimizer``; wrapped or not.
        values: see `ObjectState`; of types of your own as a `StateHandler` says that is registered for them.
    """

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        self._handlers = handlers_of({"model": model, "optimizer": optimizer, **values})
        super().__init__(model=model, optimizer=optimizer, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = vars(self).get("_handlers", {}).get(name)
        if handler is not None and handler.value is not value:
            handler.set_value(value)
        super().__setattr__(name, value)

    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in super()._values().items() if name not in self._handlers}

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def abandon(self) -> None:
        for value in self._values().values():
            if isinstance(value, DistributedOptimizer):
                value._hvd_abandon()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        others = {}
        samplers = {}
        for name, value in self._values().items():
            if isinstance(value, torch.nn.Module):
                _sync_module(value)
            elif isinstance(value, torch.optim.Optimizer) and not isinstance(value, torch.optim.LBFGS):
                broadcast_optimizer_state(value, ROOT)
            elif isinstance(value, ElasticSampler):
                samplers[name] = value
            else:
                others[name] = value
        _unite(samplers)
        self._sync_objects(others)
        self.save()

    def reset(self) -> None:
        _unite({name: value for name, value in self._values().items() if isinstance(value, ElasticSampler)})


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _sync_module(module: torch.nn.Module) -> None:
    state = module.state_dict()
    broadcast_parameters({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, ROOT)
    extra = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    if extra:  # of modules with get_extra_state()
        state.update(broadcast_object(extra, ROOT, name="elastic.extra_state"))
        module.load_state_dict(state)


def _unite(samplers: dict[str, ElasticSampler]) -> None:
    """Each sampler goes on in rank 0's epoch, without what any rank has processed of it."""
    if not samplers:
        return
    everywhere = allgather_object(
        {name: sampler.state_dict() for name, sampler in samplers.items()}, "elastic.samplers"
    )
    for name, sampler in samplers.items():
        states = [state[name] for state in everywhere]
        epoch = states[ROOT]["epoch"]
        processed = set().union(*(state["processed_indices"] for state in states if state["epoch"] == epoch))
        sampler.load_state_dict({"epoch": epoch, "processed_indices": processed})
