"""A tensor subclass without memory of its own, as DTensor is one; which needs torch.distributed to be started."""

from __future__ import annotations

from typing import Any

import torch


class Sharded(torch.Tensor):
    """Shows the shape of ``local``, and holds it."""

    _local: torch.Tensor

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Sharded:
        made = torch.Tensor._make_wrapper_subclass(cls, local.shape, strides=local.stride(), dtype=local.dtype)  # type: ignore[attr-defined]
        made._local = local
        return made  # type: ignore[no-any-return]

    def to_local(self) -> torch.Tensor:
        return self._local

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def local(value: Any) -> Any:
            return value._local if isinstance(value, Sharded) else value

        result = func(*map(local, args), **{name: local(value) for name, value in (kwargs or {}).items()})
        return cls(result) if isinstance(result, torch.Tensor) else result
