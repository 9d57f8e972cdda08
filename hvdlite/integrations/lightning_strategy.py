"""The strategy for Lightning's Trainer, for both names that its library has; see `hvdlite.integrations.lightning`.

Their base classes are the same text in two packages, but not the same classes. So these are written without a base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

import hvdlite.torch as hvd
from hvdlite.integrations.steps import broadcast_model, make_distributed, no_sync, synchronize_pending

if TYPE_CHECKING:
    Base = Any  # has what the two base classes have
else:
    Base = object

_OPS = {"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


class Environment(Base):
    """A ClusterEnvironment: ranks are hvdlite's, started by hvdliterun or mpirun."""

    creates_processes_externally = True
    main_address = "127.0.0.1"  # nobody connects to it: hvdlite has its own links
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return hvd.is_initialized()

    def world_size(self) -> int:
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()


class Strategy(Base):
    """A ParallelStrategy in which every rank trains on its part of the data and gradients are averaged.

    Calls hvd.init(). The model starts with rank 0's parameters and buffers. Gradients are reduced while backward runs,
    and complete when it ends: hooks, logging and clipping see the average.

    Args:
        checkpoint_io, precision_plugin: as for Lightning's strategies.
        options: of `hvdlite.torch.DistributedOptimizer`, for example ``compression=hvd.Compression.fp16``. An optimizer
            that configure_optimizers() has wrapped itself keeps its own. For accumulation, accumulate_grad_batches of
            the Trainer takes the place of backward_passes_per_step.
    """

    strategy_name = "hvdlite"
    is_distributed = True  # the Trainer then puts a DistributedSampler into every DataLoader
    environment: Callable[[], Any]
    optimizers: Any

    def __init__(self, *, checkpoint_io: Any = None, precision_plugin: Any = None, **options: Any) -> None:
        if options.get("backward_passes_per_step", 1) != 1:
            raise ValueError("leave out backward_passes_per_step; pass accumulate_grad_batches to the Trainer")
        hvd.init()
        super().__init__(
            cluster_environment=type(self).environment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = options

    # Who and where.

    def set_world_ranks(self) -> None:
        """Called by the Trainer, once it knows its strategy."""
        rank_zero_only.rank = hvd.rank()

    @property
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices
        return devices[hvd.local_rank() % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    # The model and its optimizers.

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        layer_sync = self._layer_sync
        if layer_sync is not None and self.lightning_module.trainer.state.fn == "fit":
            # Trainer(sync_batchnorm=True) has a plugin that needs torch.distributed; people may bring another.
            is_torchs = type(layer_sync).__name__ == "TorchSyncBatchNorm"
            model = hvd.convert_sync_batchnorm(model) if is_torchs else layer_sync.apply(model)
        broadcast_model(model)
        for module in model.modules():
            if hasattr(module, "distributed_available_fn") and getattr(module, "dist_sync_fn", self) is None:
                module.dist_sync_fn = gather_metric_state  # type: ignore[assignment]
                module.distributed_available_fn = ranks_are_several  # type: ignore[assignment]
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.optimizers = [
            make_distributed(optimizer, [self.lightning_module], **self._options) for optimizer in self.optimizers
        ]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with no_sync(self.optimizers):
            yield

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        precision, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        loss: torch.Tensor = precision.pre_backward(closure_loss, module)
        precision.backward(loss, module, optimizer, *args, **kwargs)
        synchronize_pending(self.optimizers)  # before on_after_backward(), where people look at gradients
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: torch.nn.Module | None = None, **kwargs: Any
    ) -> Any:
        def synchronized_closure() -> Any:
            loss = closure()
            optimizer.synchronize()  # where there was no backward pass on this rank
            return loss

        return super().optimizer_step(optimizer, synchronized_closure, model, **kwargs)

    # Collectives of the Trainer and of LightningModule.

    def barrier(self, name: str | None = None) -> None:
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvd.broadcast_object(obj, root_rank=src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` reduced over all ranks, or over ``group``, a `hvdlite.torch.ProcessSet`.

        Raises:
            ValueError: ``reduce_op`` is none of mean, sum, min, max and product.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else getattr(reduce_op, "name", str(reduce_op)).lower()
        if name not in _OPS:
            raise ValueError(f"reduce_op is {reduce_op!r}; pass one of {', '.join(_OPS)}")
        return hvd.allreduce(tensor.detach(), op=_OPS[name], process_set=process_set_of(group))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """(ranks, ...): ``tensor`` of every rank; one rank alone gets its own back, as Lightning has it.

        Args:
            sync_grads: differentiable; its gradient is the sum over the ranks.
        """
        process_set = process_set_of(group)
        ranks = process_set.size()
        if ranks == 1:
            return tensor
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            own = tensor.unsqueeze(0)
            if own.requires_grad:
                # hvd's is the average.
                own.register_hook(lambda gradient: gradient * ranks)  # type: ignore[no-untyped-call]
            return hvd.allgather(own, process_set=process_set)


def process_set_of(group: Any) -> hvd.ProcessSet:
    """Lightning passes torch.distributed's WORLD, which is None here, or what its caller passed."""
    return group if isinstance(group, hvd.ProcessSet) else hvd.global_process_set


# For torchmetrics, which finds torch.distributed by itself, but nothing else. Functions, so that metrics pickle.


def ranks_are_several() -> bool:
    return hvd.is_initialized() and hvd.size() > 1


def gather_metric_state(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """``state`` of every rank; shapes may differ."""
    states = hvd.allgather_object(state, process_set=process_set_of(group))
    return [other.to(state.device) for other in states]
