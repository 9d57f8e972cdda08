"""horovodrun's options, for `python -m hvdlite run`: which setting each makes, or what is said where there is none."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlite.config import Config
from hvdlite.errors import ConfigError


def _megabytes(text: str) -> str:
    try:
        return str(int(float(text) * (1 << 20)))
    except OverflowError:
        raise ValueError("must be finite") from None


@dataclass(frozen=True)
class Option:
    """One option of horovodrun.

    Attributes:
        names: without dashes, separated by blanks; the first is horovodrun's long one.
        setting: what it sets: HVDLITE_<setting> for the ranks.
        key: its place in the file of --config-file. A switch stands there as true, or, if ``key`` begins with "not ",
            as false.
        arity: how many arguments it takes.
        value: what a switch sets.
        convert: from what the user writes to what `hvdlite.config` reads.
        note: said on stderr when it is given.
        refused: the job does not start, for the reason in ``note``.
        to_mpirun: its argument is words for mpirun.
        forces_mpi: mpirun starts the ranks, on one machine too.
        to_ssh: the option of ssh that its argument is for, where mpirun reaches hosts by ssh.
    """

    names: str
    setting: str = ""
    key: str = ""
    arity: int = 1
    value: str = ""
    convert: Callable[[str], str] = str
    note: str = ""
    refused: bool = False
    to_mpirun: bool = False
    forces_mpi: bool = False
    to_ssh: str = ""

    @property
    def name(self) -> str:
        return f"--{self.names.split()[0]}"


def _port(text: str) -> str:
    if not 0 < int(text) < 1 << 16:
        raise ConfigError("must be between 1 and 65535")
    return text


def _identity_file(text: str) -> str:
    path = os.path.abspath(os.path.expanduser(text))
    if not os.path.isfile(path):
        raise ConfigError("no such file")
    if path.split() != [path]:
        raise ConfigError("mpirun's ssh takes no path with blanks; name it in ~/.ssh/config")
    return path


def _switch(names: str, setting: str = "", value: str = "", key: str = "", note: str = "") -> Option:
    return Option(names, setting, key, arity=0, value=value, note=note)


_NO_GLOO = "hvdlite communicates by shared memory and MPI, without Gloo; one machine needs neither, several need MPI"
_NO_ELASTIC = "not used: --restarts says how many processes may be started in place of those that fail"
_NO_JSRUN = (
    "hvdliterun does not run jsrun, but hvdlite knows what jsrun starts: jsrun -n RANKS -a 1 -c CORES python train.py "
    "(-g 1: a GPU each)"
)
_NO_CHOICE = "hvdlite chooses by the number of nodes and bytes; ignored"
_NO_SETTING = "hvdlite has no such setting; ignored"

OPTIONS = (
    Option("fusion-threshold-mb", "FUSION_THRESHOLD", "params.fusion_threshold_mb", convert=_megabytes),
    Option("cycle-time-ms", "CYCLE_TIME", "params.cycle_time_ms"),
    Option("cache-capacity", "CACHE_CAPACITY", "params.cache_capacity"),
    Option("timeline-filename", "TIMELINE", "timeline.filename"),
    _switch("timeline-mark-cycles", "TIMELINE_MARK_CYCLES", "1", "timeline.mark_cycles"),
    _switch("no-timeline-mark-cycles", "TIMELINE_MARK_CYCLES", "0", "not timeline.mark_cycles"),
    _switch("autotune", "AUTOTUNE", "1", "autotune.enabled"),
    _switch("no-autotune", "AUTOTUNE", "0", "not autotune.enabled"),
    Option("autotune-log-file", "AUTOTUNE_LOG", "autotune.log_file"),
    Option("autotune-warmup-samples", "AUTOTUNE_WARMUP_SAMPLES", "autotune.warmup_samples"),
    Option("autotune-steps-per-sample", "AUTOTUNE_STEPS_PER_SAMPLE", "autotune.steps_per_sample"),
    Option("autotune-bayes-opt-max-samples", "AUTOTUNE_MAX_SAMPLES", "autotune.bayes_opt_max_samples"),
    _switch("no-stall-check", "STALL_CHECK_DISABLE", "1", "not stall_check.enabled"),
    _switch("stall-check", "STALL_CHECK_DISABLE", "0", "stall_check.enabled"),
    Option("stall-check-warning-time-seconds", "STALL_CHECK_TIME_SECONDS", "stall_check.warning_time_seconds"),
    Option("stall-check-shutdown-time-seconds", "STALL_SHUTDOWN_TIME_SECONDS", "stall_check.shutdown_time_seconds"),
    Option("start-timeout", "START_TIMEOUT"),
    _switch("mpi-threads-disable", "MPI_THREADS_DISABLE", "1", "library_options.mpi_threads_disable"),
    _switch("no-mpi-threads-disable", "MPI_THREADS_DISABLE", "0", "not library_options.mpi_threads_disable"),
    Option("log-level", "LOG_LEVEL", "logging.level"),
    _switch("log-without-timestamp log-hide-timestamp", "LOG_HIDE_TIME", "1", "not logging.with_timestamp"),
    _switch("log-with-timestamp no-log-hide-timestamp", "LOG_HIDE_TIME", "0", "logging.with_timestamp"),
    Option("mpi-args", to_mpirun=True),
    Option("binding-args", to_mpirun=True),
    Option("mpi", arity=0, forces_mpi=True),
    Option("ssh-port p", to_ssh="-p", convert=_port),
    Option("ssh-identity-file i", to_ssh="-i", convert=_identity_file),
    # What follows is not here.
    _switch("gloo", note=_NO_GLOO),
    Option("jsrun", arity=0, refused=True, note=_NO_JSRUN),
    _switch("tcp", note="ignored; mpirun chooses: with Open MPI give --mca btl self,sm,tcp"),
    Option("gloo-timeout-seconds", key="library_options.gloo_timeout_seconds", note=_NO_GLOO),
    Option(
        "autotune-gaussian-process-noise",
        key="autotune.gaussian_process_noise",
        note="hvdlite compares measured step times, without a Gaussian process; ignored",
    ),
    _switch("hierarchical-allreduce", key="params.hierarchical_allreduce", note=_NO_CHOICE),
    _switch("no-hierarchical-allreduce", key="not params.hierarchical_allreduce", note=_NO_CHOICE),
    _switch("hierarchical-allgather", key="params.hierarchical_allgather", note=_NO_CHOICE),
    _switch("no-hierarchical-allgather", key="not params.hierarchical_allgather", note=_NO_CHOICE),
    _switch("torus-allreduce", note=_NO_CHOICE),
    _switch("no-torus-allreduce", note=_NO_CHOICE),
    Option("elastic-timeout", "ELASTIC_TIMEOUT"),
    Option("reset-limit", note=_NO_ELASTIC),
    Option("blacklist-cooldown-range", arity=2, note=_NO_ELASTIC),
    Option("num-nccl-streams", key="library_options.num_nccl_streams", note=_NO_SETTING),
    Option("thread-affinity", key="library_options.thread_affinity", note=_NO_SETTING),
    Option("ccl-bgt-affinity", key="library_options.ccl_bgt_affinity", note=_NO_SETTING),
    _switch("disable-cache", note="nothing is kept from one start to the next anyway"),
    _switch(
        "prefix-output-with-timestamp prefix-timestamp",
        note="ignored; mpirun may do it: --timestamp-output with Open MPI",
    ),
)
BY_NAME = {name: option for option in OPTIONS for name in option.names.split()}


@dataclass
class Effects:
    """What the options come to.

    Attributes:
        settings: variables for the ranks.
        mpirun: words for it.
        ssh: its options, with an argument each, where mpirun reaches hosts by ssh.
        notes: sentences for the user.
        forces_mpi: see `Option`.
    """

    settings: dict[str, str] = field(default_factory=dict)
    mpirun: list[str] = field(default_factory=list)
    ssh: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    forces_mpi: bool = False

    def add(self, option: Option, text: str = "", where: str = "") -> None:
        """Add those of ``option`` with its argument ``text``, given as ``where``, by default by its name.

        Raises:
            ConfigError: the argument makes no sense; hvdlite cannot do without what the option asks for.
        """
        where = where or option.name
        if option.refused:
            raise ConfigError(f"{where}: {option.note}")
        if option.note:
            self.notes.append(f"{where}: {option.note}")
        if option.setting:
            variable = f"HVDLITE_{option.setting}"
            self.settings[variable] = _checked(option, variable, text, where)
        self.forces_mpi |= option.forces_mpi
        if option.to_mpirun:
            self.mpirun += _words(text, where)
        if option.to_ssh:
            self.ssh[option.to_ssh] = _converted(option, text, where)


def _checked(option: Option, variable: str, text: str, where: str) -> str:
    if option.arity == 0:
        return option.value
    value = _converted(option, text, where)
    try:
        Config.from_env({variable: value})
    except ConfigError as error:
        raise ConfigError(f"{where} {text}: {str(error).partition(': ')[2]}") from error
    return value


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{where} {text}: {error}") from error


def _converted(option: Option, text: str, where: str) -> str:
    try:
        return option.convert(text)
    except ConfigError as error:
        raise ConfigError(f"{where} {text}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where} {text}: must be a number") from error


def read_config_file(path: str) -> Effects:
    """The effects of horovodrun's --config-file: YAML, sections of options.

    Raises:
        ConfigError: the file cannot be read, or says what makes no sense; PyYAML is not installed.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            "--config-file needs PyYAML, which is not installed: pip install pyyaml, or give the options themselves"
        ) from error
    try:
        with open(path) as file:
            sections = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"--config-file {path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path}: {error}") from error
    except Exception as error:  # whatever PyYAML raises for tags that do not fit, and where it is nested too deeply
        raise ConfigError(f"--config-file {path} cannot be read: {error!r}") from error
    if not isinstance(sections, Mapping):
        raise ConfigError(f"--config-file {path}: must hold sections, as params: and timeline:")
    effects = Effects()
    for section, entries in sections.items():
        if isinstance(entries, Mapping):
            for name, value in entries.items():
                _add_entry(effects, path, f"{section}.{name}", value)
        elif entries is not None and any(option.key.startswith(f"{section}.") for option in OPTIONS):
            raise ConfigError(f"{path}: {section} {entries!r}: must be a section, of names with values")
        else:
            _add_entry(effects, path, str(section), entries)
    return effects


def _found(path: str, key: str, value: object) -> Option | None:
    """Raises ConfigError where ``value`` is nothing that the option of ``key`` may be."""
    found = [option for option in OPTIONS if option.key.removeprefix("not ") == key]
    if not found:
        return None
    is_switch = found[0].arity == 0
    is_one_line = not isinstance(value, Mapping | list) and str(value).isprintable()
    if isinstance(value, bool) is not is_switch or not is_one_line:
        kind = "true or false" if is_switch else "a number or a line of text"
        raise ConfigError(f"{path}: {key} {value!r}: must be {kind}")
    return next(option for option in found if option.key.startswith("not ") is (value is False))


def _add_entry(effects: Effects, path: str, key: str, value: object) -> None:
    if value is None:
        return
    if key == "logging.hide_timestamp" and isinstance(value, bool):  # so Horovod's own example has it
        key, value = "logging.with_timestamp", not value
    option = BY_NAME.get(str(value).lower()) if key == "controller" else _found(path, key, value)
    if option is None:
        effects.notes.append(f"{path}: {key}: {value}: hvdlite has no such setting; ignored")
    else:
        effects.add(option, str(value), where=f"{path}: {key}")
