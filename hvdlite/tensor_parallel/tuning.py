"""Which way of exchanging rows is the fastest, by a short measurement at first use; kept in a file, if there is one."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvdlite.errors import UsageError
from hvdlite.tensor_parallel.meeting import Meeting
from hvdlite.tensor_parallel.methods import Method

_LOG = logging.getLogger("hvdlite")
_TRIES = 3
_FASTER = 0.98  # of the time of the first option: what is no faster than that may be so by chance

Attempt = Callable[[Method], object]
"""Does an exchange by a method, and returns when it is done."""


class Tuner:
    """Decides for the ranks of ``meeting``, alike on all; what was decided once stays.

    Args:
        path: of the file, which the first rank reads and writes; empty: none.
        clock: in seconds.
    """

    def __init__(self, meeting: Meeting, path: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._meeting = meeting
        self._path = Path(path) if path and meeting.rank == 0 else None
        self._clock = clock
        self._chosen: dict[str, Method] = {}

    def choose(self, exchange: str, options: Sequence[Method], attempt: Attempt) -> Method:
        """The first of ``options``, or the fastest if it was clearly faster than the first in every try.

        All ranks come with the same ``exchange`` and ``options``.

        Raises:
            MismatchError: they do not; the same text on every rank.
            UsageError: the file cannot be read, or is none of ours; the same text on every rank.
        """
        key = f"{exchange}, {self._meeting.size} ranks"
        if key not in self._chosen:
            self._meeting.meet(exchange)
            self._chosen[key] = self._kept(key, options) or self._measured(key, options, attempt)
        return self._chosen[key]

    def _kept(self, key: str, options: Sequence[Method]) -> Method | None:
        """What the file says, on every rank."""
        told, why = "", ""
        if self._path is not None:
            try:
                kept = _read(self._path).get(key, {}).get("method")
                told = next((method.value for method in options if method.value == kept), "")
            except (OSError, ValueError) as error:
                why = f"HVDLITE_UB_TUNING_FILE={str(self._path)!r} cannot be read: {error!r}"
        answer, problem = self._meeting.tell(f"tuning of {key}", f"{told}|{why}")[0].split("|", 1)
        if problem:
            raise UsageError(problem)
        return next((method for method in options if method.value == answer), None)

    def _measured(self, key: str, options: Sequence[Method], attempt: Attempt) -> Method:
        own = [[0.0] * _TRIES for _ in options]
        for number in range(-1, _TRIES):  # the first round makes what is made once
            for seconds, method in zip(own, options, strict=True):
                began_s = self._clock()
                attempt(method)
                if number >= 0:
                    seconds[number] = self._clock() - began_s
        text = " ".join(f"{1e3 * seconds:.4g}" for tries in own for seconds in tries)
        told = [[float(word) for word in words.split()] for words in self._meeting.tell(f"times of {key}", text)]
        slowest = [max(rank) for rank in zip(*told, strict=True)]
        times_ms = {method: slowest[place * _TRIES : (place + 1) * _TRIES] for place, method in enumerate(options)}
        chosen = fastest(times_ms)
        best_ms = {method.value: min(tries) for method, tries in times_ms.items()}
        _LOG.info("tensor parallelism, %s: %s (ms: %s)", key, chosen.value, best_ms)
        if self._path is not None:
            self._keep(self._path, key, {"method": chosen.value, "ms": best_ms})
        return chosen

    def _keep(self, path: Path, key: str, entry: Mapping[str, object]) -> None:
        # Other teams write as well. What one of them loses is measured again.
        entries: dict[str, object] = {}
        with suppress(OSError, ValueError):
            entries.update(_read(path))
        entries[key] = entry
        new = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            new.write_text(json.dumps(entries, indent=1) + "\n")
            new.replace(path)
        except OSError as error:
            _LOG.warning("HVDLITE_UB_TUNING_FILE=%r cannot be written: %s", str(path), error)


def fastest(times: Mapping[Method, Sequence[float]]) -> Method:
    """The first, unless another is clearly faster in every try; of those the one with the fastest try."""
    first = next(iter(times))
    faster = [
        method
        for method, tries in times.items()
        if all(t < _FASTER * of_first for t, of_first in zip(tries, times[first], strict=True))
    ]
    return min(faster, key=lambda method: min(times[method]), default=first)


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Empty where there is no file. Raises ValueError: it is none of ours."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        entries = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError("it does not hold an object for each exchange")
    return entries
