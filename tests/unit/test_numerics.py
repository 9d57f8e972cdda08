"""What `GradientCheck` finds in gradients of this rank, and what it says of a GradScaler's overflows."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator

import pytest
import torch

from hvdlite.config import Config
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.errors import NumericsError
from hvdlite.torch.numerics import GradientCheck
from hvdlite.torch.process_set import global_process_set
from hvdlite.torch.reduce_options import ReduceOptions


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged as a warning."""
    texts: list[str] = []
    monkeypatch.setattr(logging.getLogger("hvdlite"), "warning", lambda text, *args: texts.append(text % args))
    return texts  # type: ignore[return-value]


def parameter(gradient: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(gradient.shape, dtype=gradient.dtype)
    made.grad = gradient
    return made


GOOD = torch.ones(3, 5)


def spoiled(value: float = math.nan) -> torch.Tensor:
    gradient = torch.ones(3, 5)
    gradient[1, 2] = value
    return gradient


@pytest.mark.parametrize(
    "gradient",
    [
        spoiled(),
        spoiled().t(),
        spoiled().half(),
        spoiled().bfloat16(),
        spoiled().double(),
        spoiled().repeat(1, 2)[:, ::2],  # with gaps
        spoiled().to_sparse(1),
    ],
)
def test_a_nan_is_named_with_rank_and_step(gradient: torch.Tensor) -> None:
    check = GradientCheck(raises=True, rank=3)
    check.look_at([("fine", parameter(GOOD)), ("without", torch.zeros(2))])
    check.end_step()
    with pytest.raises(NumericsError, match=r"step 2: the gradient of 'layer' on rank 3 has 1 NaN among its \d+ elem"):
        check.look_at([("fine", parameter(GOOD)), ("layer", parameter(gradient))])


def test_infinities_are_counted_apart() -> None:
    gradient = spoiled(-math.inf)
    gradient[0, 0] = math.nan
    with pytest.raises(NumericsError, match="has 1 NaN and 1 Inf among its 15 elements"):
        GradientCheck(raises=True, rank=0).look_at([("layer", parameter(gradient))])


def test_what_float16_cannot_hold_on_the_way() -> None:
    reduction = Reduction(ReduceOp.AVERAGE, 0.5, 1.0)  # of what has been cast
    check = GradientCheck.wanted(
        Config(check_numerics="raise"), 0, ReduceOptions(reduction, DType.FLOAT16, global_process_set)
    )
    assert check is not None
    check.look_at([("layer", parameter(spoiled(65519.0)))])
    with pytest.raises(NumericsError, match=r"has values up to 65520, which are Inf in float16"):
        check.look_at([("layer", parameter(spoiled(65520.0)))])


def test_nothing_is_looked_at_by_default() -> None:
    assert GradientCheck.wanted(Config(), 0) is None


def test_steps_in_a_row_are_one_warning(told: list[str]) -> None:
    check = GradientCheck(raises=False, rank=0)
    for gradient in [spoiled(), spoiled(), GOOD, spoiled(), GOOD]:
        check.look_at([("first", parameter(gradient)), ("second", parameter(gradient))])
        check.look_at([("third", parameter(gradient))])
        check.end_step()
    assert [text.partition(" on rank")[0] for text in told] == [
        "step 1: the gradient of 'first'",
        "step 4: the gradient of 'first'",
    ]


def test_a_scaler_may_overflow_for_as_long_as_its_scale_can_help(told: list[str]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    check = GradientCheck(raises=True, rank=0)
    for _ in range(2):
        for _ in range(32):
            check.look_at([("layer", parameter(spoiled(math.inf)))])
            check.end_step()
        check.look_at([("layer", parameter(GOOD))])
        check.end_step()
    for _ in range(32):
        check.look_at([("layer", parameter(spoiled()))])
        check.end_step()
    with pytest.raises(NumericsError, match="skipped 33 steps in a row, so it is no overflow"):
        check.look_at([("layer", parameter(spoiled()))])
    assert scaler.is_enabled() and not told


def test_a_scaler_that_is_switched_off_expects_nothing() -> None:
    gc.collect()  # scalers of other tests
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(NumericsError):
        GradientCheck(raises=True, rank=0).look_at([("layer", parameter(spoiled()))])
    assert not scaler.is_enabled()
