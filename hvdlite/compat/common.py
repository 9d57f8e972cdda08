"""`horovod.common.util`."""

from __future__ import annotations

import functools
import re
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from hvdlite import builds, environment
from hvdlite.errors import HorovodVersionMismatchError

T = TypeVar("T")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


def _cache(f: Callable[..., T]) -> Callable[..., T]:
    """Call ``f`` once for the same arguments, which can be hashed."""
    return functools.wraps(f)(functools.cache(f))


def get_ext_suffix() -> str:
    """Of the file names of extensions."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where the extension ``args`` of the package with the file ``pkg_path`` would be."""
    *directories, name = args
    return str(Path(pkg_path).parent.joinpath(*directories, name + get_ext_suffix()))


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """A function of ``op`` and the deprecated ``average``, either of which may be None: the op that is meant.

    Args:
        reduce_ops: has Average and Sum.
    """

    def chosen(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError("op and average were both given; pass op alone")
        if average is not None:
            warnings.warn("average is deprecated; pass op", DeprecationWarning, stacklevel=2)
            return reduce_ops.Average if average else reduce_ops.Sum
        return reduce_ops.Average if op is None else op

    return chosen


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Warn where another version of a package is installed; or raise, after ``exception``.

    Raises:
        HorovodVersionMismatchError: of two versions, if there is an ``exception``.
    """
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != version:
        text = f"{name}: version {version} runs, but {installed} is installed; install that of the two that you want"
        if exception is not None:
            raise HorovodVersionMismatchError(text) from exception
        warnings.warn(text, stacklevel=2)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether ``ver`` is ``target`` or newer; what comes before a release is older.

    Args:
        target: as "2.1.0".

    Raises:
        ValueError: they are no such versions.
    """
    if not (isinstance(ver, str) and isinstance(target, str) and re.fullmatch(r"\d+\.\d+\.\d+", target)):
        raise ValueError(f"pass two versions, the second as major.minor.patch; got {ver!r} and {target!r}")
    return _ordered(ver) >= _ordered(target)


def _ordered(version: str) -> tuple[list[int], bool]:
    """Of a version like 2.1, 2.1.0rc1 or 2.1.0+cpu: what orders it."""
    found = re.match(r"v?(\d+(?:\.\d+)*)\.?(a|b|rc|dev)?", version)
    if found is None:
        raise ValueError(f"{version!r} is no version")
    numbers = [int(number) for number in found[1].split(".")]
    return numbers + [0] * (4 - len(numbers)), found[2] is None


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
