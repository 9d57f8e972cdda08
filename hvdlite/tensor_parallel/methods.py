"""The ways in which the ranks of a team exchange rows, by the names that users say."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Method(Enum):
    AUTO = "auto"
    WINDOW = "window"
    RING_EXCHANGE = "ring_exchange"
    PIPELINE = "pipeline"
    BULK = "bulk"
    MULTICAST = "multicast"
    UNFUSED = "unfused"


_NAMES = {method.value: method for method in Method} | {"none": Method.UNFUSED}
NAMES = tuple(_NAMES)

NEED_ONE_NODE = frozenset(Method) - {Method.AUTO, Method.UNFUSED}

FUNCTIONS = ("all_gather_matmul", "matmul_reduce_scatter", "replicated_matmul", "matmul_all_reduce")
"""Those for which a method can be chosen; each with its ``backward of ...``."""

Methods = str | Mapping[str, str]
"""A method for all functions, or for each of some; the others' is "auto"."""


def can_be_chosen(function: str) -> bool:
    return function.removeprefix(backward_of("")) in FUNCTIONS


def parse(methods: Methods) -> dict[str, Method]:
    """By function; "" has that of functions which are not listed.

    Raises:
        ValueError: there is no such method, or no such function.
    """
    if isinstance(methods, str):
        return {"": _method(methods)}
    known = [name for function in FUNCTIONS for name in (function, backward_of(function))]
    for function in methods:
        if function not in known:
            raise ValueError(f"there is no {function!r}; methods can be chosen for {', '.join(known)}")
    return {"": Method.AUTO} | {function: _method(name) for function, name in methods.items()}


def backward_of(function: str) -> str:
    return f"backward of {function}"


def method_for(function: str, methods: Mapping[str, Method]) -> Method:
    """Backward goes as forward where nothing else is said."""
    forward = function.removeprefix(backward_of(""))
    return next(methods[name] for name in (function, forward, "") if name in methods)


def _method(name: str) -> Method:
    if name not in _NAMES:
        raise ValueError(f"method is {name!r}; pass one of {', '.join(map(repr, NAMES))}")
    return _NAMES[name]


def on_host(method: Method, size: int) -> Method:
    """What ``method`` is in memory of the host, where most matmuls in parts are slower than one in place."""
    if method is Method.RING_EXCHANGE and size == 2:  # with more ranks each step would round sums of 16 bits
        return method
    return method if method in (Method.AUTO, Method.UNFUSED) else Method.WINDOW


def on_gpus(method: Method, has_multicast: bool) -> Method:
    """What ``method`` is on GPUs: a window as a whole is "bulk", and so is multicast where there is none."""
    is_bulk = method is Method.WINDOW or (method is Method.MULTICAST and not has_multicast)
    return Method.BULK if is_bulk else method
