"""A rank among survivors, as far as it needs no MPI; tests/faults/test_survivors.py has jobs of them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from hvdlite import launched
from hvdlite.config import Config
from hvdlite.errors import RankFailedError
from hvdlite.processes import ProcessAddress
from hvdlite.recovery import survivors
from hvdlite.recovery.survivors import Survivors


class Line:
    """What a rank has sent, and to whom."""

    def __init__(self, comm: object) -> None:
        self.sent: list[int] = []
        self.has_ended = False

    def send(self, to: int, key: str, data: bytes) -> None:
        self.sent.append(to)

    def end(self) -> None:
        self.sent.append(-1)
        self.has_ended = True


class Everybody:
    """Three ranks, on machines of their own."""

    comm = None
    rank = 1
    size = 3

    def allgather(self, own: ProcessAddress) -> list[ProcessAddress]:
        return [own if other == self.rank else own._replace(machine=str(other)) for other in range(3)]


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    made: list[Line] = []

    def make(comm: object) -> Line:
        made.append(Line(comm))
        return made[-1]

    monkeypatch.setattr(survivors, "Lifeline", make)
    monkeypatch.setattr(survivors, "Medium", lambda comm: None)
    monkeypatch.setattr(survivors, "_CALL_S", 0.01)
    monkeypatch.setattr(launched, "this_process", lambda: SimpleNamespace(rank=1, size=3))
    return made


def joined() -> Survivors:
    own = Survivors(lambda number, count: True)
    own.join()
    own.ranks(Everybody(), Config())  # type: ignore[arg-type]
    return own


def test_who_hears_of_a_failure_calls_the_others_again_and_again(line: list[Line]) -> None:
    own = joined()
    own.fail(RankFailedError(2, "rank 2 died"))
    until_s = time.monotonic() + 10
    while len(line[0].sent) < 6 and time.monotonic() < until_s:
        time.sleep(1e-3)
    own.leave()
    assert line[0].sent[:4] == [0, 2, 0, 2]


def test_who_has_come_to_its_end_calls_nobody(line: list[Line]) -> None:
    own = joined()
    own.leave()
    own.fail(RankFailedError(2, "rank 2 died"))
    assert line[0].sent == [-1]
