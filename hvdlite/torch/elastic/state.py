"""What a training function must not lose: State and its forms, with commit, restore and sync."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import default_runtime
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError
from hvdlite.torch.allgather import allgather
from hvdlite.torch.allreduce import allreduce
from hvdlite.torch.elastic import keeping
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

HOSTS_REMOVED, HOSTS_ADDED = 1, 2  # bits of what `State.on_hosts_updated` is told


class State(ABC):
    """What `elastic.run` needs of its first argument. All methods but `save` and `restore` are for all ranks alike.

    Attributes:
        follows_rank_0: whether `sync` takes the state of rank 0, whichever rank has the newest commit.
    """

    follows_rank_0 = True

    def __init__(self) -> None:
        self._commits = 0
        self._was_shared = False
        self._reset_callbacks: list[Callable[[], object]] = []
        self._updates = 0
        self._updates_lock = threading.Lock()

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory, to which `restore` goes back."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last `save`."""

    def kept(self) -> dict[str, Any] | None:
        """What was saved last, for a keeper outside of this process; None: this state cannot be kept there.

        Nothing in it may change: it is read while training goes on.
        """
        return None

    def take(self, kept: dict[str, Any], commits: int) -> None:
        """Become what `kept` has returned in another process, after ``commits`` commits. Of this rank alone."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Forget what was on its way when hvdlite ended. Called by `elastic.run` once it runs again."""

    @abstractmethod
    def sync(self) -> None:
        """Give every rank the same state, and save it."""

    def share(self) -> None:
        """Tell all ranks what each knows of the same state, where `sync` is left out: as the ranks only got fewer."""

    def commit(self) -> None:
        """Save on all ranks, or on none if one of them does not come; then as `check_host_updates`.

        Costs a copy of the state and a small allreduce: where batches are short, not after each of them.
        """
        updates = self._updates_of_all()
        self.keep()
        _interrupt_after(updates)

    def keep(self) -> None:
        """Save, and let keepers have it, without news; all ranks have left the training function."""
        self.save()
        self._commits += 1  # a rank that has not come so far has no newer commit than the others' last
        keeping.deposit(self, self._commits)

    def check_host_updates(self) -> None:
        """Whether hosts have changed since the last call, on any rank.

        Raises:
            HostsUpdatedInterrupt: on every rank, if they have.
        """
        _interrupt_after(self._updates_of_all())

    def _updates_of_all(self) -> tuple[int, int]:
        """(whether hosts were removed, whether hosts were added), as far as any rank has heard."""
        mine = self._own_updates()
        flags = torch.tensor([mine & HOSTS_REMOVED, mine & HOSTS_ADDED], device="cpu")
        removed, added = allreduce(flags, op=Max, name="elastic.updates").tolist()
        return removed, added

    def _own_updates(self) -> int:
        """What this rank has heard since the last call."""
        with self._updates_lock:
            mine, self._updates = self._updates, 0
        member = default_runtime.membership()
        return mine | keeping.news() | (0 if member is None else member.news())

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
        """Adapt to the ranks there are now, on this rank alone. Nothing, unless a subclass has something to do."""


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

    def kept(self) -> dict[str, Any] | None:
        return {name: saved.content for name, saved in self._saved.items()}

    def take(self, kept: dict[str, Any], commits: int) -> None:
        if kept.keys() != {*self._names}:
            raise UsageError(
                f"what is kept has {sorted(kept)}, this state {sorted(self._names)}: hvd.elastic.run serves one state"
            )
        self._load(kept)
        self.save()
        self._commits = commits

    @property
    def follows_rank_0(self) -> bool:  # type: ignore[override]
        """Whether a subclass synchronizes in a way of its own, which mostly is that of Horovod: rank 0's state."""
        return type(self).sync not in (ObjectState.sync, TorchState.sync)

    def sync(self) -> None:
        self._sync_objects(self._values(), self._find_root().rank)
        self.save()

    def _find_root(self) -> _Root:
        """The first rank with the newest commit, whose state all get. Collective."""
        # Before the first commit, too, ranks that have trained have more than one that is new.
        ages = allgather_object((self._commits, self._was_shared), "elastic.commits")
        root = 0 if self.follows_rank_0 else ages.index(max(ages))
        self._commits, self._was_shared = ages[root][0], True
        return _Root(root, [age == ages[root] for age in ages])

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _sync_objects(self, values: dict[str, Any], root: int) -> None:
        if not values:
            return
        contents = {name: value.state_dict() if _has_state_dict(value) else value for name, value in values.items()}
        received = broadcast_object(contents, root, name="elastic.sync")
        if global_process_set.rank() != root:
            self._load(received)

    def _load(self, contents: dict[str, Any]) -> None:
        """Take over values, or what they are to load."""
        for name, content in contents.items():
            value = getattr(self, name)
            if _has_state_dict(value):
                value.load_state_dict(content)
            else:
                setattr(self, name, content)


