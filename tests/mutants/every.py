"""All mutants."""

from __future__ import annotations

import on_coordinator
import on_device_groups
import on_gpus
import on_gradients
import on_host
import on_kernels
import on_nccl
import on_repeated
import on_windows

MUTANTS = [
    *on_coordinator.MUTANTS,
    *on_host.MUTANTS,
    *on_gradients.MUTANTS,
    *on_repeated.MUTANTS,
    *on_nccl.MUTANTS,
    *on_gpus.MUTANTS,
    *on_windows.MUTANTS,
    *on_kernels.MUTANTS,
    *on_device_groups.MUTANTS,
]
