"""hvdlite for Hugging Face Accelerate: the same script, with another Accelerator::

accelerator = HvdliteAccelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

started with hvdliterun. Accelerate has no hook for somebody else's communication. So it is told that it is one process
and not distributed, but the rank-th of several: it splits the data and lets rank 0 write, and whatever needs the other
ranks is overridden here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import DistributedType, recursively_apply

import hvdlite.torch as hvd
from hvdlite import environment
from hvdlite.integrations.steps import broadcast_model, make_distributed, no_sync, synchronize_pending

__all__ = ["HvdliteAccelerator", "launcher_hidden", "use_ranks"]

# By these Accelerate sees that it was started by mpirun, and then starts torch.distributed.
_LAUNCHER_VARIABLES = ("LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max}


class HvdliteAccelerator(Accelerator):
    """An Accelerator whose ranks are hvdlite's. Calls hvd.init().

    prepare() gives models the parameters and buffers of rank 0, and wraps optimizers in
    `hvdlite.torch.DistributedOptimizer`, unless they are wrapped already. backward() returns when gradients are
    averaged, so that they can be clipped; inside accumulate() and no_sync() they stay on their rank. Each rank loads
    its own part of an iterable dataset.

    Args:
        options: as for Accelerator.

    Raises:
        RuntimeError: an Accelerator or a PartialState with ranks of its own was made before.
    """

    def __init__(self, **options: Any) -> None:
        use_ranks(cpu=options.get("cpu", False))
        options.setdefault("dataloader_config", DataLoaderConfiguration())
        super().__init__(**options)
        self.share_data()

    def share_data(self) -> None:
        """Have all ranks draw the same order of the data, each its part of it. Collective."""
        config = self.dataloader_config
        config.dispatch_batches = False
        config.use_seedable_sampler = True  # the other one draws from a generator that Accelerate sends to the ranks
        seed = torch.random.initial_seed() if config.data_seed is None else config.data_seed
        config.data_seed = hvd.broadcast_object(seed, root_rank=0)

    # Models, optimizers and gradients.

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        model = super().prepare_model(model, *args, **kwargs)
        broadcast_model(model)
        return model

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = make_distributed(optimizer, self._models)
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def _distributed(self) -> list[hvd.DistributedOptimizer]:
        return [prepared.optimizer for prepared in self._optimizers]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        synchronize_pending(self._distributed())

    @contextmanager
    def no_sync(self, model: Any = None) -> Iterator[None]:
        with no_sync(self._distributed()):
            yield

    # Collectives.

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks along dimension 0, which may differ; a scalar counts as one row."""
        return recursively_apply(hvd.allgather, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` without the samples that fill up the last batch; of objects, one list."""
        if not use_gather_object and _has_only_tensors(input_data):
            return super().gather_for_metrics(input_data)
        gathered = [item for part in hvd.allgather_object(input_data) for item in part]
        state = self.gradient_state
        return gathered[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``tensor`` reduced over all ranks.

        Raises:
            ValueError: ``reduction`` is none of sum, mean, max and none.
        """
        if reduction == "none":
            return tensor
        if reduction not in _OPS:
            raise ValueError(f"reduction is {reduction!r}; pass one of {', '.join(_OPS)}, none")

        def reduced(part: torch.Tensor) -> torch.Tensor:
            return hvd.allreduce(part, op=_OPS[reduction], postscale_factor=scale)

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        def padded(part: torch.Tensor) -> torch.Tensor:
            if not -part.dim() <= dim < part.dim():
                return part
            longest = int(hvd.allreduce(torch.tensor(part.shape[dim], device="cpu"), op=hvd.Max))
            shape = list(part.shape)
            shape[dim] = longest - part.shape[dim]
            padding = part.new_full(shape, pad_index)
            return torch.cat([padding, part] if pad_first else [part, padding], dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)


def use_ranks(*, cpu: bool = False) -> PartialState:
    """Initialize hvdlite, and Accelerate's state with its ranks.

    Raises:
        RuntimeError: that state has other ranks already.
    """
    hvd.init()
    with launcher_hidden():
        state = PartialState(cpu=cpu)
    if state.distributed_type != DistributedType.NO:
        raise RuntimeError(
            f"accelerate was initialized as {state.distributed_type.value} already; make HvdliteAccelerator or "
            "HvdliteTrainingArguments before anything else of accelerate, and leave accelerate launch away"
        )
    state.num_processes = hvd.size()
    state.process_index = hvd.rank()
    state.local_process_index = hvd.local_rank()
    state.wait_for_everyone = hvd.barrier  # also that of all other objects of this class, which share their attributes
    return state


def launcher_hidden() -> AbstractContextManager[None]:
    """Without the variables that make Accelerate start torch.distributed."""
    return environment.changed(dict.fromkeys(_LAUNCHER_VARIABLES))


def _has_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
