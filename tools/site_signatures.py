"""For the API reference: a class made by __new__ shows the arguments of that, and modules say nothing of themselves.

An extension of griffe, which mkdocs.yml names.
"""

from __future__ import annotations

from typing import Any

import griffe


class Signatures(griffe.Extension):
    """See above."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        made, initialized = cls.members.get("__new__"), cls.members.get("__init__")
        if isinstance(made, griffe.Function) and isinstance(initialized, griffe.Function):
            initialized.parameters = made.parameters

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        mod.docstring = None
