"""What ranks tell one another as JSON: it comes back as it was, and nothing else is made of what strangers write."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from hvdlite import plain
from hvdlite.agreement import _Complaint
from hvdlite.bootstrap import Card
from hvdlite.config import Config
from hvdlite.distributed.creation import _Where
from hvdlite.distributed.doors import Door
from hvdlite.errors import ConfigError
from hvdlite.launched import Meeting
from hvdlite.start.rendezvous import MissingError

VALUES = [
    None,
    True,
    -(1 << 70),
    0.1,
    math.inf,
    "\ud800 ü \0",
    bytes(range(256)),
    [],
    (1, (2.0, [b"", {"a": None, 3: (4,)}])),
    Config(start_timeout_s=7.0),
    Card(Config(), "host", 1, "process", None, None, ("::1",), None),
    Door("\0name", (("127.0.0.1", 5),), b"key"),
    _Where(("host", "boot", 3), True, None),
    (None, _Complaint(1, MissingError, "text")),
    ConfigError,
    Meeting.POINT,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = plain.loads(plain.dumps(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [Path(), {1}, object(), OSError, [1j]])
def test_who_tells_something_else_is_told_so(value: Any) -> None:
    with pytest.raises(TypeError):
        plain.dumps(value)


FOREIGN = [
    b"",
    b"cos\nsystem\n(S'true'\ntR.",
    b"[" * 100_000,
    b'{"a": 1}',
    b"[]",
    b"[1]",
    b"[null, 2]",
    b'["bytes", 3]',
    b'["dict", [["list"], 1]]',
    *(
        json.dumps(written).encode()
        for written in (
            ["os:system", "true"],
            ["hvdlite.environment:os.system", "true"],
            ["hvdlite.environment:os", "true"],
            ["hvdlite.bootstrap:Path", "/"],
            ["hvdlite.bootstrap:start_world", None],
            ["hvdlite.never.loaded:Door", 1],
            ["hvdlite.links.reception:Reception", [], None, None],
            ["hvdlite.distributed.doors:Door", "name"],
            ["hvdlite.launched:Meeting", "nowhere else"],
            ["kind", "hvdlite.links.reception:Reception"],
            ["kind", "builtins:OSError"],
        )
    ),
]


@pytest.mark.parametrize("data", FOREIGN, ids=lambda data: repr(data[:40]))
def test_what_strangers_write_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(command))
    with pytest.raises(ValueError, match="not what ranks tell one another"):
        plain.loads(data)
