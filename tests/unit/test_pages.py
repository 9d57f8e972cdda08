"""The pages agree with the code: docs/from-horovod.md names all that there is and nothing else, docs/recipes.md quotes
programs as they are, and links lead somewhere."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite import errors
from hvdlite.cli import arguments
from hvdlite.cli.horovodrun import BY_NAME
from hvdlite.compat import common, frameworkless, runner, threads
from hvdlite.config import Config
from hvdlite.ray import RayExecutor

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
HERE = {"same", "better", "differs", "new"}


def spans(text: str) -> list[str]:
    """What stands between backquotes."""
    return re.findall(r"`([^`\n]+)`", text)


def anchor(title: str) -> str:
    """The name by which a link finds a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def without_programs(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_programs(page.read_text())):
        path, _, name = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if name:
            assert name in {anchor(title) for title in re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)}, target


# docs/from-horovod.md

PAGE = (ROOT / "docs" / "from-horovod.md").read_text()
TEXT = without_programs(PAGE)


@dataclass(frozen=True)
class Row:
    """Of a table that compares: the heading above it, the names, the word, the remark."""

    section: str
    names: list[str]
    word: str
    remark: str


def read_rows() -> list[Row]:
    rows, section = [], ""
    for line in TEXT.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and cells[1].startswith("`"):
            rows.append(Row(section, spans(cells[1]), cells[2], cells[3]))
    return rows


ROWS = read_rows()
VARIABLES = {
    f"{prefix}_{name}"
    for item in fields(Config)
    for name in item.metadata["names"]
    if not name.startswith("$")
    for prefix in ("HVDLITE", "HOROVOD")
}
# Those that change nothing are known as well.
OURS = arguments._WITH_ARGUMENT | arguments._SWITCHES
EFFECTIVE = {name for name, option in BY_NAME.items() if not option.note} | OURS


def of(thing: object, *parameters_of: Callable[..., object]) -> Callable[[str], bool]:
    """Whether ``thing`` has a name, or one of these functions such a parameter."""
    parameters = {name for function in parameters_of for name in inspect.signature(function).parameters}
    return lambda name: hasattr(thing, name) or name in parameters


EXISTS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys([row.section for row in ROWS if row.section.startswith("hvd:")], of(hvd)),
    "hvd.DistributedOptimizer": lambda name: (
        of(hvd.DistributedOptimizer, hvd.DistributedOptimizer.__new__)(name)
        or hasattr(torch.optim.SGD([torch.zeros(1)], lr=1.0), name)
    ),
    "hvd.ProcessSet": of(hvd.ProcessSet([0])),
    "hvd.elastic": of(hvd.elastic),
    "hvd.elastic.TorchState": of(hvd.elastic.TorchState),
    "hvd.elastic.ElasticSampler": of(hvd.elastic.ElasticSampler),
    "Errors": of(errors),
    "horovod.run": of(None, runner.run),
    "horovod.ray": of(RayExecutor, RayExecutor.__init__),
    "Settings": VARIABLES.__contains__,
    "hvdliterun": lambda option: option.lstrip("-") in EFFECTIVE,
}


@pytest.fixture(scope="module")
def mirrors() -> dict[str, list[str]]:
    """The modules that stand in for Horovod's, and their names; from another process, which keeps its `horovod`."""
    program = (
        "import importlib, json; from hvdlite.compat.horovod import MODULES; "
        "print(json.dumps({module: dir(importlib.import_module(module)) for module in MODULES}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", capture_output=True, text=True, timeout=60, check=True
    )
    names: dict[str, list[str]] = json.loads(done.stdout)
    return names


@pytest.mark.parametrize("section", [*EXISTS, "Modules"])
def test_each_name_is_here_or_not_as_the_page_says(section: str, mirrors: dict[str, list[str]]) -> None:
    exists = EXISTS.get(section, mirrors.__contains__)
    for row in ROWS:
        if row.section == section:
            assert row.word in HERE | {"not here"}, row
            for name in row.names:
                assert exists(name) is (row.word != "not here"), f"{name}: {row}"


