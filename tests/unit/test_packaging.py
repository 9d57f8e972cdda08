"""What a package index shows, which systems and Pythons are promised, and that all places promise the same."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = runpy.run_path(str(ROOT / "tools" / "index_page.py"))
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("source_url", ["", "https://example.org/hvdlite/blob/main"])
def test_an_index_page_has_no_link_that_leads_nowhere(source_url: str) -> None:
    files = [target for target in LINK.findall(README) if ":" not in target]
    assert files
    shown = PAGE["without_relative_links"](README, source_url)
    assert all(target.startswith("https://") for target in LINK.findall(shown))
    for file in files:
        assert (
            (f"({source_url}/{file})" in shown) if source_url else (file in shown or file.rpartition("/")[0] in shown)
        )


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("see [docs/gpu.md](docs/gpu.md).", "see docs/gpu.md."),
        ("see [GPUs](docs/gpu.md#settings).", "see GPUs (docs/gpu.md#settings)."),
        ("see [a site](https://example.org/a) and [below](#below)", None),
    ],
)
def test_files_without_a_place_are_named(link: str, shown: str | None) -> None:
    assert PAGE["without_relative_links"](link, "") == (shown or link)


def test_urls_follow_from_one() -> None:
    assert PAGE["project_urls"]("") == {}
    assert PAGE["project_urls"]("https://example.org/main/")["Changelog"] == "https://example.org/main/CHANGELOG.md"


def test_the_source_distribution_has_what_the_readme_links_to() -> None:
    grafted = re.findall(r"^graft (\S+)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    files = [target for target in LINK.findall(README) if ":" not in target and "/" in target]
    assert {file.partition("/")[0] for file in files} <= {*grafted, "hvdlite"}  # packages are there anyway


@pytest.mark.parametrize(("system", "way_out"), [("darwin", "Linux container"), ("win32", "WSL 2"), ("aix", "virtual")])
def test_other_systems_get_a_sentence(system: str, way_out: str) -> None:
    pytest.importorskip("pybind11")
    pytest.importorskip("setuptools")
    program = (
        "import pybind11.setup_helpers, setuptools, runpy, sys; sys.platform = sys.argv[1]; runpy.run_path('setup.py')"
    )
    done = subprocess.run([sys.executable, "-c", program, system], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("hvdlite runs on Linux")
    assert way_out in done.stderr


def test_all_places_name_the_same_pythons() -> None:
    versions = runpy.run_path(str(ROOT / "tools" / "wheels.py"))["VERSIONS"]
    text = (ROOT / "pyproject.toml").read_text()
    assert tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)) == versions
    assert re.findall(r"\bcp(3\d+)-manylinux", text) == [version.replace(".", "") for version in versions]
    assert f'requires-python = ">={versions[0]}"' in text
    assert f"Python {versions[0]} to {versions[-1]}" in README


def command(name: str) -> list[str]:
    """What pip makes of it in bin/."""
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]\n")[1].split("\n\n")[0]
    module, function = dict(re.findall(r'^(\w+) = "([\w.]+:\w+)"$', scripts, re.MULTILINE))[name].split(":")
    return [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


@pytest.mark.parametrize(
    ("name", "tool", "words", "says"),
    [
        ("hvdlite", "", "", "usage: python -m hvdlite TOOL"),
        ("hvdlite", "", "--help", "usage: python -m hvdlite TOOL"),
        ("hvdlite", "", "doctor --help", "--no-check"),
        ("hvdlite", "", "no-such-tool", "no tool 'no-such-tool'"),
        ("hvdlite", "", "timeline report none", "none: No such file"),
        ("hvdliterun", "run", "--help", "usage: python -m hvdlite run"),
    ],
)
def test_commands_do_what_the_module_does(name: str, tool: str, words: str, says: str) -> None:
    ours, module = (
        subprocess.run([*start, *words.split()], cwd=ROOT, capture_output=True, text=True)
        for start in (command(name), [sys.executable, "-m", "hvdlite", *tool.split()])
    )
    assert says in ours.stdout + ours.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (module.returncode, module.stdout, module.stderr)
