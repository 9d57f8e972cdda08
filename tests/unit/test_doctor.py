"""`python -m hvdlite doctor`, without its check, which starts ranks (tests/faults/test_run_front.py)."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

import hvdlite
from hvdlite import control_groups, launched
from hvdlite.cli import doctor
from hvdlite.doctor import facts
from hvdlite.doctor.check import summary


def test_what_it_finds_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(["--json", "--no-check"])
    found = json.loads(capsys.readouterr().out)
    assert status == bool(found["problems"])
    assert found["versions"]["hvdlite"] == hvdlite.__version__
    assert found["machine"]["cores of this process"] >= 1
    assert found["machine"]["memory bytes"] > found["machine"]["memory available bytes"] > 0
    assert found["limits"]["open files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found["native"]["instruction set"] in ("plain", "avx2", "avx512")
    assert [fact["there"] for fact in found["build"]["Frameworks"]] == [True, False, False]


def test_what_launchers_tell_ranks_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hold secrets."""
    told = ("KEEPER", "CALL_KEY", "DOCTOR", "MEETING_POINT", "WORKER", "START", "NOTICES", "TO_SAVE", "RAY_JOB")
    for name in told:
        monkeypatch.setenv(f"HVDLITE_{name}", "a secret")
    assert "a secret" not in str(facts.of_machine())


def test_problems_come_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "_limit", lambda kind: 256)
    monkeypatch.setattr(facts, "_PACKAGES", ())
    assert doctor.main(["--no-check"]) == 1
    first, *problems = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert first == "Problems:"
    assert "`ulimit -n 1024` or more" in problems[0]
    assert "only 256 processes and threads may run" in problems[1]
    assert problems[2].strip().endswith("torch is not installed: pip install torch")


def test_ranks_that_do_not_work_together_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise hvdlite.StartupError("the ranks did not start")

    monkeypatch.setattr(hvdlite, "run", fail)
    assert doctor.main([]) == 1
    assert "two ranks do not work together here: the ranks did not start" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_that_fails_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    def fail(*_: object) -> None:
        raise hvdlite.StartupError("rank 1 was not heard of")

    monkeypatch.setattr(launched, "this_process", lambda: launched.Launched(launched.OPEN_MPI, rank, 2))
    monkeypatch.setattr(doctor.job, "examine", fail)
    assert doctor.main(["--json"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "hvdlite doctor: rank 1 was not heard of\n"
    assert printed.out == ("" if rank else json.dumps({"problems": ["rank 1 was not heard of"]}, indent=2) + "\n")


def test_wrong_sums_are_a_problem() -> None:
    ranks = [{"wrong": 0.0, "allreduce": 2.0, "memcpy": 5.0}, {"wrong": 3.0, "allreduce": 1.0, "memcpy": 6.0}]
    found = summary(ranks, 1 << 20)
    assert found["problem"].startswith("an allreduce had 3 wrong elements")
    assert (found["allreduce GB/s"], found["memcpy GB/s"]) == (1.0, 5.0)


def seen(own: str, files: dict[str, str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process be in the groups of ``own``, which have ``files``."""
    (place / "own").write_text(own)
    for name, text in files.items():
        path = place / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(control_groups, "_OWN", place / "own")
    monkeypatch.setattr(control_groups, "_ROOT", place / "groups")


@pytest.mark.parametrize(
    ("own", "files", "memory", "processes"),
    [
        ("0::/\n", {}, None, None),
        ("0::/\n", {"memory.max": "max", "pids.max": "max"}, None, None),
        ("0::/\n", {"memory.max": "1073741824", "pids.max": "300"}, 1 << 30, 300),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "4096", "pids.max": "9"}, 4096, 9),
        ("0::/of/a/host\n", {"memory.max": "4096"}, 4096, None),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "8192"}, 8192, None),
        ("4:memory:/x\n0::/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None, None),
        ("4:cpu:/\n", {"memory.max": "4096"}, None, None),
    ],
)
def test_limits_of_control_groups(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: str,
    files: dict[str, str],
    memory: int | None,
    processes: int | None,
) -> None:
    seen(own, files, tmp_path, monkeypatch)
    assert (control_groups.memory_bytes(), control_groups.processes()) == (memory, processes)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/job/step\n", {"job/step/cpu.max": "400000 100000", "job/cpu.max": "50000 100000"}, 0.5),
        ("5:cpu,cpuacct:/x\n0::/\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "200000"}, None),
        ("5:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "150000", "cpu/x/cpu.cfs_period_us": "50000"}, 3.0),
        ("5:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_time_of_control_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str], cores: float | None
) -> None:
    seen(own, files, tmp_path, monkeypatch)
    assert control_groups.cores() == cores
