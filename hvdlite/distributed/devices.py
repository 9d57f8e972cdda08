"""Tensors of which other backends were put in charge: what ``"cpu:hvdlite,cuda:nccl"`` names for them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d


class OtherDevices:
    """The process groups of torch's own kind that have the tensors of other devices; each is made by its first call."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._groups: dict[str, Any] = {}

    def group_of(self, device: torch.device, group: dist.ProcessGroup) -> Any:
        """What ``group`` was told to use for ``device``; None: itself, as always for the CPU.

        Raises:
            ValueError: nothing, and it cannot use itself.
        """
        if device.type == "cpu":
            return None
        if device.type not in self._groups:
            name = self._backend_name(device, group)
            self._groups[device.type] = None if name is None else self._made(device, name)
        return self._groups[device.type]

    def _backend_name(self, device: torch.device, group: dist.ProcessGroup) -> str | None:
        config = c10d._world.pg_backend_config.get(group, "")
        named = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
        name = named.get(device.type, "hvdlite")
        if name != "hvdlite":
            return name
        if device.type != "cuda":
            raise ValueError(
                f"process group hvdlite: the tensor is on {device}, and hvdlite has those of the host and of CUDA "
                f'GPUs. Name a backend for it, as in init_process_group("cpu:hvdlite,{device.type}:...")'
            )
        return None

    def _made(self, device: torch.device, name: str) -> Any:
        store = PrefixStore(f"hvdlite/{device.type}", self._store)
        if name == "nccl":
            options: Any = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            backend = c10d.ProcessGroupNCCL(store, self._rank, self._size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
        else:
            plugin = dist.Backend._plugins[name.upper()]
            kind = dist.ProcessGroup.BackendType.CUSTOM
            if plugin.extended_api:
                options = _DistributedBackendOptions()
                options.store, options.group_rank, options.group_size = store, self._rank, self._size
                options.timeout, options.group_id, options.global_ranks_in_group = self._timeout, name, []
                backend = plugin.creator_fn(options, None)
            else:
                backend = plugin.creator_fn(store, self._rank, self._size, self._timeout)
        if hasattr(dist.ProcessGroup, "_set_default_backend"):
            group = dist.ProcessGroup(store, self._rank, self._size)
            group._set_default_backend(kind)
        else:  # torch 2.4
            of_group: Any = dist.ProcessGroup
            group = of_group(store, self._rank, self._size, of_group.Options(backend=name))
        group._register_backend(device, kind, backend)
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        """Of those that there are, and will be."""
        self._timeout = timeout
        for device_type, group in self._groups.items():
            if group is not None:
                group._get_backend(torch.device(device_type))._set_default_timeout(timeout)

    def close(self) -> None:
        """End those that there are."""
        for group in self._groups.values():
            if group is not None:
                group.shutdown()
        self._groups.clear()
