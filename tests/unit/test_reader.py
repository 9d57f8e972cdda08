"""What the command line tools do where nobody reads what they print, or the disk is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.timeline.chrome_trace import TraceWriter
from hvdlite.timeline.trace_file import TraceFile

TOOLS = [
    "--help",
    "horovod --help",
    "run --help",
    "run --version",
    "run --check-build",
    "doctor --no-check --json",
    "timeline report {trace}",
    "timeline report --json {trace}",
    "timeline merge {trace}.merged {trace}",
    "bench allreduce --max-bytes 1K",
    "bench allreduce --max-bytes 1K --json",
]


def run(words: str, trace: Path, stdout: int) -> tuple[int, str]:
    TraceFile(str(trace), 0).open(TraceWriter(0, 0, 0).introduction())
    command = [sys.executable, "-m", "hvdlite", *words.format(trace=trace).split()]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", TOOLS)
def test_a_reader_that_has_gone(words: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(words, tmp_path / "trace.json", writer) == (128 + signal.SIGPIPE, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", ["run --version", "timeline report {trace}"])
def test_a_full_disk(words: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        status, errors = run(words, tmp_path / "trace.json", full.fileno())
    assert (status, errors) == (1, "hvdlite: cannot write: No space left on device\n")
