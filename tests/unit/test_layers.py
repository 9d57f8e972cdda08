"""Imports point down: every import of hvdlite, and every include of csrc, against the layers in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdlite"


def layers(block_name: str) -> list[list[str]]:
    """Names, the top layer first."""
    block = re.search(rf"```{block_name}\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    assert block, f"ARCHITECTURE.md has no block of {block_name}"
    return [re.split(r"\s{2,}", line)[0].split() for line in block[1].splitlines()]


def levels(block_name: str) -> dict[str, int]:
    return {name: level for level, names in enumerate(reversed(layers(block_name))) for name in names}


LEVELS = levels("layers")


def name_of(path: Path) -> str:
    """Of a module, without the package's."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")} | {"_native": PACKAGE / "_native.pyi"}


def level_of(module: str) -> int:
    """That of the longest name which begins ``module``."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    level = next((LEVELS[name] for name in names if name in LEVELS), None)
    assert level is not None, f"hvdlite.{module} is on no layer of ARCHITECTURE.md"
    return level


def imported(text: str) -> Iterator[str]:
    """The modules of hvdlite that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == "hvdlite":
                found = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
                yield next((module for module in found if module in MODULES), "__init__")


GRAPH = {module: {*imported(path.read_text())} - {module} for module, path in MODULES.items()}


def test_the_table_names_what_there_is() -> None:
    for name in LEVELS:
        assert name in MODULES or (PACKAGE / name).is_dir(), name
    assert len(LEVELS) == sum(map(len, layers("layers"))), "a name is listed twice"


def test_imports_point_down() -> None:
    up = [(module, other) for module in MODULES for other in GRAPH[module] if level_of(other) > level_of(module)]
    assert not up, "imports of what ARCHITECTURE.md puts on a higher layer"


def test_there_are_no_circles() -> None:
    TopologicalSorter(GRAPH).prepare()  # raises graphlib.CycleError, which names one


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import hvdlite", "__init__"),
        ("import hvdlite.world", "world"),
        ("from hvdlite import _native, errors", "_native errors"),
        ("from hvdlite.memory.views import Buffer", "memory.views"),
        ("from hvdlite import allreduce", "__init__"),
        ("def later():\n    from hvdlite.torch import functions", "torch.functions"),
        ("import os, hvdlitely", ""),
    ],
)
def test_every_way_to_import_is_seen(line: str, module: str) -> None:
    assert [*imported(line)] == module.split()


NATIVE = levels("native")


def test_the_native_table_names_what_there_is() -> None:
    assert set(NATIVE) == {path.name for path in (ROOT / "csrc").iterdir() if path.name != "__pycache__"}


@pytest.mark.parametrize("directory", NATIVE)
def test_includes_point_down(directory: str) -> None:
    paths = [path for path in (ROOT / "csrc" / directory).iterdir() if path.suffix in (".cpp", ".h", ".cu")]
    assert paths
    for path in paths:
        for other in re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE):
            assert NATIVE[other] < NATIVE[directory] or other == directory, f"{path.name} includes of {other}"
