"""Torch tensors as the runtime sees them: address, shape and element type."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from hvdlite.dtypes import DType
from hvdlite.memory.views import TensorView
from hvdlite.torch.device import Now
from hvdlite.torch.differentiated import OUTSIDE_OF_VMAP

_DTYPES: dict[torch.dtype, DType] = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bool: DType.BOOL,
}


def dtype_of(dtype: torch.dtype) -> DType:
    """The runtime's name of ``dtype``.

    Raises:
        ValueError: hvdlite cannot communicate it; says what to pass.
    """
    try:
        return _DTYPES[dtype]
    except KeyError:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        way_out = "pass torch.view_as_real(tensor)" if dtype.is_complex else f"convert the tensor to one of {known}"
        raise ValueError(f"hvdlite cannot communicate {dtype}; {way_out}") from None


def torch_dtype(dtype: DType) -> torch.dtype:
    """What torch calls ``dtype``."""
    found: torch.dtype = getattr(torch, dtype.label)
    return found


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """That of the gradients of ``parameter``, which a program may choose in newer versions of torch."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return chosen or parameter.dtype


def check_parameter(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """``parameter`` itself, where hvdlite can communicate its gradients.

    Raises:
        ValueError: it cannot; says what to make of the parameter.
    """
    what, dtype = f"parameter '{name}'", parameter.dtype
    if dtype in _DTYPES:
        return check_tensor(parameter, what)
    if dtype.is_complex:
        way_out = "make a real one of torch.view_as_real(parameter), and call torch.view_as_complex in forward()"
    else:
        way_out = "keep a wider one, as of bfloat16, and convert it in forward(); or leave it out of the optimizer"
    raise ValueError(f"{what}: hvdlite cannot communicate gradients of {dtype}; {way_out}")


def check_tensor(tensor: object, what: str) -> torch.Tensor:
    """``tensor`` itself, where hvdlite can communicate it: dense, on the CPU or a GPU, of a known element type.

    Raises:
        ValueError: it cannot; the text starts with ``what`` and says how to make one that it can.
    """
    if not isinstance(tensor, torch.Tensor):
        way_out = "; pass torch.as_tensor(it)" if isinstance(tensor, (int, float, list, tuple)) else ""
        raise ValueError(f"{what}: expected a torch.Tensor, got {type(tensor).__name__}{way_out}")
    if tensor.is_nested:
        raise ValueError(f"{what}: the tensor is nested; pass torch.nested.to_padded_tensor(tensor, 0.0)")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what}: the layout is {tensor.layout}; pass tensor.to_dense()")
    if not (tensor.is_cpu or tensor.is_cuda):
        way_out = (
            "give it memory first, as model.to_empty(device='cpu') does" if tensor.is_meta else "pass tensor.cpu()"
        )
        raise ValueError(
            f"{what}: the tensor is on {tensor.device}, hvdlite communicates CPU and CUDA tensors; {way_out}"
        )
    if tensor.dtype not in _DTYPES:
        try:
            dtype_of(tensor.dtype)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    check_memory(tensor, what)
    return tensor


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Raises:
    ValueError: ``tensor`` has elements, but no memory of its own where they are, as a DTensor or a FakeTensor.
    """
    if not has_memory(tensor):
        way_out = "pass a plain tensor of the numbers"
        if hasattr(tensor, "to_local"):  # a DTensor
            way_out = "pass tensor.to_local(); FSDP reduces the gradients of what it shards without hvd"
        elif torch._C._functorch.is_batchedtensor(tensor):
            way_out = OUTSIDE_OF_VMAP
        raise ValueError(f"{what}: a {type(tensor).__name__} without memory of its own; {way_out}")


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie where it says; those of a sparse one do not."""
    try:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return tensor.data_ptr() != 0 or tensor.numel() == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a FakeTensor warns those who want to know
            return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # inside torch.vmap, for example
        return False


def views_of(tensors: Iterable[torch.Tensor], now: Now | None = None) -> list[TensorView]:
    """The views of C-contiguous ``tensors``; they own the memory as it is now, should ``tensor.set_()`` bring another.

    Args:
        now: of all tensors of an operation, of which these are some.
    """
    now = now or Now()
    return [
        TensorView(
            tensor.data_ptr(),
            tuple(tensor.shape),
            _DTYPES[tensor.dtype],
            tensor.untyped_storage(),
            now.on_device(tensor),
        )
        for tensor in tensors
    ]


def view_of(tensor: torch.Tensor) -> TensorView:
    """The view of one."""
    return views_of((tensor,))[0]


def contiguous_block(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """``tensor`` without its history, where it lies contiguously, and as it reads; else a contiguous copy."""
    tensor = check_tensor(tensor, what)
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous().resolve_neg()


def block_to_write(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """`contiguous_block`, whose contents will be `copied_back`.

    Raises:
        ValueError: ``tensor`` is expanded.
    """
    block = contiguous_block(tensor, what)
    if block.data_ptr() != tensor.data_ptr() and is_expanded(tensor):
        raise ValueError(f"{what}: the tensor is expanded, so its elements share places; pass tensor.clone()")
    return block


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` share a place, as of ``tensor.expand()``."""
    return any(not stride and n > 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copied_back(tensors: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` with the contents of ``results``, which may share their memory."""
    for tensor, result in zip(tensors, results, strict=True):
        if result.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(result)
    return tensors
