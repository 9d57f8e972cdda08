"""Ranks that go on after failures take tags that MPI has, up to the last one, and none twice."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlite.errors import StartupError
from hvdlite.recovery.surviving_ranks import ROOM_FOR_SUBSETS, Medium, SurvivingRanks
from thread_comm import ThreadComm, on_ranks

LEAST = 32767  # the least MPI_TAG_UB that MPI's standard allows


class Comm:
    """Notes the tags of messages."""

    def __init__(self, highest: int | None) -> None:
        self.highest = highest
        self.tags: list[int] = []

    def Dup(self) -> Comm:
        return self

    def Set_errhandler(self, handler: object) -> None:
        pass

    def Get_attr(self, key: str) -> int | None:
        assert key == "the highest tag"
        return self.highest

    def Isend(self, buffer: object, to: int, tag: int) -> None:
        self.tags.append(tag)


@pytest.fixture(autouse=True)
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(ERRORS_RETURN="errors return", TAG_UB="the highest tag")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=names))


def use_up(comm: ThreadComm, highest: int | None, used: int, *, room: int = 0) -> tuple[list[int], str]:
    """The tags of messages over communicators, which are made until there are no more, and why there are none."""
    sent = Comm(highest)
    medium: Any = Medium(sent)  # type: ignore[arg-type]
    medium.used = used if comm.rank == 0 else 0  # others have been in fewer
    for _ in range(10):
        try:
            ranks = SurvivingRanks(comm, range(comm.size), medium, 20.0, room=room)  # type: ignore[arg-type]
        except StartupError as error:
            return sent.tags, str(error)
        for tag in (0, 7):
            ranks.Isend(b"", 0, tag)
    return sent.tags, "no error"


@pytest.mark.parametrize("highest", [LEAST, LEAST + 5, (1 << 31) - 1, None])
def test_the_last_tag_is_used_and_none_beyond_it(highest: int | None) -> None:
    has = LEAST if highest is None else highest
    outcomes = on_ranks(2, lambda comm: use_up(comm, highest, (has + 1) // 8 - 4))
    assert outcomes[0] == outcomes[1]
    tags, why = outcomes[0]
    last = (has + 1) // 8 * 8 - 1
    assert tags == [last - 23, last - 16, last - 15, last - 8, last - 7, last]
    contexts = last // 8
    assert f"used {contexts} of the {contexts} ranges of tags" in why and "MPI_TAG_UB" in why


def test_a_generation_is_refused_before_its_process_sets_would_be() -> None:
    ((tags, why),) = on_ranks(1, lambda comm: use_up(comm, LEAST, 4095 - ROOM_FOR_SUBSETS - 1, room=ROOM_FOR_SUBSETS))
    assert len(tags) == 2 and f"used {4095 - ROOM_FOR_SUBSETS} of the 4095" in why
