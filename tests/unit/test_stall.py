"""When the root's watch asks, warns and gives up; its clock is a number here."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvdlite.config import Config
from hvdlite.coordinator.messages import Claim, Fault, Notice, Response
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.request import NAMED, Key, TensorSpec
from hvdlite.coordinator.stall import StallWatch, status_of
from hvdlite.dtypes import DType
from hvdlite.errors import StallError
from hvdlite.operations.allreduce import Allreduce

A: Key = ("a", NAMED)
B: Key = ("b", NAMED)


class Job:
    """A root with a clock: what waits since when, and what ranks answer."""

    def __init__(self, size: int = 3, **settings: Any) -> None:
        self.watch = StallWatch(Config(**settings), range(size))
        self.size = size
        self.waiting: dict[Key, float] = {}
        self.asked: list[float] = []
        self.answers: dict[int, dict[str, Any]] = {}

    def run(self, start_s: float, stop_s: float) -> None:
        """Look every 50 ms; ranks answer a question at once."""
        for step in range(int(start_s * 20), int(stop_s * 20)):
            query = self.watch.look(self._items, step / 20)
            if query is not None:
                self.asked.append(step / 20)
                self._answer(query)

    def _items(self) -> list[tuple[Key, str, float]]:
        return [(key, f"allreduce '{key[0]}'", since_s) for key, since_s in self.waiting.items()]

    def _answer(self, query: Notice) -> None:
        for rank, status in self.answers.items():
            assert self.watch.take_answer(
                {**status, "kind": "status", "question": query.content["question"], "rank": rank}
            )


def status(last: str, *in_flight: Key, where: str = "train.py:12 in step: loss.backward()") -> dict[str, Any]:
    return {"last": last, "in_flight": [list(key) for key in in_flight], "joined": False, "where": where}


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The texts that are logged, in order."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvdlite")
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


def test_a_warning_names_tensor_ranks_and_place(warnings: list[str]) -> None:
    job = Job(5, stall_check_time_s=5.0)
    job.waiting = {A: 1.0}
    job.answers = {
        0: status("a", A),
        1: status("layer2.bias"),
        2: status("a", A),
        3: status("layer1.bias", where="x.py:3"),
        4: status("", where="data.py:7"),
    }
    job.run(1, 5.9)
    assert not job.asked
    job.run(5.9, 8)
    assert job.asked == [6.0]
    (text,) = warnings
    for words in [
        "allreduce 'a' has waited 5 s for ranks 1, 3 and 4 (2 of 5 are ready)",
        "Rank 1 last submitted 'layer2.bias' and is at train.py:12 in step: loss.backward().",
        "Rank 3 last submitted 'layer1.bias' and is at x.py:3.",
        "Rank 4 has submitted nothing yet and is at data.py:7.",
    ]:
        assert words in text, text


def test_a_tensor_is_reported_once_until_it_was_complete(warnings: list[str]) -> None:
    job = Job(1, stall_check_time_s=2.0)
    job.waiting = {A: 0.0}
    job.answers = {0: status("b")}
    job.run(0, 20)
    assert len(warnings) == 1
    job.waiting = {A: 0.0, B: 18.5}
    job.run(20, 25)
    assert ["'a'" in text for text in warnings] == [True, False]
    job.waiting = {}
    job.run(25, 26)
    job.waiting = {A: 26.0}
    job.run(26, 30)
    assert len(warnings) == 3


def test_a_rank_that_does_not_answer_is_reported_as_such(warnings: list[str]) -> None:
    job = Job(2, stall_check_time_s=1.0)
    job.waiting = {A: 0.0}
    job.answers = {0: status("a", A)}
    job.run(0, 10)
    (text,) = warnings
    assert "waited 3 s for rank 1 (1 of 2 are ready). Rank 1 does not answer" in text


def test_a_tensor_that_came_meanwhile_is_no_reason_to_warn(warnings: list[str]) -> None:
    job = Job(2, stall_check_time_s=1.0)
    job.waiting = {A: 0.0}
    job.answers = {0: status("a", A)}  # rank 1 is silent, so the report waits for it
    job.run(0, 2)
    assert job.asked == [1.0]
    job.waiting = {}
    job.run(2, 10)
    assert not warnings


def test_late_answers_to_an_older_question_do_not_count() -> None:
    watch = StallWatch(Config(), range(2))
    assert watch.take_answer({"kind": "status", "question": 0, "rank": 1, **status("a")})
    assert not watch.take_answer({"kind": "shutdown", "rank": 1})


@pytest.mark.parametrize("settings", [{"stall_check_disable": True}, {"stall_check_time_s": 0.0}])
def test_it_can_be_switched_off(settings: dict[str, Any], warnings: list[str]) -> None:
    job = Job(2, **settings)
    job.waiting = {A: 0.0}
    job.run(0, 200)
    assert not job.asked
    assert not warnings


@pytest.mark.parametrize("check_s", [1.0, 0.0, 60.0])
def test_after_the_shutdown_time_the_job_ends(check_s: float, warnings: list[str]) -> None:
    """With warnings before, without any, and with those due only later."""
    job = Job(2, stall_check_time_s=check_s, stall_shutdown_time_s=4.0)
    job.waiting = {A: 0.0}
    job.answers = {0: status("a", A), 1: status("layer2.bias")}
    job.run(0, 4)
    assert len(warnings) == (1 if check_s == 1.0 else 0)
    with pytest.raises(StallError) as caught:
        job.run(4, 10)
    for words in ["allreduce 'a'", "rank 1", "layer2.bias", "train.py:12", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"]:
        assert words in str(caught.value)


def test_a_status_says_what_this_process_does() -> None:
    answer = status_of({"kind": "stall_query", "question": 3}, 5, "layer2.bias", [A])
    assert {**answer, "where": ""} == {
        "kind": "status", "question": 3, "rank": 5, "last": "layer2.bias", "in_flight": [["a", NAMED]],
        "joined": False, "where": "",
    }  # fmt: skip
    assert "test_stall.py" in answer["where"]
    assert "in test_a_status_says_what_this_process_does" in answer["where"]


def test_where_a_rank_is_names_the_line_of_the_program_and_what_that_waits_for() -> None:
    """Between the two are as many frames as a library likes."""

    def answer(_: int) -> dict[str, Any]:
        while sys._current_frames()[threading.main_thread().ident or 0].f_code.co_name != "wait":
            time.sleep(0.001)
        return status_of({"kind": "stall_query", "question": 3}, 5, "layer2.bias", [A])

    with ThreadPoolExecutor(1) as pool:
        (told,) = list(pool.map(answer, [0]))
    program, library = told["where"].split(" > ")[-2:]
    assert program.startswith(__file__) and program.endswith(": (told,) = list(pool.map(answer, [0]))")
    assert "threading.py" in library and " in wait: " in library
    assert "_base.py" not in told["where"]


def test_a_leader_passes_on_what_waits_too_long() -> None:
    """So the root can tell that rank 2 waits for rank 3 of its own node; it judges once all the same, and as before."""
    request = Allreduce("a", (TensorSpec("a", DType.FLOAT32, (4,)),))
    for contradiction in (False, True):
        other = Allreduce("a", (TensorSpec("a", DType.FLOAT32, (5 if contradiction else 4,)),))
        root, leader = Negotiation(range(4), 1.0), Negotiation((2, 3), 1.0)
        leader.add(Claim(request, NAMED), (2,), 10.0)
        assert not any(leader.upward(10 + tenth / 10) for tenth in range(10))
        (early,) = (claim for tenth in range(10, 16) for claim in leader.upward(10 + tenth / 10))
        assert early == Claim(request, NAMED, (2,))
        root.add(early, (2, 3), 11.5)
        assert root.waiting() == [(A, "allreduce 'a'", 11.5)]
        assert leader.upward(13.0) == []
        leader.add(Claim(other, NAMED), (3,), 14.0)
        (late,) = leader.upward(14.0)
        root.add(late, (2, 3), 14.0)
        for rank in (0, 1):
            assert root.verdicts() == []
            root.add(Claim(request, NAMED), (rank,), 15.0)
        (verdict,) = root.verdicts()
        if contradiction:
            assert isinstance(verdict, Fault)
            assert "(4,) on ranks 0, 1 and 2 but (5,) on rank 3" in verdict.text
        else:
            assert verdict == Response(request, NAMED)
        for rank in (3, 2):
            leader.add(Claim(request, NAMED), (rank,), 16.0)
        assert leader.upward(16.0) == [Claim(request, NAMED)]
