"""Arrays of NumPy, CuPy and others where operations take tensors: in the same memory, with results of the same kind."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.compiler import disable, is_dynamo_compiling

from hvdlite.coordinator.request import title_of
from hvdlite.torch import device
from hvdlite.torch.eager import eager
from hvdlite.torch.handle import Handle

P = ParamSpec("P")
R = TypeVar("R")


def takes_arrays(*, in_place: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """An operation whose first argument is a tensor, for arrays as well.

    An array is what exports its memory by ``__dlpack__`` or ``__cuda_array_interface__``. Nothing is copied that
    would not be of a tensor.

    Args:
        in_place: the operation overwrites its argument, and returns it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        operation: Callable[..., Any] = function

        @wraps(function)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # as `eager`, without another call
                return disable(call)(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
            if isinstance(tensor, torch.Tensor) or not _is_array(tensor):
                return operation(tensor, *args, **kwargs)
            imported = _Imported(tensor, partial(_label, operation, tensor, args, kwargs), in_place)
            return _mapped(operation(imported.tensor, *args, **kwargs), imported.exported)

        return call  # type: ignore[return-value]

    return decorate


def takes_groups_of_arrays(*, in_place: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As `takes_arrays`, of an operation whose first argument is an iterable of tensors, or of arrays, or of both."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        operation: Callable[..., Any] = function

        @eager
        @wraps(function)
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors)  # what is a generator can be read once
            if not any(map(_is_array, tensors)):
                return operation(tensors, *args, **kwargs)
            label = partial(_label, operation, tensors, args, kwargs)
            imported = [_Imported(tensor, label, in_place) if _is_array(tensor) else None for tensor in tensors]
            given = [tensor if one is None else one.tensor for tensor, one in zip(tensors, imported, strict=True)]

            def exported(results: Sequence[torch.Tensor]) -> list[Any]:
                return [
                    result if one is None else one.exported(result)
                    for result, one in zip(results, imported, strict=True)
                ]

            return _mapped(operation(given, *args, **kwargs), exported)

        return call  # type: ignore[return-value]

    return decorate


class _Imported:
    """An array of the user as a tensor in the same memory.

    Args:
        label: names the operation, for errors.

    Attributes:
        tensor: after what the array's stream does to it, on the current stream of torch.
    """

    def __init__(self, array: Any, label: Callable[[], str], in_place: bool) -> None:
        self._array = array
        self._label = label
        self._in_place = in_place
        try:
            self.tensor = _tensor(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{label()}: torch cannot see this {_kind(array)}: {error}") from error
        if in_place and _is_read_only(array):
            raise ValueError(f"{label()}: the {_kind(array)} is read-only; pass a copy of it")
        if not isinstance(array, np.ndarray) and (hasattr(array, "__dlpack__") or not in_place):
            self._namespace()  # which raises before anything is sent

    def exported(self, result: Any) -> Any:
        """``result``, a tensor or several, as arrays of the kind that was given; this array itself in place."""
        if isinstance(result, tuple):
            return tuple([self.exported(part) for part in result])
        if self._in_place:
            self._let_follow(result)
            return self._array
        if isinstance(self._array, np.ndarray) or result.device != self.tensor.device:
            return result.numpy()
        return self._namespace().from_dlpack(result)

    def _let_follow(self, result: torch.Tensor) -> None:
        """Have the array's stream wait for what torch's current stream made of it, as its library will not know."""
        if isinstance(self._array, np.ndarray):
            return
        if hasattr(self._array, "__dlpack__"):
            self._namespace().from_dlpack(result)  # whose import waits; the array that it makes is not needed
        else:
            device.gpus.let_follow(_stream(self._array), result)

    def _namespace(self) -> Any:
        """The module that makes arrays of this kind."""
        if hasattr(self._array, "__array_namespace__"):
            module = self._array.__array_namespace__()
        else:
            module = sys.modules[type(self._array).__module__.partition(".")[0]]
        if not hasattr(module, "from_dlpack"):
            raise ValueError(
                f"{self._label()}: {module.__name__} has no from_dlpack to make a result; operate in place"
            )
        return module


def _is_array(value: object) -> bool:
    """Whether ``value`` is an array, and no tensor."""
    return not isinstance(value, torch.Tensor) and (
        hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    )


def _tensor(array: Any) -> torch.Tensor:
    if isinstance(array, np.ndarray):
        if array.flags.writeable:
            return torch.from_numpy(array)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will only be read
            return torch.from_numpy(array)
    if hasattr(array, "__dlpack__"):
        tensor: torch.Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
        return tensor
    return device.gpus.tensor_of(array, _stream(array))


def _stream(array: Any) -> int | None:
    """On which an array with ``__cuda_array_interface__`` is made; None where it is there already."""
    stream: int | None = array.__cuda_array_interface__.get("stream")
    return stream


def _is_read_only(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return not array.flags.writeable
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface is not None and bool(interface["data"][1])


def _mapped(result: Any, exported: Callable[[Any], Any]) -> Any:
    return result.map(exported) if isinstance(result, Handle) else exported(result)


def _label(operation: Callable[..., Any], tensor: object, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """For errors."""
    name = inspect.signature(operation).bind(tensor, *args, **kwargs).arguments.get("name")
    return title_of(operation.__name__, name)


def _kind(array: object) -> str:
    return f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"
