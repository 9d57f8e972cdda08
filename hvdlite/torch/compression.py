"""What travels instead of a gradient: the same numbers, or fewer bits of them."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.dtypes import DType
from hvdlite.torch.tensor_view import dtype_of


class Compressor:
    """Subclass it to send something else than the tensor: both methods are called per tensor, on every rank."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What to reduce instead of ``tensor``, and whatever `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor that the reduced ``tensor`` stands for."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """The tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating point tensors as float16; other tensors as they are."""

    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Floating point tensors as bfloat16, which keeps float32's range; other tensors as they are."""

    dtype = torch.bfloat16


class Compression:
    """The values of every ``compression`` argument; a user's `Compressor` does as well."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


AnyCompressor = type[Compressor] | Compressor


def check_compression(compression: AnyCompressor) -> AnyCompressor:
    """Raises:
    ValueError: it cannot compress.
    """
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise ValueError(
            f"compression is {compression!r}; pass hvd.Compression.none, fp16 or bf16, or a hvd.Compressor of your own"
        )
    return compression


def wire_dtype(compression: AnyCompressor) -> DType | None:
    """The type to which the runtime casts on the way, in the pass over memory that packs; None where it casts nothing.

    Only of our own classes: a subclass may have changed what its methods do.
    """
    return dtype_of(compression.dtype) if compression in (FP16Compressor, BF16Compressor) else None


def is_custom(compression: AnyCompressor) -> bool:
    """Whether its methods must be called, because the runtime does not know what they do."""
    return compression not in (NoneCompressor, FP16Compressor, BF16Compressor)
