"""README.md as a package index shows it, where links relative to the tree lead nowhere."""

from __future__ import annotations

import re

_RELATIVE = re.compile(r"\[([^\[\]]+)\]\((?![a-z]+:|#)([^()\s]+)\)")


def without_relative_links(readme: str, source_url: str) -> str:
    """``readme`` with links to files made absolute, below ``source_url``; if that is empty, the names of the files."""

    def replace(link: re.Match[str]) -> str:
        text, file = link[1], link[2]
        if source_url:
            return f"[{text}]({source_url.rstrip('/')}/{file})"
        return text if file.partition("#")[0].rstrip("/").endswith(text.rstrip("/")) else f"{text} ({file})"

    return _RELATIVE.sub(replace, readme)


def project_urls(source_url: str) -> dict[str, str]:
    """Those of the index page; none without ``source_url``."""
    pages = {"Source": "", "Documentation": "/docs", "Changelog": "/CHANGELOG.md"}
    return {name: source_url.rstrip("/") + path for name, path in pages.items()} if source_url else {}