class TorchState(ObjectState):
    """A model, its optimizer, and whatever else a training function must not lose, by keyword.

    Models, optimizers and samplers may come by any name, several of them; what ranks have recorded in a sampler is
    united by `commit` and `sync`::

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
        """Go back to the last `save`; between backward and step() once the gradients that are on their way are reduced.

        They belong to what is undone, but other ranks may wait for them.
        """
        for optimizer in self._distributed_optimizers():
            with suppress(HorovodInternalError):  # after a failure nobody waits for them
                optimizer.synchronize_pending()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def kept(self) -> dict[str, Any] | None:
        handled = {
            name: copy.deepcopy(handler.value.state_dict() if _has_state_dict(handler.value) else handler.value)
            for name, handler in self._handlers.items()
        }
        return {**(super().kept() or {}), **handled}

    def abandon(self) -> None:
        for optimizer in self._distributed_optimizers():
            optimizer._hvd_abandon()

    def _distributed_optimizers(self) -> list[DistributedOptimizer]:
        """Those that have a handler of the program's, too."""
        return [value for value in super()._values().values() if isinstance(value, DistributedOptimizer)]

    @property
    def follows_rank_0(self) -> bool:  # type: ignore[override]
        return bool(self._handlers) or super().follows_rank_0  # handlers take rank 0's state

    def sync(self) -> None:
        root = self._find_root()
        for handler in self._handlers.values():
            handler.sync()
        others = {}
        for name, value in self._values().items():
            if isinstance(value, torch.nn.Module):
                _sync_module(value, root.rank)
            elif isinstance(value, torch.optim.Optimizer) and not isinstance(value, torch.optim.LBFGS):
                broadcast_optimizer_state(value, root.rank)
            elif not isinstance(value, ElasticSampler):
                others[name] = value
        _unite(self._samplers(), root)
        self._sync_objects(others, root.rank)
        self.save()

    def share(self) -> None:
        _unite(self._samplers(), self._find_root())

    def _samplers(self) -> dict[str, ElasticSampler]:
        return {name: value for name, value in self._values().items() if isinstance(value, ElasticSampler)}

    def _updates_of_all(self) -> tuple[int, int]:
        """Tells all ranks what each has processed as well, since that would be lost with the rank."""
        samplers = list(self._samplers().values())
        if not samplers:
            return super()._updates_of_all()
        untold = [sampler.take_untold() for sampler in samplers]
        told = allgather(torch.tensor(_encoded(self._own_updates(), untold), device="cpu"), name="elastic.updates")
        updates = 0
        for heard, indices in _decoded(told.tolist(), len(samplers)):
            updates |= heard
            for sampler, processed in zip(samplers, indices, strict=True):
                sampler.hear(processed)
        return updates & HOSTS_REMOVED, updates & HOSTS_ADDED


@dataclass(frozen=True)
class _Root:
    """The rank whose state all get, and which ranks have its commit."""

    rank: int
    agrees: list[bool]


def _encoded(updates: int, lists: list[list[int]]) -> list[int]:
    """What one rank tells: ``updates``, and of each list its length and what is in it."""
    return [updates, *(number for items in lists for number in (len(items), *items))]


def _decoded(numbers: list[int], count: int) -> Iterator[tuple[int, list[list[int]]]]:
    """What every rank has told, one behind the other, of ``count`` lists each."""
    position = 0
    while position < len(numbers):
        updates, lists = numbers[position], []
        position += 1
        for _ in range(count):
            end = position + 1 + numbers[position]
            lists.append(numbers[position + 1 : end])
            position = end
        yield updates, lists


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _sync_module(module: torch.nn.Module, root: int) -> None:
    state = module.state_dict()
    places = {tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    own = {
        name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.data_ptr() in places
    }
    broadcast_parameters(own, root)
    extra = {name: value for name, value in state.items() if name not in own}
    if extra:  # of modules with get_extra_state(), or whose state_dict has copies
        state.update(broadcast_object(extra, root, name="elastic.extra_state"))
        module.load_state_dict(state)


def _unite(samplers: dict[str, ElasticSampler], root: _Root) -> None:
    """Each sampler goes on in the root's epoch, without what any rank that has its commit has processed of it."""
    if not samplers:
        return
    everywhere = allgather_object(
        {name: sampler.state_dict() for name, sampler in samplers.items()}, "elastic.samplers"
    )
    for name, sampler in samplers.items():
        epoch = everywhere[root.rank][name]["epoch"]
        states = [state[name] for state, agrees in zip(everywhere, root.agrees, strict=True) if agrees]
        processed = set().union(*(state["processed_indices"] for state in states if state["epoch"] == epoch))
        sampler.load_state_dict({"epoch": epoch, "processed_indices": processed})
