"""Control messages of a rank and step, counted by the runtime itself, for 2 to 32 ranks on emulated hosts; needs root.

    HVDLITE_START_TIMEOUT=300 python control_messages.py --json results/control_messages.json

Runs scale_check.py on each number of hosts, and so also checks that virtual ranks say the same.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import parser_for, table, write_json

HERE = Path(__file__).resolve().parent
LAYOUTS = ["1x2", "2x1", "2x2", "4x2", "8x2", "8x4", "16x2"]


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="HxR", help="hosts x ranks of each")
    options = parser.parse_args()
    rows = []
    for layout in options.layouts:
        hosts, ranks = layout.split("x")
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "row.json")
            where = ["across_hosts.py", f"--hosts={hosts}", f"--ranks={ranks}", "--rate=10gbit"]
            done = subprocess.run([sys.executable, *where, "scale_check.py", f"--json={path}"], cwd=HERE)
            if done.returncode:
                return done.returncode
            rows.append({name: value for name, value in json.loads(path.read_text()).items() if name != "command"})
    print(f"\nEach step of {rows[0]['buckets']} buckets, at most: messages sent, received; bytes of both\n")
    print(messages_table(rows))
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    write_json(options.json, {"benchmark": "control_messages", "command": command, "rows": rows})
    return 0


def messages_table(rows: list[dict[str, Any]]) -> str:
    """A line per number of ranks: what passes between nodes, and, of ranks that lead none, through the control page."""
    lines = []
    for row in rows:
        cells = [f"{row['ranks']} on {row['nodes']}"]
        for how in ("one at a time", "at once"):
            for who in ("root", "other leaders"):
                cells.append(said(row[how][who], "tree_messages", "tree_bytes") if who in row[how] else "-")
        others = row["one at a time"].get("other ranks")
        cells.append("-" if others is None else f"{others['page_bytes_written']}, {others['page_bytes_read']}")
        lines.append(cells)
    header = ["ranks on nodes", "one at a time: root", "other leaders", "at once: root", "other leaders"]
    return table([*header, "others: page bytes written, read"], lines)


def said(counts: dict[str, int], messages: str, nbytes: str) -> str:
    total = counts[f"{nbytes}_sent"] + counts[f"{nbytes}_received"]
    return f"{counts[f'{messages}_sent']}, {counts[f'{messages}_received']}; {total}"


if __name__ == "__main__":
    sys.exit(main())
