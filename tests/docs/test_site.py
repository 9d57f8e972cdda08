"""The site is built without a warning and without a network, and its pages ask no other host for anything."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import hvdlite
import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd
from blocks import DIAGRAMS, ROOT, blocks_of, pages, picture_of
from hvdlite.config import OTHER_VARIABLES, Config

pytest.importorskip("mkdocstrings", reason="the site's tools are not installed: pip install 'hvdlite[docs]'")

_WITHOUT_NETWORK = ["unshare", "--map-root-user", "--net"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built where there is no network, if this machine lets that be tried."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    if shutil.which("unshare") and subprocess.run([*_WITHOUT_NETWORK, "true"], capture_output=True).returncode == 0:
        command = [*_WITHOUT_NETWORK, *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def read(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text()


def test_nothing_comes_from_another_host(site: Path) -> None:
    loaded = []
    for page in site.rglob("*.html"):
        text = page.read_text()
        tags = re.findall(r"<(?:script|img|iframe|source|video|object|embed)\b[^>]*>", text)
        tags += re.findall(r"<link\b[^>]*>", text)
        addresses = [address for tag in tags for address in re.findall(r'\b(?:src|href|data)="?([^"\s>]+)', tag)]
        loaded += [(page, address) for address in addresses if re.match(r"(?:https?:)?//", address)]
        loaded += [(page, "mermaid, from a CDN")] * ('class="mermaid"' in text)
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        addresses = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", text)
        loaded += [(sheet, address) for address in addresses]
    assert loaded == []


def test_the_reference_has_every_public_name_with_types(site: Path) -> None:
    def anchors(page: str) -> set[str]:
        return {name.rpartition(".")[2] for name in re.findall(r'id="(hvdlite\.[\w.]+)"', read(site, f"api/{page}"))}

    base, errors = anchors("hvdlite"), anchors("errors")
    documented = anchors("torch") | base | errors | {"elastic", "global_process_set"}
    assert set(hvd.__all__) - documented == set()
    assert set(hvd.elastic.__all__) - anchors("elastic") == set()
    assert set(tp.__all__) - anchors("tensor_parallel") == set()
    assert {"init", "rank", "run", "Runtime", "statistics"} <= base
    assert {name for name in vars(hvdlite) if name.endswith(("Error", "Interrupt"))} <= errors
    signature = html.unescape(re.sub(r"<[^>]+>", "", read(site, "api/torch")))
    assert re.search(r"DistributedOptimizer\(\s*optimizer: Optimizer,\s*named_parameters: Iterable\[tuple\[", signature)


def test_the_settings_are_those_of_the_code(site: Path) -> None:
    page = read(site, "api/settings")
    names = {f"HVDLITE_{item.metadata['names'][0]}" for item in fields(Config)} | OTHER_VARIABLES.keys()
    assert {name for name in names if f"<code>{name}</code>" not in page} == set()
    row = re.search(r"<tr>\s*<td><code>HVDLITE_START_TIMEOUT</code></td>(.*?)</tr>", page, re.DOTALL)
    assert row and ">30<" in row[1] and "Longest that init() may take" in row[1]


def test_diagrams_are_pictures(site: Path) -> None:
    """Drawn once, by tools/diagrams.py: a script that draws them in the browser would come from another host."""
    diagrams = [block for page in pages() for block in blocks_of(page) if block.language == "mermaid"]
    missing = [str(block) for block in diagrams if not picture_of(block.text).exists()]
    assert not missing, "python3 tools/diagrams.py draws what is new"
    drawn = {picture_of(block.text).name for block in diagrams}
    assert {path.name for path in DIAGRAMS.glob("*.svg")} == drawn


def test_no_markdown_is_left_over(site: Path) -> None:
    """Lists, tables and programs in lists, which GitHub's Markdown and Python's understand differently."""
    left = []
    for page in site.rglob("index.html"):
        if "source" in page.relative_to(site).parts:
            continue
        article = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)
        assert article, page
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", article[0], flags=re.DOTALL)
        for line in html.unescape(re.sub(r"<[^>]+>", "", text)).splitlines():
            if re.match(r"\s*(?:[-*] |\||```|:::)|.*(?:\]\(|\*\*|::$)", line):
                left.append((page.relative_to(site), line.strip()))
    assert left == []
