"""The log of a search, which can be loaded at the next start: CSV, a line per sample, and the choice at the end."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from hvdlite.config import Config, Tunable
from hvdlite.counted import counted
from hvdlite.errors import ConfigError

_LOG = logging.getLogger("hvdlite")
_CHOSEN = "chosen"


@dataclass(frozen=True)
class Workload:
    """What a choice depends on: it fits another start that has the same."""

    ranks: int
    nodes: int
    gradient_bytes: int

    def __str__(self) -> str:
        where = f"{counted(self.ranks, 'rank')} on {counted(self.nodes, 'node')}"
        return f"{where} with {self.gradient_bytes} bytes of gradients"


@dataclass(frozen=True)
class Choice:
    """What a search has found."""

    workload: Workload
    settings: Tunable


_WORKLOAD = [item.name for item in fields(Workload)]
_SETTINGS = Tunable._fields
_COLUMNS = ["sample", "step", *_WORKLOAD, *_SETTINGS, "median_ms", "decision"]
_MAY_BE_0 = ("small_bytes", "rails")


class TuningLog:
    """Writes the log, line by line as it happens. That it cannot be written is said once, and is no reason to stop.

    Args:
        path: of a file, which is replaced; empty for no log.
    """

    def __init__(self, path: str, workload: Workload) -> None:
        self._path = path
        self._workload = workload
        self._samples = 0
        self._write(_COLUMNS, "w")

    def sample(self, step: int, settings: Tunable, median_s: float, decision: str) -> None:
        """One that ended with step ``step`` of the program."""
        self._row(self._samples, step, settings, f"{median_s * 1e3:.3f}", decision)
        self._samples += 1

    def choice(self, step: int, settings: Tunable) -> None:
        """The last line."""
        self._row("", step, settings, "", _CHOSEN)

    def _row(self, sample: int | str, step: int, settings: Tunable, median_ms: str, decision: str) -> None:
        self._write([sample, step, *astuple(self._workload), *settings, median_ms, decision])

    def _write(self, cells: Sequence[object], mode: str = "a") -> None:
        if not self._path:
            return
        try:
            with open(self._path, mode) as file:
                file.write(",".join(map(str, cells)) + "\n")
        except OSError as error:
            _LOG.warning("HVDLITE_AUTOTUNE_LOG: %s; autotuning goes on without a log", error)
            self._path = ""


def load_choice(config: Config) -> Choice | None:
    """What the log that HVDLITE_AUTOTUNE_LOAD names has chosen; None where none is named, or autotuning goes on anew.

    Raises:
        ConfigError: there is no choice to load, or it cannot be read.
    """
    if not config.autotune_load:
        return None
    choice = read_choice(config.autotune_load)
    if choice is None and not config.autotune:
        raise ConfigError(
            f"HVDLITE_AUTOTUNE_LOAD={config.autotune_load}: there is no such file, or the job that wrote it ended "
            "before autotuning did. Set HVDLITE_AUTOTUNE=1 as well, so that it is chosen now."
        )
    return choice


def read_choice(path: str) -> Choice | None:
    """What the log at ``path`` ends with; None where there is no file, or its search did not come to an end.

    Raises:
        ConfigError: it cannot be read, or is no such log.
    """
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or _COLUMNS)]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"HVDLITE_AUTOTUNE_LOAD={path}: {error}") from error
    if missing:
        raise ConfigError(f"HVDLITE_AUTOTUNE_LOAD={path}: no log of autotuning: it has no column {missing[0]!r}")
    if not rows or rows[-1]["decision"] != _CHOSEN:
        return None
    workload, settings = (_numbers(path, rows[-1], names) for names in (_WORKLOAD, _SETTINGS))
    return Choice(Workload(**workload), Tunable(**settings))


def _numbers(path: str, row: Mapping[str, str], names: Sequence[str]) -> dict[str, int]:
    for name in names:
        if not row[name].isdecimal() or (int(row[name]) == 0 and name not in _MAY_BE_0):
            raise ConfigError(
                f"HVDLITE_AUTOTUNE_LOAD={path}: {name} is {row[name]!r} in the last line; remove the file"
            )
    return {name: int(row[name]) for name in names}
