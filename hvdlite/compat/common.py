"""`horovod.common.util`, as far as programs and tests use them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TypeVar

from hvdlite import builds, environment

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a binding for the framework: "torch"."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework sees a GPU."""
    if ext_base_name != "torch":
        return False
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    return builds.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    return builds.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    return builds.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    return builds.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    return builds.ccl_built()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Horovod looks here whether its extension for a framework was built; hvdlite has one for all."""


def env(**variables: str | None) -> AbstractContextManager[None]:
    """Set environment variables for a while; those that are None stay as they are."""
    return environment.changed({name: value for name, value in variables.items() if value is not None})


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """``items`` in ``parts`` runs; the first ones are longer by one where it does not divide."""
    each, more = divmod(len(items), parts)
    starts = [part * each + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: object) -> bool:
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True
