"""Looks for bytes that targets of targets.py raise for: python3 tests/fuzz/fuzz.py TARGET[,...] [SECONDS] [DIRECTORY]

SECONDS are those of each TARGET, which may have its own, as in decoder:20. Needs Atheris (pip install '.[fuzz]'). What
is found is written to DIRECTORY/TARGET, and becomes a file of cases/TARGET once it is understood.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "fuzz")]

OF_INTEREST = [
    *(
        "hvdlite.links.proof",
        "hvdlite.coordinator.messages",
        "hvdlite.coordinator.tree",
        "hvdlite.coordinator.control_page",
    ),
    *(
        "hvdlite.remote_call",
        "hvdlite.timeline.trace_file",
        "hvdlite.cli.job",
        "hvdlite.config",
        "hvdlite.links.interfaces",
    ),
    *("hvdlite.liveness.sentinel_messages", "hvdlite.recovery.keeper", "hvdlite.recovery.second_copy", "hvdlite.plain"),
    *("hvdlite.cli.allocation", "hvdlite.cli.discovery", "hvdlite.cli.horovodrun", "hvdlite.cli.keepers"),
    *("hvdlite.cli.rank_notices", "hvdlite.cli.rank_words"),
    *("hvdlite.distributed.links", "hvdlite.distributed.doors", "hvdlite.distributed.call"),
    *(
        "hvdlite.doctor.station",
        "hvdlite.doctor.network",
        "hvdlite.links.link_probe",
        "hvdlite.node",
        "hvdlite.links.wire",
    ),
    *(
        "hvdlite.start.meeting_point",
        "hvdlite.recovery.membership",
        "hvdlite.recovery.safekeeping",
        "hvdlite.recovery.survivor_meeting",
    ),
]

with atheris.instrument_imports(include=OF_INTEREST, enable_loader_override=False):
    import targets


def main() -> int:
    names, *rest = sys.argv[1:]
    seconds = rest[0] if rest else "60"
    directory = Path(rest[1] if len(rest) > 1 else tempfile.mkdtemp(prefix="hvdlite-fuzz-"))
    status = 0
    for word in names.split(","):
        name, _, own_seconds = word.partition(":")
        # libFuzzer ends its process. Python code that is instrumented is imported once for all.
        child = os.fork()
        if child == 0:
            fuzz(name, own_seconds or seconds, directory / name)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended:
            print(f"{name}: ended with {ended}; see {directory / name}", file=sys.stderr)
            status = 1
    return status


def fuzz(name: str, seconds: str, directory: Path) -> None:
    """Ends this process."""
    target = targets.TARGETS[name]
    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*target.seeds, *targets.cases(name)]):
        (corpus / f"seed{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=2000", "-timeout=100", "-rss_limit_mb=2000", "-close_fd_mask=1"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={directory}/", str(corpus)], target.take)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
