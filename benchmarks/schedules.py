"""When gradients are ready: a model's buckets, cut as the optimizer cuts them, and times of a synthetic backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

from hvdlite.coordinator.request import TensorSpec
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.memory.layout import Layout
from hvdlite.operations.allreduce import Allreduce

DTYPE = DType.FLOAT32
_FORWARD_SHARE = 1 / 3  # of a step's compute: backward computes two products where forward computes one


@dataclass(frozen=True)
class Bucket:
    """An allreduce of gradients in their home, and when it is ready, in seconds from the begin of the step."""

    request: Allreduce
    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class Schedule:
    """A step: ``buckets`` in the order in which they are ready; ``compute_s`` without any communication."""

    name: str
    compute_s: float
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class _Operation:
    """Part of the forward pass: its work, and the parameters whose gradients are complete after its backward."""

    work: float
    parameters: Sequence[tuple[str, tuple[int, ...]]] = ()


def bucket(name: str, tensors: Sequence[tuple[str, tuple[int, ...]]], ready_s: float, offset_bytes: int = 0) -> Bucket:
    """Of float32 ``tensors``, (name, shape) of each, that live in a fusion buffer from ``offset_bytes`` on."""
    specs = tuple(TensorSpec(tensor, DTYPE, shape) for tensor, shape in tensors)
    request = Allreduce(name, specs, Reduction(ReduceOp.AVERAGE), place=(0, offset_bytes))
    return Bucket(request, Layout.of([prod(shape) for _, shape in tensors], DTYPE, DTYPE).nbytes, ready_s)


def schedule(model: str, bucket_bytes: int) -> Schedule:
    """That of a model in `MODELS`, or of a file: {"compute_ms": x, "buckets": [{"bytes": n, "ready_ms": y}, ...]}."""
    if model in MODELS:
        operations, compute_s = MODELS[model]
        return _cut(model, operations(), compute_s, bucket_bytes)
    content = json.loads(Path(model).read_text())
    buckets = []
    end = 0
    for i, item in enumerate(content["buckets"]):
        tensors = [(f"parameter{i}", (item["bytes"] // DTYPE.itemsize,))]
        buckets.append(bucket(f"bucket{i}", tensors, item["ready_ms"] / 1e3, end))
        end += item["bytes"]
    return Schedule(Path(model).stem, content["compute_ms"] / 1e3, tuple(buckets))


def _cut(name: str, operations: Sequence[_Operation], compute_s: float, bucket_bytes: int) -> Schedule:
    # Brings torch along, for which ranks that only count need not wait.
    from hvdlite.torch.bucketing import assign_buckets

    parameters: list[tuple[str, tuple[int, ...]]] = []
    arrivals: list[float] = []
    backward_s = compute_s * (1 - _FORWARD_SHARE)
    done = list(accumulate(operation.work for operation in reversed(operations)))
    for operation, work in zip(reversed(operations), done, strict=True):
        parameters += operation.parameters
        arrivals += [compute_s - backward_s * (1 - work / done[-1])] * len(operation.parameters)
    nbytes = [prod(shape) * DTYPE.itemsize for _, shape in parameters]
    buckets = []
    end = 0
    for i, members in enumerate(assign_buckets(nbytes, [0] * len(nbytes), range(len(nbytes)), bucket_bytes)):
        made = bucket(f"bucket{i}", [parameters[member] for member in members], arrivals[members[-1]], end)
        buckets.append(made)
        end += made.nbytes
    return Schedule(name, compute_s, tuple(buckets))


def _resnet50() -> list[_Operation]:
    """161 tensors, 25.6 million parameters, on images of 224 x 224 (He et al. 2016, arXiv:1512.03385)."""
    operations: list[_Operation] = []

    def convolution(name: str, inputs: int, outputs: int, kernel: int, extent: int) -> None:
        shape = (outputs, inputs, kernel, kernel)
        operations.append(_Operation(prod(shape) * extent**2, [(f"{name}.weight", shape)]))
        operations.append(_Operation(0, [(f"{name}.bn.weight", (outputs,)), (f"{name}.bn.bias", (outputs,))]))

    convolution("conv1", 3, 64, 7, 112)
    inputs = 64
    for stage, (width, blocks, extent) in enumerate([(64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            convolution(f"{name}.conv1", inputs, width, 1, extent)
            convolution(f"{name}.conv2", width, width, 3, extent)
            convolution(f"{name}.conv3", width, 4 * width, 1, extent)
            if block == 0:
                convolution(f"{name}.downsample", inputs, 4 * width, 1, extent)
            inputs = 4 * width
    operations.append(_Operation(2048 * 1000, [("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]))
    return operations


def _gpt2() -> list[_Operation]:
    """148 tensors, 124 million parameters; embedding and head share theirs, whose gradient comes last."""
    width, vocabulary, context = 768, 50257, 1024
    operations = [_Operation(0, [("wte.weight", (vocabulary, width)), ("wpe.weight", (context, width))])]
    for layer in range(12):
        for name, inputs, outputs in [
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ]:
            linear = f"h.{layer}.{name}"
            if name in ("attn.c_attn", "mlp.c_fc"):
                norm = f"h.{layer}.ln_{1 if name == 'attn.c_attn' else 2}"
                operations.append(_Operation(0, [(f"{norm}.weight", (width,)), (f"{norm}.bias", (width,))]))
            weights = [(f"{linear}.weight", (inputs, outputs)), (f"{linear}.bias", (outputs,))]
            operations.append(_Operation(inputs * outputs, weights))
    operations.append(_Operation(0, [("ln_f.weight", (width,)), ("ln_f.bias", (width,))]))
    operations.append(_Operation(vocabulary * width))
    return operations


MODELS: dict[str, tuple[Callable[[], list[_Operation]], float]] = {"resnet50": (_resnet50, 0.3), "gpt2": (_gpt2, 0.75)}
"""Operations, and seconds of compute per step and rank."""
