"""An elastic job over hosts, without hosts: the test plays mpirun, the keepers and the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from hvdlite.cli import discovery, kept_job
from hvdlite.cli.discovery import IsOver
from hvdlite.cli.job import Host
from hvdlite.cli.keepers import OnWord
from hvdlite.cli.kept_job import KeptJob, Limits
from hvdlite.cli.rank_words import RankWords
from hvdlite.recovery.keeper import Word

A, B, C = Host("a", 2), Host("b", 2), Host("c", 2)


class Keepers:
    """As `hvdlite.cli.keepers.Keepers`, of hosts that answer or do not.

    Attributes:
        silent: hosts that do not answer.
        kept: commits, by host.
        told: all that was told.
        copy: the commit that hvdliterun has itself.
    """

    def __init__(self) -> None:
        self.processes: list[int] = []
        self.silent: set[str] = set()
        self.kept: dict[str, int] = {}
        self.told: list[tuple[Word, int]] = []
        self.copy = 0
        self.is_closed = False

    @property
    def newest(self) -> int:
        return max([self.copy, *self.kept.values()])

    def hand_copy(self, host: str, is_stopped: Callable[[], bool]) -> bool:
        if self.copy <= max(self.kept.values(), default=0):
            return True
        if host in self.silent:
            del self.kept[host]
        else:
            self.kept[host] = self.copy
        return host in self.kept

    def review_copy(self) -> None:
        pass

    def kill_stopped(self) -> None:
        pass

    def begin_start(self, hosts: Iterable[Host]) -> None:
        wanted = [host.name for host in hosts if host.name not in self.kept]
        self.kept |= {name: 0 for name in wanted if name not in self.silent}
        self._late = [name for name in wanted if name in self.silent]

    def give_up_late(self) -> list[str]:
        return self._late

    def start(self, hosts: Iterable[Host]) -> list[str]:
        self.begin_start(hosts)
        return self._late

    def ask(self) -> list[str]:
        lost = [name for name in self.kept if name in self.silent]
        for name in lost:
            del self.kept[name]
        return lost

    def tell(self, word: Word, number: int = 0) -> None:
        self.told.append((word, number))

    def close(self) -> None:
        self.is_closed = True


class Job:
    """A job whose generations are functions of the test, called one after the other.

    Attributes:
        look: the discovery script; by default it prints ``hosts``. It may change while ranks run.
        ran: the hosts of each generation.
        to_save: why the last one is only to save.
        spared: which children of this process a generation does not end.
    """

    def __init__(
        self,
        *generations: Callable[[Job], int],
        least: int = 1,
        most: int = 100,
        restarts: int = 9,
        timeout_s: float = 5.0,
        leaves_time: bool = True,
    ) -> None:
        self.hosts: Sequence[Host] = [A, B]
        self.look: Callable[[IsOver], Sequence[Host]] = lambda is_over: self.hosts
        self.keepers = Keepers()
        self.ran: list[list[Host]] = []
        self.spared: Callable[[], list[int]] = list
        self.says: OnWord = lambda word, number: 0
        self.words: RankWords
        self._generations = iter(generations)
        self._limits = Limits(least, most, restarts, timeout_s, silence_s=1.0, grace_s=1.0, leaves_time=leaves_time)

    def run(self) -> int:
        look, make_keepers = lambda is_over: self.look(is_over), self._make_keepers
        status = KeptJob(look, self._generation, make_keepers, self._limits).run()  # type: ignore[arg-type]
        assert self.keepers.is_closed
        return status

    def begin_anew(self) -> None:
        self.says(Word.ANEW, 0)

    def _make_keepers(self, on_word: OnWord) -> Keepers:
        self.says = on_word
        return self.keepers

    def _generation(
        self, hosts: Sequence[Host], spared: Callable[[], list[int]], words: RankWords, to_save: str
    ) -> int:
        self.ran.append(list(hosts))
        self.to_save = to_save
        self.spared, self.words = spared, words
        return next(self._generations)(self)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_job, "LOOK_S", 0.02)
    monkeypatch.setattr(discovery, "_EVERY_S", 0.02)
    monkeypatch.setattr(kept_job, "_FIRST_PAUSE_S", 0.02)


def commits(number: int, *silent: str, then: int = 1) -> Callable[[Job], int]:
    """A generation that commits so often, then loses hosts."""

    def generation(job: Job) -> int:
        for host in job.ran[-1]:
            job.keepers.kept[host.name] = number
        job.keepers.silent |= {*silent}
        return then

    return generation


def succeed(job: Job) -> int:
    return 0