def test_each_name_has_one_row() -> None:
    sections = {row.section for row in ROWS} - {"Modules"}  # where a row has some of a module's names
    for section in sections:
        names = [name for row in ROWS if row.section == section for name in row.names]
        assert sorted(names) == sorted({*names}), section


def methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}


def defined_in(module: ModuleType, what: Callable[[object], bool]) -> set[str]:
    """Public names of ``module`` whose things were made there."""
    found = vars(module).items()
    return {n for n, x in found if what(x) and x.__module__ == module.__name__ and not n.startswith("_")}


def test_every_name_is_on_the_page(mirrors: dict[str, list[str]]) -> None:
    assert {row.section for row in ROWS} == {*EXISTS, "Modules"}

    def missing(section: str, names: set[str]) -> set[str]:
        return names - {name for row in ROWS if row.section.startswith(section) for name in row.names}

    assert not missing("hvd:", set(hvd.__all__))
    assert not missing("hvd.elastic", set(hvd.elastic.__all__))
    arguments = set(inspect.signature(hvd.DistributedOptimizer.__new__).parameters) - {"cls"}
    assert not missing("hvd.DistributedOptimizer", arguments | methods(hvd.DistributedOptimizer))
    assert not missing("hvd.elastic.TorchState", methods(hvd.elastic.State) | methods(hvd.elastic.TorchState))
    assert not missing("hvd.elastic.ElasticSampler", methods(hvd.elastic.ElasticSampler))
    assert not missing("Errors", defined_in(errors, inspect.isclass))
    assert not missing("Modules", set(mirrors))
    assert not missing("horovod.run", set(inspect.signature(runner.run).parameters))
    assert not (BY_NAME.keys() | OURS) - {name.lstrip("-") for name in spans(TEXT)}
    assert not {f"HVDLITE_{item.metadata['names'][0]}" for item in fields(Config)} - set(spans(TEXT))


def test_every_name_of_a_mirrored_module_is_on_the_page() -> None:
    named = set(spans(TEXT))
    assert not defined_in(common, inspect.isfunction) - named
    assert not defined_in(threads, inspect.isfunction) - named
    assert not set(runner.__all__) - named
    assert not {name for name in vars(frameworkless) if not name.startswith("_")} - named
    compressors = defined_in(hvd.compression, lambda x: inspect.isclass(x) and issubclass(x, hvd.Compressor))
    assert not compressors - named


def test_remarks_on_modules_name_what_they_have(mirrors: dict[str, list[str]]) -> None:
    for row in ROWS:
        if row.section == "Modules" and row.word in HERE:
            for module in row.names:
                assert set(spans(row.remark)) <= set(mirrors[module]), row


def test_whatever_else_the_page_names_exists() -> None:
    not_here = {name for row in ROWS if row.word == "not here" for name in row.names}
    build = {"HOROVOD_WITH_PYTORCH", "HOROVOD_GPU_OPERATIONS"}
    mpiruns = arguments._FLAGS | arguments._PAIRS
    for span in spans(TEXT):
        variable = re.match(r"(HVDLITE|HOROVOD)_[A-Z_0-9]+\b", span)
        if variable and variable[0] not in ("HVDLITE_X", "HOROVOD_X"):
            assert variable[0] in VARIABLES | not_here | build, span
        for option in re.findall(r"(?:^| )(-{1,2}[a-zA-Z][\w-]*)", span):
            known = BY_NAME.keys() | OURS | mpiruns | {"m", "epochs", "install", "uninstall"}
            assert option.lstrip("-") in known, span
        path = re.match(r"(hvd|hvdlite)((?:\.\w+)+)", span)
        if path:
            found: object = hvd if path[1] == "hvd" else hvdlite
            for name in path[2].lstrip(".").split("."):
                found = getattr(found, name, None)
                assert found is not None, span


