"""One machine: its facts, what is built in, and two ranks that are started to check it."""

from __future__ import annotations

import time
from typing import Any

import hvdlite
from hvdlite.cli import check_build
from hvdlite.doctor import facts, findings
from hvdlite.doctor.check import CHECK_BYTES, check_group, summary

_CHECK_RANKS = 2
_CHECK_S = 0.5  # of each of the two bandwidths


def examine() -> dict[str, Any]:
    """Versions, machine, limits, what is built in, and problems in words. No hostname, no user."""
    found = facts.of_machine()
    found["build"] = {title: [fact._asdict() for fact in facts] for title, facts in check_build.sections().items()}
    found["problems"] = [finding.text for finding in findings.of_machine(found) if finding.is_problem]
    return found


def check() -> dict[str, Any]:
    """Run two ranks: whether sums are right, and bytes per second beside memcpy. About two seconds."""
    start = time.monotonic()
    try:
        ranks = hvdlite.run(check_rank, num_proc=_CHECK_RANKS)
    except Exception as error:  # whatever it is, it is what the doctor was called for
        return {"problem": f"two ranks do not work together here: {error}"}
    return {**summary(ranks, CHECK_BYTES), "seconds": time.monotonic() - start}


def check_rank() -> dict[str, float]:
    """On each of the two ranks."""
    hvdlite.init()
    return check_group(hvdlite.runtime().group, _CHECK_S, CHECK_BYTES)
