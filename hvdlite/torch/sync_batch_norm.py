"""hvd.SyncBatchNorm: batch normalization over the batches of all ranks, and its way into a whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvdlite.torch.allreduce import allreduce
from hvdlite.torch.eager import eager
from hvdlite.torch.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.torch.reduce_options import Sum
from hvdlite.torch.start import start_allgather


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, 2d or 3d whose batch is those of all ranks together, which may differ in size.

    Outputs, input gradients and running statistics are those of one process with the whole batch. Gradients of weight
    and bias are this rank's share, as of any other layer. Each training step communicates 2 * num_features + 1 numbers
    in forward, and 2 * num_features in backward unless the input needs no gradient; every rank must take part in both.

    In eval(), and alone, it does what `torch.nn.BatchNorm2d` does and does not communicate: without running statistics
    each rank then normalizes by its own batch. The state_dict is that of `torch.nn.BatchNorm2d`.

    Args:
        num_features: C of inputs of shape (N, C, ...). N may be 0 on some ranks.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None for their plain average.
        affine: whether there are weight and bias.
        track_running_stats: whether eval() normalizes by running statistics.
        process_set: whose batches are one.
        device, dtype: of parameters and buffers.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = check_process_set(process_set)
        self._made = self.process_set.moment()
        self._name = ""  # of the operations; given when all ranks first come to this layer
        self._named_ns = 0  # `made_ns` of the group that has given it

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) expects an input of shape (N, {self.num_features}, ...), "
                f"got {tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input``, (N, C, ...).

        Raises:
            ValueError: the shape does not fit; or, on every rank, all batches together have one value per channel.
            HorovodInternalError: as of any operation.
        """
        if not self.training:
            return super().forward(input)
        return self._train(input)

    @eager
    def _train(self, input: torch.Tensor) -> torch.Tensor:
        if self.process_set.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        made_ns = self.process_set.group().made_ns
        if self._named_ns != made_ns:
            number = self.process_set.next_number(self._made, "batch norm", str(self.num_features))
            self._name, self._named_ns = f"sync_batch_norm{number}", made_ns
        with torch.no_grad():
            own = local_statistics(input).unsqueeze(0).cpu()  # a few numbers per channel travel by way of the CPU
            name = f"{self._name}.forward"
            gathering = start_allgather([own], name, self.process_set, grouped=False, needs_all=False, background=False)
            rows = gathering.synchronize()[0].to(input.device)
            count, wide_mean, wide_variance = combine(rows)
            if count == 1:
                raise ValueError(
                    f"SyncBatchNorm({self.num_features}) in training needs more than one value per channel, and all "
                    f"ranks together have one; this rank's input has the shape {tuple(input.shape)}"
                )
            statistics_dtype = torch.promote_types(input.dtype, torch.float32)
            mean, variance = wide_mean.to(statistics_dtype), wide_variance.to(statistics_dtype)
            self._track(count, wide_mean, wide_variance)
        normalized: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, count, self.eps, f"{self._name}.backward", self.process_set
        )
        return normalized

    def _track(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics, whose variance is the unbiased one."""
        if not self.track_running_stats:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None or count == 0:
            return
        newest = self.momentum
        if newest is None:
            assert self.num_batches_tracked is not None
            newest = 1.0 / int(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            running.copy_((1 - newest) * running.to(value.dtype) + newest * value)


def local_statistics(input: torch.Tensor) -> torch.Tensor:
    """What one rank contributes: (1 + 2C,) fp64, the number of values per channel, their means, their variances.

    They are computed in fp32 of 16-bit and fp32 inputs, as torch does, and travel in fp64, which holds every count.
    """
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    if count == 0:
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    running: list[torch.Tensor | None] = [None, None]
    if input.dtype in (torch.float16, torch.bfloat16):  # torch takes the type of the results from these
        running = [torch.zeros(channels, dtype=torch.float32, device=input.device) for _ in range(2)]
    mean, variance = torch.batch_norm_update_stats(input.detach(), running[0], running[1], 0.0)
    return torch.cat([torch.full((1,), float(count), device=input.device, dtype=torch.float64), mean, variance])


def combine(rows: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The statistics of all values from those of their parts.

    Sums of squares would lose the variance where the mean is large. Squared deviations from the parts' means, and of
    these from the common mean, do not (Chan, Golub & LeVeque 1983, doi:10.1080/00031305.1983.10483115).

    Args:
        rows: (parts, 1 + 2C), each of `local_statistics`.

    Returns:
        (number of values per channel, their mean (C,), their biased variance (C,)).
    """
    counts, means, variances = torch.split(rows, [1, rows.shape[1] // 2, rows.shape[1] // 2], dim=1)
    count = counts.sum()
    shares = counts / count.clamp(min=1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return int(count), mean, variance


class _Normalize(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        eps: float,
        name: str,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias, mean, variance)
        ctx.count, ctx.eps, ctx.name, ctx.process_set = count, eps, name, process_set
        if input.numel() == 0:
            return torch.empty_like(input)
        wide_weight, wide_bias = (None if given is None else given.to(mean.dtype) for given in (weight, bias))
        return torch.nn.functional.batch_norm(input, mean, variance, wide_weight, wide_bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With y the normalized input, g the gradient and averages over the whole batch:

        gradient of the input = weight / sqrt(variance + eps) * (g - average(g) - y * average(g * y)),
        of the weight = sum(g * y), of the bias = sum(g) (Ioffe & Szegedy 2015, arXiv:1502.03167).
        """
        input, weight, bias, mean, variance = ctx.saved_tensors
        dims = [0, *range(2, input.dim())]
        column = (1, -1, *[1] * (input.dim() - 2))
        scale = (variance + ctx.eps).rsqrt()
        normalized = (input - mean.reshape(column)).mul_(scale.reshape(column))
        sums = torch.cat([gradient.sum(dims, dtype=mean.dtype), (gradient * normalized).sum(dims, dtype=mean.dtype)])
        sum_g, sum_gy = sums.chunk(2)

        of_input = None
        if ctx.needs_input_grad[0]:  # then on every rank
            totals = allreduce(sums, op=Sum, name=ctx.name, process_set=ctx.process_set)
            average_g, average_gy = totals.div_(max(ctx.count, 1)).chunk(2)
            if weight is not None:
                scale = scale * weight
            centered = normalized.mul_(-average_gy.reshape(column)).add_(gradient - average_g.reshape(column))
            of_input = centered.mul_(scale.reshape(column)).to(input.dtype)
        of_weight = sum_gy.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sum_g.to(bias.dtype) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None, None, None, None


def convert_sync_batchnorm(module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
    """Make every batch normalization in ``module`` a `SyncBatchNorm`, in place.

    Parameters and buffers stay the same objects, so that an optimizer made before goes on with them. Layers that are a
    `SyncBatchNorm` of hvdlite already stay as they are.

    Returns:
        ``module``, or its successor where it is itself a batch normalization.

    Raises:
        ValueError: a lazy layer does not know its number of features yet.
    """
    return _converted(module, check_process_set(process_set), {})


def _converted(
    module: torch.nn.Module, process_set: ProcessSet, done: dict[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:
    """``done`` keeps a layer that stands at several places one layer."""
    if module not in done:
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            done[module] = _successor(module, process_set)
        else:
            done[module] = module
        for name, child in list(module._modules.items()):  # named_children() leaves out what stands here twice
            if child is not None:
                done[module].add_module(name, _converted(child, process_set, done))
    return done[module]


def _successor(module: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(
            "convert_sync_batchnorm: a lazy layer does not know its number of features yet; run a batch through the "
            "model first"
        )
    successor = SyncBatchNorm(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_set,
        device="meta",
    )
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(successor, name, getattr(module, name))
    return successor.train(module.training)
