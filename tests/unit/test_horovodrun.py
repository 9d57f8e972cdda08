"""horovodrun's options in `python -m hvdlite run`: the settings they make, and what is said of the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdlite.cli import arguments as front, run
from hvdlite.cli.horovodrun import BY_NAME, OPTIONS
from hvdlite.cli.job import Host
from hvdlite.config import Config
from hvdlite.errors import ConfigError


def parse(*words: str) -> front.Arguments:
    return front.parse(["-np", "2", *words, "train.py", "--epochs", "3"])


@pytest.mark.parametrize(
    ("words", "variable", "value"),
    [
        ("--fusion-threshold-mb 64", "FUSION_THRESHOLD", str(64 << 20)),
        ("--fusion-threshold-mb=0", "FUSION_THRESHOLD", "0"),
        ("--cycle-time-ms 2.5", "CYCLE_TIME", "2.5"),
        ("--cache-capacity 10", "CACHE_CAPACITY", "10"),
        ("--timeline-filename trace.json", "TIMELINE", "trace.json"),
        ("--timeline-mark-cycles", "TIMELINE_MARK_CYCLES", "1"),
        ("--timeline-mark-cycles --no-timeline-mark-cycles", "TIMELINE_MARK_CYCLES", "0"),
        ("--no-stall-check", "STALL_CHECK_DISABLE", "1"),
        ("--stall-check-warning-time-seconds 5", "STALL_CHECK_TIME_SECONDS", "5"),
        ("--stall-check-shutdown-time-seconds 6", "STALL_SHUTDOWN_TIME_SECONDS", "6"),
        ("--start-timeout 7", "START_TIMEOUT", "7"),
        ("--log-level DEBUG", "LOG_LEVEL", "DEBUG"),
        ("--log-hide-timestamp", "LOG_HIDE_TIME", "1"),
        ("--mpi-threads-disable", "MPI_THREADS_DISABLE", "1"),
        ("--autotune", "AUTOTUNE", "1"),
        ("--autotune --no-autotune", "AUTOTUNE", "0"),
        ("--autotune-log-file log.csv", "AUTOTUNE_LOG", "log.csv"),
        ("--autotune-warmup-samples 0", "AUTOTUNE_WARMUP_SAMPLES", "0"),
        ("--autotune-steps-per-sample 10", "AUTOTUNE_STEPS_PER_SAMPLE", "10"),
        ("--autotune-bayes-opt-max-samples 20", "AUTOTUNE_MAX_SAMPLES", "20"),
    ],
)
def test_settings(words: str, variable: str, value: str) -> None:
    arguments = parse(*words.split())
    assert arguments.effects.settings == {f"HVDLITE_{variable}": value}
    assert arguments.effects.notes == []
    assert (arguments.options, arguments.program) == ([], ["train.py", "--epochs", "3"])


def test_every_setting_exists() -> None:
    known = {name for item in fields(Config) for name in item.metadata["names"]}
    assert {option.setting for option in OPTIONS if option.setting} <= known


def test_every_option_does_or_says_something() -> None:
    for option in OPTIONS:
        assert option.setting or option.note or option.to_mpirun or option.to_ssh or option.forces_mpi, option.names


def test_no_name_stands_twice() -> None:
    names = [name for option in OPTIONS for name in option.names.split()]
    assert len(names) == len(BY_NAME)
    assert not BY_NAME.keys() & (front._SWITCHES | front._WITH_ARGUMENT)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--gloo", "--gloo: hvdlite communicates by shared memory and MPI"),
        ("--autotune-gaussian-process-noise 0.5", "--autotune-gaussian-process-noise: hvdlite compares measured"),
        ("--reset-limit 4", "--reset-limit: not used: --restarts says"),
        ("--blacklist-cooldown-range 60 300", "--blacklist-cooldown-range: not used"),
        ("--hierarchical-allreduce", "--hierarchical-allreduce: hvdlite chooses"),
        ("--torus-allreduce", "--torus-allreduce: hvdlite chooses"),
        ("--num-nccl-streams 2", "no such setting"),
    ],
)
def test_what_is_not_here_is_said(words: str, text: str) -> None:
    arguments = parse(*words.split())
    assert text in arguments.effects.notes[-1]
    assert arguments.effects.settings == {}
    assert arguments.program == ["train.py", "--epochs", "3"]


def test_what_cannot_be_done_without_is_refused() -> None:
    with pytest.raises(ConfigError, match="--jsrun: hvdliterun does not run jsrun, .* jsrun -n RANKS -a 1 -c CORES"):
        parse("--jsrun")


def test_port_and_key_for_ssh(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    arguments = parse("-p", "22", "-i", str(key), "--ssh-port=2222", "-H", "a:1,b:1")
    assert arguments.effects.notes == []
    assert run.launch_of(arguments, {}).ssh == ("-p", "2222", "-i", str(key))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--fusion-threshold-mb many", "--fusion-threshold-mb many: must be a number"),
        ("--fusion-threshold-mb inf", "--fusion-threshold-mb inf: must be a number"),
        ("--cycle-time-ms -1", "--cycle-time-ms -1: must not be negative"),
        ("--start-timeout 0", "--start-timeout 0: must be above 0"),
        ("--log-level loud", "--log-level loud: must be trace, debug"),
        ("--ssh-port ssh", "--ssh-port ssh: must be a number"),
        ("--ssh-port 65536", "--ssh-port 65536: must be between 1 and 65535"),
        ("--elastic=false", "--elastic=false: --elastic takes no argument"),
        ("--no-stall-check=0", "--no-stall-check=0: --no-stall-check takes no argument"),
        ("-i /nonexistent/key", "--ssh-identity-file /nonexistent/key: no such file"),
    ],
)
def test_mistakes_name_the_option(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse(*words.split())


def test_a_missing_argument() -> None:
    with pytest.raises(ConfigError, match="--cycle-time-ms needs an argument"):
        front.parse(["-np", "2", "--cycle-time-ms"])
    with pytest.raises(ConfigError, match="--blacklist-cooldown-range needs 2 arguments"):
        front.parse(["-np", "2", "--blacklist-cooldown-range", "1"])


def test_words_for_mpirun_that_are_not_complete() -> None:
    with pytest.raises(ConfigError, match="--mpi-args --x 'A: No closing quotation"):
        parse("--mpi-args=--x 'A")


def test_words_for_mpirun() -> None:
    arguments = parse("--mpi-args=--map-by ppr:2:node -x 'A=b c'", "--report-bindings", "--mpi", "--binding-args=--x y")
    assert arguments.options == ["--report-bindings", "--map-by", "ppr:2:node", "-x", "A=b c", "--x", "y"]


def test_what_horovodrun_and_we_call_differently() -> None:
    arguments = front.parse(
        "--num-proc 3 --hosts a:2,b:1 --network-interface eth0 --network-interface ib0 t.py".split()
    )
    assert (arguments.ranks, arguments.hosts, arguments.interfaces) == (3, (Host("a", 2), Host("b", 1)), "eth0,ib0")


class TestConfigFile:
    """PyYAML need not be there: JSON is YAML, and json stands in for it."""

    SECTIONS = {  # noqa: RUF012 (not changed)
        "controller": "gloo",
        "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 5.5, "hierarchical_allreduce": False},
        "autotune": {"enabled": False, "warmup_samples": None},
        "timeline": {"filename": "t.json", "mark_cycles": True},
        "stall_check": {"enabled": False, "warning_time_seconds": 120},
        "logging": {"level": "INFO", "with_timestamp": True},
        "verbosity": {"colour": "red"},
    }

    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=json.load, YAMLError=ValueError))
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(self.SECTIONS))
        return str(path)

    def test_sections(self, path: str) -> None:
        effects = parse("--config-file", path).effects
        assert effects.settings == {
            "HVDLITE_FUSION_THRESHOLD": str(32 << 20),
            "HVDLITE_CYCLE_TIME": "5.5",
            "HVDLITE_AUTOTUNE": "0",
            "HVDLITE_TIMELINE": "t.json",
            "HVDLITE_TIMELINE_MARK_CYCLES": "1",
            "HVDLITE_STALL_CHECK_DISABLE": "1",
            "HVDLITE_STALL_CHECK_TIME_SECONDS": "120",
            "HVDLITE_LOG_LEVEL": "INFO",
            "HVDLITE_LOG_HIDE_TIME": "0",
        }
        said = [note.removeprefix(f"{path}: ") for note in effects.notes]
        assert len(said) == 3
        assert said[0].startswith("controller: hvdlite communicates by shared memory")
        assert said[1].startswith("params.hierarchical_allreduce: hvdlite chooses")
        assert said[2] == "verbosity.colour: red: hvdlite has no such setting; ignored"

    @pytest.mark.parametrize("hides", [True, False])
    def test_timestamps_may_be_hidden_instead_of_shown(self, path: str, hides: bool) -> None:
        Path(path).write_text(json.dumps({"logging": {"hide_timestamp": hides}}))
        effects = parse("--config-file", path).effects
        assert (effects.settings, effects.notes) == ({"HVDLITE_LOG_HIDE_TIME": str(int(hides))}, [])

    def test_options_win_wherever_they_stand(self, path: str) -> None:
        arguments = parse("--cycle-time-ms", "1", "--stall-check", "--config-file", path)
        assert arguments.effects.settings["HVDLITE_CYCLE_TIME"] == "1"
        assert arguments.effects.settings["HVDLITE_STALL_CHECK_DISABLE"] == "0"

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("{", "config.yaml: Expecting"),
            ("[1]", "must hold sections"),
            ('{"params": 3}', "config.yaml: params 3: must be a section, of names with values"),
            ('{"params": {"cycle_time_ms": "long"}}', "config.yaml: params.cycle_time_ms long: must be a number"),
            ('{"params": {"cycle_time_ms": true}}', "config.yaml: params.cycle_time_ms True: must be a number or"),
            ('{"timeline": {"filename": ["a"]}}', r"config.yaml: timeline.filename \['a'\]: must be a number or"),
            ('{"timeline": {"filename": "a\\u0000"}}', "config.yaml: timeline.filename .*: must be a number or"),
            ('{"autotune": {"enabled": "true"}}', "config.yaml: autotune.enabled 'true': must be true or false"),
        ],
    )
    def test_mistakes(self, path: str, text: str, match: str) -> None:
        Path(path).write_text(text)
        with pytest.raises(ConfigError, match=match):
            parse("--config-file", path)

    def test_no_such_file(self, path: str) -> None:
        with pytest.raises(ConfigError, match="none: No such file"):
            parse("--config-file", f"{path}.none")

    def test_without_pyyaml(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        with pytest.raises(ConfigError, match="needs PyYAML, which is not installed: pip install pyyaml"):
            parse("--config-file", str(tmp_path / "config.yaml"))


class TestRunning:
    """With a shell script in mpirun's place, which stands for rank 3 of 12."""

    @pytest.fixture
    def mpirun(self, tmp_path: Path) -> str:
        path = tmp_path / "mpirun"
        version = '[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit'
        skip = 'while [ "$1" != sh ] && [ "$1" != printenv ]; do shift; done'
        path.write_text(f'#!/bin/sh\n{version}\n{skip}\nOMPI_COMM_WORLD_RANK=3 "$@"\n')
        path.chmod(0o755)
        return str(path)

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hvdlite", "run", *words]
        return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)

    def test_settings_reach_the_ranks_and_the_printed_line(self, mpirun: str) -> None:
        words = ["--cycle-time-ms", "3", "--gloo", "printenv", "HVDLITE_CYCLE_TIME"]
        done = self.run("--mpirun", mpirun, "-np", "2", *words)
        assert (done.returncode, done.stdout) == (0, "3\n")
        assert "hvdlite run: --gloo: hvdlite communicates" in done.stderr
        assert "\n+ HVDLITE_CYCLE_TIME=3 " in done.stderr

    def test_verbose_shows_the_settings(self, mpirun: str) -> None:
        words = ["--timeline-filename", "t", "--verbose", "--dry-run", "printenv"]
        done = self.run("--mpirun", mpirun, "-np", "2", *words, HOROVOD_LOG_LEVEL="debug", HVDLITE_CALL_KEY="secret")
        assert done.returncode == 0
        assert "\n  HOROVOD_LOG_LEVEL=debug\n" in done.stderr and "\n  HVDLITE_TIMELINE=t\n" in done.stderr
        assert "secret" not in done.stderr

    def test_output_into_files(self, mpirun: str, tmp_path: Path) -> None:
        words = ["--output-filename", str(tmp_path / "a b"), "sh", "-c", "echo out; echo err >&2; exit 5"]
        done = self.run("--mpirun", mpirun, "-np", "12", *words)
        assert (done.returncode, done.stdout) == (5, "")
        assert (tmp_path / "a b" / "rank.03" / "stdout").read_text() == "out\n"
        assert (tmp_path / "a b" / "rank.03" / "stderr").read_text() == "err\n"


def test_check_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--check-build"]) == 0
    text = capsys.readouterr().out
    assert "[X] PyTorch" in text and "[X] MPI, between nodes" in text and "[ ] Gloo" in text
    assert run.main(["-cb"]) == 0
    assert capsys.readouterr().out == text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hvdlite 0.")
