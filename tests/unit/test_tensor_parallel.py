"""What tensor parallelism decides without other ranks: parts, cards, names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hvdlite.config import Config
from hvdlite.errors import ConfigError, MismatchError, UsageError
from hvdlite.tensor_parallel import methods
from hvdlite.tensor_parallel.carrier import Rows
from hvdlite.tensor_parallel.meeting import CARD_BYTES, LoneMeeting, Meeting, disagreement
from hvdlite.tensor_parallel.methods import Method
from hvdlite.tensor_parallel.part import Part
from hvdlite.tensor_parallel.tuning import Tuner


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("part", [Part(0), Part(1), Part(0, 2), Part(1, 3)], ids=str)
def test_parts_join_to_the_whole(part: Part, size: int) -> None:
    whole = torch.arange(12.0 * 18 * 2).view(12, 18, 2)
    shares = [part.of(whole, rank, size) for rank in range(size)]
    assert len({tuple(share.shape) for share in shares}) == 1
    assert all(share.is_contiguous() for share in shares)
    assert torch.equal(part.join(shares), whole)
    shares[0].zero_()
    assert whole[0, 0, 1] == 1


def test_every_rank_has_a_share_of_each_block() -> None:
    whole = torch.tensor([*b"qqQQkkKKvvVV"])
    assert bytes(Part(0, 3).of(whole, 0, 2).tolist()) == b"qqkkvv"
    assert bytes(Part(0, 3).of(whole, 1, 2).tolist()) == b"QQKKVV"


def test_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="dimension 0 .* among 2 ranks: 2 does not divide 3"):
        Part(0).of(torch.zeros(3, 4), 0, 2)
    with pytest.raises(ValueError, match="of each of 3 blocks among 2 ranks: 6 does not divide 4"):
        Part(1, 3).of(torch.zeros(3, 4), 0, 2)


class Table(Meeting):
    """Its rank puts a card on a table where those of the others lie already."""

    def __init__(self, rank: int, others: list[str]) -> None:
        super().__init__((4, 5, 7), rank)
        self.others = others

    def _exchange_cards(self, card: bytes) -> list[bytes]:
        assert len(card) == CARD_BYTES
        cards = [text.encode().ljust(CARD_BYTES, b"\0") for text in self.others]
        return [*cards[: self.rank], card, *cards[self.rank :]]


ROWS = Rows("gather", "", (2, 3), torch.float32, torch.device("cpu"))


def test_ranks_that_mean_the_same() -> None:
    Table(1, ["1 gather of (2, 3) float32"] * 2).meet(ROWS)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("1 gather of (2, 4) float32", "1: gather of (2, 4) float32"),
        ("1 scatter of (2, 3) float32", "1: scatter of (2, 3) float32"),
        ("0 gather of (2, 3) float32", "0: gather of (2, 3) float32"),
    ],
)
def test_ranks_that_contradict_one_another(other: str, said: str) -> None:
    with pytest.raises(MismatchError) as caught:
        Table(1, ["1 gather of (2, 3) float32", other]).meet(ROWS)
    assert "ranks [4, 5, 7]: the ranks contradict one another" in str(caught.value)
    assert "ranks 4 and 5, exchange 1: gather of (2, 3) float32; rank 7, exchange " + said in str(caught.value)


def test_an_objection_is_everybodys_error() -> None:
    for carrier in (Table(0, ["1 gather of (2, 3) float32", "1 !no room"]), Table(0, ["1 !no room"] * 2)):
        with pytest.raises(UsageError, match="no room"):
            carrier.meet(ROWS)
    with pytest.raises(UsageError, match="^rank 4: too wide; ranks 5 and 7: no room$"):
        Table(0, ["1 !no room"] * 2).refuse("too wide")


def test_long_texts_are_cut() -> None:
    with pytest.raises(UsageError, match="^rank 4: w{500}"):
        Table(0, ["1 gather"] * 2).refuse("w" * 1000)
    assert isinstance(disagreement([b"1 a", b"1 b", b"1 a"], (0, 1, 2)), MismatchError)
    assert "(ranks 0 and 2, exchange 1: a; rank 1, exchange 1: b)" in str(
        disagreement([b"1 a", b"1 b", b"1 a"], (0, 1, 2))
    )


def test_what_ranks_tell_one_another() -> None:
    assert Table(1, ["1 times\n3 4", "1 times\n5"]).tell("times", "1 2") == ["3 4", "1 2", "5"]
    with pytest.raises(MismatchError, match="exchange 1: gather; .* exchange 1: times\\)"):
        Table(1, ["1 gather", "1 times\n5"]).tell("times", "1 2")


# Methods.


def test_methods_by_function() -> None:
    chosen = methods.parse({"all_gather_matmul": "bulk", "backward of all_gather_matmul": "none"})
    assert methods.method_for("all_gather_matmul", chosen) is Method.BULK
    assert methods.method_for("backward of all_gather_matmul", chosen) is Method.UNFUSED
    assert methods.method_for("backward of matmul_all_reduce", chosen) is Method.AUTO
    forward = methods.parse({"matmul_reduce_scatter": "pipeline"})
    assert methods.method_for("backward of matmul_reduce_scatter", forward) is Method.PIPELINE
    assert methods.method_for("gather_rows", methods.parse("window")) is Method.WINDOW
    with pytest.raises(ValueError, match="there is no 'matmul'; methods can be chosen for all_gather_matmul, backward"):
        methods.parse({"matmul": "bulk"})
    with pytest.raises(ValueError, match="method is 'ring'; pass one of 'auto', 'window', 'ring_exchange'"):
        methods.parse("ring")


def test_the_setting_takes_every_method() -> None:
    for name in methods.NAMES:
        assert Config.from_env({"HVDLITE_UB_METHOD": name}).ub_method == name
    with pytest.raises(ConfigError, match="HVDLITE_UB_METHOD='ring': must be auto, window, ring_exchange, .* or none"):
        Config.from_env({"HVDLITE_UB_METHOD": "ring"})


def test_each_device_has_its_methods() -> None:
    alike = {Method.AUTO, Method.WINDOW, Method.UNFUSED}
    assert {methods.on_host(method, 3) for method in Method} == alike
    assert {methods.on_host(method, 2) for method in Method} == alike | {Method.RING_EXCHANGE}
    assert {methods.on_gpus(method, True) for method in Method} == set(Method) - {Method.WINDOW}
    assert methods.on_gpus(Method.MULTICAST, False) is Method.BULK


class Times:
    """A clock that an attempt moves on by what its method takes."""

    def __init__(self, seconds: dict[Method, list[float]]) -> None:
        self.now_s = 0.0
        self.attempts = 0
        self._seconds = {method: iter([9.0, *tries]) for method, tries in seconds.items()}

    def __call__(self) -> float:
        return self.now_s

    def attempt(self, method: Method) -> None:
        self.attempts += 1
        self.now_s += next(self._seconds[method])


@pytest.mark.parametrize(
    ("unfused", "chosen"),
    [
        ([1.9, 0.9, 1.8], Method.UNFUSED),
        ([0.5, 1.1, 0.5], Method.WINDOW),
        ([1.9, 0.99, 1.9], Method.WINDOW),
    ],
    ids=["faster", "luck", "noise"],
)
def test_a_method_has_to_be_faster_in_every_try(unfused: list[float], chosen: Method, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    times = Times({Method.WINDOW: [2.0, 1.0, 2.0], Method.UNFUSED: unfused})
    tuner = Tuner(LoneMeeting((0,), 0), str(path), times)
    options = [Method.WINDOW, Method.UNFUSED]
    for _ in range(2):
        assert tuner.choose("gather of x", options, times.attempt) is chosen
    assert times.attempts == 8
    kept = json.loads(path.read_text())["gather of x, 1 ranks"]
    assert kept == {"method": chosen.value, "ms": {"window": 1000.0, "unfused": 1000 * min(unfused)}}
    assert Tuner(LoneMeeting((0,), 0), str(path), times).choose("gather of x", options, times.attempt) is chosen
    assert times.attempts == 8
    Tuner(LoneMeeting((0,), 0), str(path), times).choose("gather of y", options[:0:-1], lambda method: None)
    assert len(json.loads(path.read_text())) == 2


def test_a_file_that_is_none_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    for text in ("no JSON", "[1]"):
        path.write_text(text)
        with pytest.raises(UsageError, match="^HVDLITE_UB_TUNING_FILE='.*tuning.json' cannot be read: "):
            Tuner(LoneMeeting((0,), 0), str(path)).choose("x", [Method.WINDOW], lambda method: None)
    assert path.read_text() == "[1]"
