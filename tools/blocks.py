"""The programs, commands and diagrams that stand on the pages, between fences."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
DIAGRAMS = ROOT / "docs" / "diagrams"
_PROMPT = "$ "


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Attributes:
        page: its path in the repository.
        language: python; sh, commands; console, commands behind a prompt and what they print; others are no programs.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.split("\n", 1)[0]

    @property
    def commands(self) -> str:
        """Of sh and console, without prompts and output."""
        lines = self.text.splitlines()
        if self.language == "console":
            lines = [line.removeprefix(_PROMPT) for line in lines if line.startswith(_PROMPT)]
        return "\n".join(lines)

    @property
    def output(self) -> list[str]:
        """What a console shows beside the commands."""
        return [line for line in self.text.splitlines() if not line.startswith(_PROMPT)]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages for readers."""
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """In order."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page.relative_to(ROOT).as_posix(), line, match[2], textwrap.dedent(match[3]))


def picture_of(diagram: str) -> Path:
    """Where the picture of a diagram lies; it is named by the diagram's text, so that no picture is of an older one."""
    return DIAGRAMS / f"{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"
