"""Looks for bytes that a target of targets.py raises for: python3 tests/fuzz/fuzz.py TARGET [SECONDS] [DIRECTORY]

Needs Atheris (pip install '.[fuzz]'). What is found is written to DIRECTORY, and becomes a file of cases/TARGET once it
is understood.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "fuzz")]

OF_INTEREST = [
    *("hvdlite.proof", "hvdlite.coordinator.messages", "hvdlite.coordinator.tree", "hvdlite.coordinator.control_page"),
    *("hvdlite.remote_call", "hvdlite.timeline.trace_file", "hvdlite.cli.job", "hvdlite.config", "hvdlite.interfaces"),
    *("hvdlite.sentinel_messages", "hvdlite.keeper", "hvdlite.second_copy", "hvdlite.plain"),
    *("hvdlite.cli.allocation", "hvdlite.cli.discovery", "hvdlite.cli.horovodrun", "hvdlite.cli.keepers"),
    *("hvdlite.cli.rank_words", "hvdlite.distributed.links", "hvdlite.distributed.doors", "hvdlite.distributed.call"),
    *("hvdlite.doctor.station", "hvdlite.doctor.network", "hvdlite.link_probe", "hvdlite.node", "hvdlite.wire"),
    *("hvdlite.meeting_point", "hvdlite.membership", "hvdlite.safekeeping", "hvdlite.survivor_meeting"),
]

with atheris.instrument_imports(include=OF_INTEREST, enable_loader_override=False):
    import targets


def main() -> None:
    name, *rest = sys.argv[1:]
    seconds = rest[0] if rest else "60"
    directory = rest[1] if len(rest) > 1 else tempfile.mkdtemp(prefix="hvdlite-fuzz-")
    target = targets.TARGETS[name]
    corpus = Path(directory, "corpus")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*target.seeds, *targets.cases(name)]):
        (corpus / f"seed{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=2000", "-timeout=100", "-rss_limit_mb=2000", "-close_fd_mask=1"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={directory}/", str(corpus)], target.take)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
