"""What mkdocs.yml has mkdocs do: the README as first page, whatever else pages link to, settings, diagrams.

Pages link to one another and to sources as they lie in the repository, so that they can be read there. In the site,
pages of docs/ are at the root, all else has its path in the repository, and a source file is a page with its text.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from blocks import FENCE, ROOT, picture_of

LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
PICTURES = (".png", ".svg")
LANGUAGES = {".cpp": "cpp", ".cu": "cpp", ".h": "cpp", ".py": "python", ".pyi": "python", ".sh": "sh", ".yaml": "yaml"}
SETTINGS = "<!-- settings -->"
OTHER_VARIABLES = "<!-- other variables -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and whatever pages link to outside of docs/."""
    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        name = site_name(page)
        if name not in files.src_uris:
            files.append(_file(page, config))
        if page.suffix != ".md":
            continue
        for target in linked(page):
            if target.exists() and target not in known and target.is_relative_to(ROOT):
                known.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links where the site has their targets, draw diagrams, list settings."""
    here = repository_path(page.file.src_uri)
    if here is None:  # the text of a source file
        return markdown

    def point(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups(default="")
        if not target or "://" in target:
            return match[0]
        name = site_name((here.parent / target).resolve())
        relative = posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".")
        return f"{opening}{relative}{anchor}{closing}"

    markdown = _outside_of_programs(markdown, lambda text: _in_fours(LINK.sub(point, text)))
    markdown = FENCE.sub(lambda match: _in_fours(_diagram(match, page)), markdown)
    if SETTINGS in markdown:
        markdown = markdown.replace(SETTINGS, settings_table()).replace(OTHER_VARIABLES, other_variables_table())
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What ends with two colons in a docstring, as reStructuredText has it before a program, ends with one."""
    return re.sub(r"::(</p>\s*<(?:div|pre))", r":\1", html)


def linked(page: Path) -> Iterator[Path]:
    """The files that a page of the repository links to."""
    for match in LINK.finditer(FENCE.sub("", page.read_text())):
        if match[2] and "://" not in match[2]:
            yield (page.parent / match[2]).resolve()


def site_name(path: Path) -> str:
    """Where the site has a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if path.suffix in (".md", *PICTURES) else f"source/{name}.md"


def repository_path(name: str) -> Path | None:
    """The file of the repository that a page of the site shows as it is; None for the text of a source file."""
    if name.startswith("source/"):
        return None
    return next(path for path in (ROOT / "docs" / name, ROOT / name) if path.exists())


def _file(path: Path, config: MkDocsConfig) -> File:
    if path.suffix in (".md", *PICTURES):
        return File.generated(config, site_name(path), abs_src_path=str(path))
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        inside = "\n".join(f"- `{entry.name}`" for entry in sorted(path.iterdir()) if not entry.name.startswith("_"))
        return File.generated(config, site_name(path), content=f"# {name}\n\n{inside}\n")
    program = f"`````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n`````\n"
    return File.generated(config, site_name(path), content=f"# {name}\n\n{program}")


def _outside_of_programs(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for match in FENCE.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def _in_fours(text: str) -> str:
    """What belongs to an item of a list as Markdown in Python wants it: indented by four, and not by two or three.

    And an empty line before the next item, which would belong to the paragraph before it otherwise.
    """
    if "```" in text:
        indent = len(text) - len(text.lstrip(" "))
        return re.sub("^", " " * (4 - indent), text, flags=re.MULTILINE) if indent in (2, 3) else text
    text = re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.MULTILINE)
    return re.sub(r"^( {4}.*\n)(?=(?:- |\d+\. )\S)", r"\1\n", text, flags=re.MULTILINE)


def _diagram(match: re.Match[str], page: Page) -> str:
    picture = picture_of(textwrap.dedent(match[3]))
    if match[2] != "mermaid" or not picture.exists():
        return match[0]
    up = posixpath.relpath("pictures", posixpath.dirname(page.file.src_uri) or ".")
    return f"{match[1]}![Diagram]({up}/{picture.name})"


def settings_table() -> str:
    """Every setting of a job: its variables, its default, what hvdlite/config.py says of it."""
    from dataclasses import fields

    from hvdlite import config

    said = _said_of_fields(inspect.getsource(config.Config))
    rows = ["| variable | default | |", "|---|---|---|"]
    for item in fields(config.Config):
        names = [name[1:] if name[0] == "$" else f"HVDLITE_{name}" for name in item.metadata["names"]]
        shown = " ".join(f"`{name}`" for name in names)
        rows.append(f"| {shown} | {_default(item.default)} | {_one_line(said[item.name])} |")
    return "\n".join(rows)


def other_variables_table() -> str:
    """Variables that are no settings of a job, and where they are used."""
    from hvdlite import config

    rows = [f"| `{name}` | {_one_line(text)} |" for name, text in config.OTHER_VARIABLES.items()]
    return "\n".join(["| variable | |", "|---|---|", *rows])


def _said_of_fields(source: str) -> dict[str, str]:
    """The string after each field of a class."""
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    said = {}
    for item, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(after, ast.Expr):
            said[item.target.id] = ast.literal_eval(after.value)
    return said


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("``", "`").replace("|", "\\|").strip()
