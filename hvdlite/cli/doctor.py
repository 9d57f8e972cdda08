"""`python -m hvdlite doctor`: whether hvdlite works on this machine, or on the hosts whose ranks run this."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hvdlite import launched
from hvdlite.cli import check_build
from hvdlite.cli.reader import ends_with_reader
from hvdlite.config import Config
from hvdlite.doctor import before_mpi, job, machine, report
from hvdlite.errors import StartupError


@ends_with_reader
def main(argv: Sequence[str]) -> int:
    """Print what was found, on the first rank where there are several; returns 1 there if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdlite doctor",
        description="Examine this machine, and whether hvdlite works on it; or several hosts, and the network between "
        "them: hvdliterun --doctor -np 4 -H a:2,b:2",
    )
    parser.add_argument("--json", action="store_true", help="for a bug report or a program")
    parser.add_argument("--no-check", action="store_true", help="on one machine: start no ranks, and measure nothing")
    options = parser.parse_args(argv)
    process = launched.this_process()
    if process is not None and process.size > 1:
        return _of_job(process.rank, as_json=options.json)
    found = machine.examine()
    if not options.no_check:
        found["check"] = machine.check()
        problem = found["check"].get("problem")
        found["problems"] += [problem] if problem else []
    _print(found, "" if options.json else report.of_machine(found, check_build.report()))
    return 1 if found["problems"] else 0


def _of_job(own_rank: int, *, as_json: bool) -> int:
    try:
        config = Config.from_env()
        obstacles = before_mpi.look_around(job.addresses_of(config))
        if obstacles:
            found = {"problems": [finding.text for finding in obstacles]}
            _print(found, "" if as_json else report.verdict(found))
            return 1
        rank, found = job.examine(config)
    except StartupError as error:
        if as_json and own_rank == 0:
            _print({"problems": [str(error)]}, "")
        print(f"hvdlite doctor: {error}", file=sys.stderr)
        return 1
    if rank != 0:
        return 0
    _print(found, "" if as_json else report.of_job(found))
    return 1 if found["problems"] else 0


def _print(found: dict[str, Any], text: str) -> None:
    print(text or json.dumps(found, indent=2))