def test_the_program_of_the_page_before_and_after(tmp_path: Path) -> None:
    """With one rank; tests/faults has programs for Horovod with several."""
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program
    before = inspect.cleandoc(program[1])
    after = before.replace("import horovod.torch as hvd", "import hvdlite.torch as hvd")
    assert "import hvdlite.torch as hvd" in PAGE and after != before
    said = []
    for text, words in [(before, ["-m", "hvdlite", "horovod"]), (after, [])]:
        path = tmp_path / "train.py"
        path.write_text(text)
        done = subprocess.run(
            [sys.executable, *words, str(path)], cwd="/", capture_output=True, text=True, timeout=60, check=True
        )
        said.append(done.stdout)
    assert said[0] == said[1] and re.fullmatch(r"rank 0 of 1: y = [23]\.\d{4} x \+ [01]\.\d{4}\n", said[0])


# docs/performance.md


def measured(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_figures_are_those_of_the_reports() -> None:
    steps = {model["model"]: model["ways"] for model in measured("train_step")["models"]}
    bound = [steps[name] for name in ("ResNet-50", "small GPT", "convolutional", "transformer")]

    def to(values: Iterable[float], digits: int = 2) -> str:
        least, *_, most = sorted(values)
        return f"{least:.{digits}f} to {most:.{digits}f}"

    def relative(ways: Any, way: str = "hvdlite") -> float:
        value: float = ways[way]["relative"]["value"]
        return value

    overlap, costs = measured("overlap"), measured("costs")
    shares = [where["hidden_share"]["value"] for where in (overlap["asleep"], overlap, overlap["tcp"])]
    in_slot = next(row for row in measured("hosts_2x2")["rows"] if row["way"] == "hvd, in its slot")
    wanted = [
        to(map(relative, bound)),
        "; ".join(f"{relative(steps[name]):.2f}" for name in ("400 tiny parameters", "three 4096^2 layers")),
        to(relative(model["ways"]) for model in measured("one_rank")["models"]),
        f"{shares[0]:.0%}".replace("%", " %"),
        f"{shares[1]:.0%} (plain TCP: {shares[2]:.0%})".replace("%", " %"),
        f"{in_slot['of_bound']['value']:.2f}",
        f"{measured('latency')['blocking, 4 B']['hvd.allreduce']['median_us']:.0f} us",
        to((model["at_rest_bytes"] / 2**20 for model in costs["memory"].values()), 1) + " MiB",
        f"{max(costs['idle']):.2%}".replace("%", " %"),
        to(model["relative"]["value"] for model in measured("timeline_cost")["models"].values()),
    ]
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page[page.index("| what | where | measured |") : page.index("More ranks make")]
    assert [line.split("|")[3].strip() for line in table.strip().splitlines()[2:]] == wanted
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert f"takes {wanted[0]} times as long as without communication" in readme
    assert f"over Gloo {to(relative(ways, 'DDP') for ways in bound)}." in readme
    assert f"{wanted[3]} of the communication hides" in readme


# docs/recipes.md

RECIPES = (ROOT / "docs" / "recipes.md").read_text()
SECTIONS = re.findall(
    r"^## .*?\n\n\[(examples/recipes/\w+\.py)\].*?\n(.*?)(?=^## |\Z)", RECIPES, re.DOTALL | re.MULTILINE
)


@pytest.mark.parametrize(("path", "text"), SECTIONS, ids=[path for path, _ in SECTIONS])
def test_quotes_of_a_recipe_stand_in_it(path: str, text: str) -> None:
    program = (ROOT / path).read_text()
    quotes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert quotes
    for quote in quotes:
        assert quote in program, quote


def test_every_recipe_is_on_the_page() -> None:
    recipes = {str(file.relative_to(ROOT)) for file in ROOT.glob("examples/recipes/*.py")}
    assert [path for path, _ in SECTIONS] == list(dict.fromkeys(path for path, _ in SECTIONS))
    assert {path for path, _ in SECTIONS} == recipes
    assert len(SECTIONS) == RECIPES.count("\n## ")
