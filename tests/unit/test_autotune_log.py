"""The log of autotuning: what it says, and that it can be loaded."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest

from hvdlite.autotune.log import Choice, TuningLog, Workload, read_choice
from hvdlite.config import Config, Tunable
from hvdlite.errors import ConfigError
from hvdlite.job_runtime import Runtime

JOB = Workload(ranks=4, nodes=2, gradient_bytes=1000)
DEFAULT = Tunable.of(Config())
FOUND = Tunable(bucket_bytes=1 << 20, segment_bytes=1 << 18, small_bytes=0, rails=1)


def write(path: Path, complete: bool = True) -> None:
    log = TuningLog(str(path), JOB)
    log.sample(8, DEFAULT, 0.0201, "defaults")
    log.sample(15, FOUND, 0.0105, "faster")
    if complete:
        log.choice(43, FOUND)


def test_there_and_back(tmp_path: Path) -> None:
    write(tmp_path / "log.csv")
    assert read_choice(str(tmp_path / "log.csv")) == Choice(JOB, FOUND)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [(row["sample"], row["step"], row["median_ms"], row["decision"]) for row in rows] == [
        ("0", "8", "20.100", "defaults"), ("1", "15", "10.500", "faster"), ("", "43", "", "chosen"),
    ]  # fmt: skip
    assert (rows[1]["bucket_bytes"], rows[1]["rails"], rows[1]["gradient_bytes"]) == (str(1 << 20), "1", "1000")


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    log = TuningLog(str(tmp_path / "log.csv"), JOB)
    log.sample(8, DEFAULT, 0.02, "defaults")
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2


def test_without_a_path_nothing_is_written() -> None:
    log = TuningLog("", JOB)
    log.sample(8, DEFAULT, 0.02, "defaults")
    log.choice(15, DEFAULT)


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = TuningLog(str(tmp_path / "none" / "log.csv"), JOB)
    log.sample(8, DEFAULT, 0.02, "defaults")
    log.choice(15, DEFAULT)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "HVDLITE_AUTOTUNE_LOG: [Errno 2]" in record.message


def test_what_is_not_complete_holds_no_choice(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    assert read_choice(str(path)) is None
    path.write_text("")
    assert read_choice(str(path)) is None
    write(path, complete=False)
    assert read_choice(str(path)) is None


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("bucket_bytes", "buckets", "no column 'bucket_bytes'"),
        (",1048576,", ",0,", "bucket_bytes is '0' in the last line"),
        (",1048576,", ",-5,", "bucket_bytes is '-5' in the last line"),
        (",4,2,", ",four,2,", "ranks is 'four' in the last line"),
        ("sample", "\0", r"HVDLITE_AUTOTUNE_LOAD=.*log.csv: "),
    ],
)
def test_other_files_are_refused(tmp_path: Path, old: str, new: str, match: str) -> None:
    path = tmp_path / "log.csv"
    write(path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=match):
        read_choice(str(path))
    with pytest.raises(ConfigError, match=match):
        Runtime(None, Config(autotune_load=str(path), autotune=True))


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        read_choice(str(tmp_path))


def test_a_choice_is_asked_for_and_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file.*Set HVDLITE_AUTOTUNE=1 as well"):
        Runtime(None, Config(autotune_load=str(tmp_path / "none.csv")))
    with Runtime(None, Config(autotune_load=str(tmp_path / "none.csv"), autotune=True)) as runtime:
        assert runtime.choice is None
    write(tmp_path / "log.csv")
    with Runtime(None, Config(autotune_load=str(tmp_path / "log.csv"))) as runtime:
        assert runtime.choice == Choice(JOB, FOUND)
