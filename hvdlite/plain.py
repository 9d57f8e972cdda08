"""Values as JSON, for places where strangers may write too: to read them makes values, and runs no code of theirs.

None, numbers, text, bytes, lists, tuples and dictionaries; of hvdlite's own, what holds such values and nothing else:
dataclasses, NamedTuples, enums; and the kinds of StartupError.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from enum import Enum
from typing import Any

from hvdlite.errors import StartupError

_PACKAGE = "hvdlite."


def dumps(value: Any) -> bytes:
    """Raises TypeError where ``value`` has others in it."""
    return json.dumps(_written(value), separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """Raises ValueError where `dumps` did not make ``data``."""
    try:
        return _read(json.loads(data))
    except Exception as error:  # whatever classes say of what is no field of theirs
        raise ValueError(f"it is not what ranks tell one another: {error!r}") from None


# All but numbers and text is a list that begins with its kind.


def _written(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Enum):
        return [_name(kind), _written(value.value)]
    if value is None or isinstance(value, int | float | str):  # torch's version is of a kind of its own, and text too
        return value
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind in (list, tuple):
        return [kind.__name__, *map(_written, value)]
    if kind is dict:
        return ["dict", *([_written(key), _written(element)] for key, element in value.items())]
    if isinstance(value, type) and issubclass(value, StartupError):
        return ["kind", _name(value)]
    return [_name(kind), *(_written(getattr(value, name)) for name in _fields(kind))]


def _read(written: Any) -> Any:
    if isinstance(written, dict):
        raise TypeError("no value is written so")
    if not isinstance(written, list):
        return written
    name, *parts = written
    if name == "bytes":
        return base64.b64decode(parts[0])
    if name == "list":
        return [_read(part) for part in parts]
    if name == "tuple":
        return tuple(_read(part) for part in parts)
    if name == "dict":
        return {_read(key): _read(element) for key, element in parts}
    if name == "kind":
        (kind,) = map(_class, parts)
        if not issubclass(kind, StartupError):
            raise TypeError(f"{kind} is no StartupError")
        return kind
    kind = _class(name)
    if issubclass(kind, Enum):
        (value,) = map(_read, parts)
        return kind(value)
    return kind(**dict(zip(_fields(kind), map(_read, parts), strict=True)))


def _name(kind: type) -> str:
    if not kind.__module__.startswith(_PACKAGE):
        raise TypeError(f"ranks cannot tell one another {kind}")
    return f"{kind.__module__}:{kind.__name__}"


def _class(name: str) -> type:
    """Only of a module that is loaded already: to load one may do anything."""
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules[module], attribute)
    if not (isinstance(found, type) and _name(found) == name):
        raise TypeError(f"{name} is no class of hvdlite")
    return found


def _fields(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return list(kind._fields)
    raise TypeError(f"{kind} holds more than values")
