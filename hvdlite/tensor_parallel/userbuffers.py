"""Tensor parallelism by the name that users of TransformerEngine know."""

from __future__ import annotations

import logging

import torch

import hvdlite
from hvdlite.tensor_parallel.grid import Grid, init
from hvdlite.tensor_parallel.methods import Methods

_LOG = logging.getLogger("hvdlite")


def initialize_userbuffers(
    shape: tuple[int, ...],
    tp_size: int,
    dtype: torch.dtype = torch.bfloat16,
    methods: Methods | None = None,
    *,
    device: torch.device | str = "cpu",
    bootstrap_backend: str = "mpi",
) -> Grid:
    """`init`, and windows for activations of ``shape`` made ahead; all ranks call it, after hvd.init().

    Args:
        shape: (rows, columns) of the largest activation between split layers, of all rows.
        methods: see `Team`; None is "auto".
        device: where activations are; "cuda" is the current GPU.
        bootstrap_backend: not needed; ranks have found one another in hvd.init().

    Raises:
        ValueError, UsageError: as `init`.
    """
    if bootstrap_backend != "mpi" and hvdlite.rank() == 0:
        _LOG.warning(
            "tensor parallelism: bootstrap_backend=%r is not used; ranks have found one another in hvd.init()",
            bootstrap_backend,
        )
    grid = init(tp_size, "auto" if methods is None else methods)
    grid.tp.reserve(shape, dtype, device)
    return grid
