"""torch's functional collectives into a given tensor, which torch.compile makes of several that it puts together.

For these C++ asks only groups that C++ has made. Here they call torch.distributed's functions, which take all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work, _resolve_process_group


@cache
def take_out_forms() -> None:
    """From here on they are done here."""
    forms: dict[str, Callable[..., torch.Tensor]] = {
        "all_gather_into_tensor_out": _all_gather_into_tensor_out,
        "reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    }
    for name, form in forms.items():
        if hasattr(torch.ops._c10d_functional, name):
            torch.library.impl(f"_c10d_functional::{name}", ("cpu", "cuda"), form)


def _all_gather_into_tensor_out(tensor: torch.Tensor, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
    work = dist.all_gather_into_tensor(out, tensor, _group(group), async_op=True)
    _register_work(out, work)
    return out


def _reduce_scatter_tensor_out(
    tensor: torch.Tensor, op: str, size: int, group: Any, *, out: torch.Tensor
) -> torch.Tensor:
    work = dist.reduce_scatter_tensor(out, tensor, getattr(dist.ReduceOp, op.upper()), _group(group), async_op=True)
    _register_work(out, work)
    return out


def _group(group: Any) -> dist.ProcessGroup:
    """``group`` is one, or the name of one."""
    return group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
