"""Draws the diagrams of the pages, in docs/diagrams: python3 tools/diagrams.py mermaid.min.js

GitHub draws diagrams by itself. The site shows these pictures, since a script that draws would come from another host.
Needs Chromium with its driver, and Mermaid: `npm pack mermaid@11`, in which it is dist/mermaid.min.js. Pictures of
diagrams that have not changed stay, those of diagrams that are gone are removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tools")]

from blocks import DIAGRAMS, blocks_of, pages, picture_of  # noqa: E402 (the line above makes it importable)
from web_driver import Browser, missing  # noqa: E402

OPTIONS = {
    "startOnLoad": False,
    "theme": "neutral",
    "fontFamily": "sans-serif",
    "htmlLabels": False,  # an <img> shows no HTML in every browser
    "flowchart": {"htmlLabels": False},
    "gantt": {"useWidth": 900},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mermaid", type=Path, help="mermaid.min.js")
    mermaid = parser.parse_args().mermaid
    diagrams = {picture_of(b.text): b.text for page in pages() for b in blocks_of(page) if b.language == "mermaid"}
    if reason := missing():
        print(f"diagrams: {reason}", file=sys.stderr)
        return 1
    DIAGRAMS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, Browser() as browser:
        shutil.copy(mermaid, Path(directory, "mermaid.js"))
        page = Path(directory, "page.html")
        page.write_text('<!doctype html><meta charset="utf-8"><script src="mermaid.js"></script>')
        browser.open(page.as_uri(), width=1000, dark=False)
        browser.run(f"mermaid.initialize({json.dumps(OPTIONS)})")
        for path, text in diagrams.items():
            if not path.exists():
                script = f"return mermaid.render('d{path.stem}', {json.dumps(text)}).then(drawn => drawn.svg, String)"
                drawn = browser.run(script)
                if not drawn.startswith("<svg"):
                    print(f"diagrams: {drawn}\nin\n{text}", file=sys.stderr)
                    return 1
                path.write_text(drawn + "\n")
                print(path.relative_to(ROOT))
    for path in set(DIAGRAMS.glob("*.svg")) - diagrams.keys():
        path.unlink()
        print(f"{path.relative_to(ROOT)} is of no diagram any more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
