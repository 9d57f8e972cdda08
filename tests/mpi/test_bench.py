"""`python -m hvdlite bench`: every operation is right, and what is wrong is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.cli import bench

pytestmark = [pytest.mark.any_mpi, pytest.mark.up_to_three_ranks, pytest.mark.usefixtures("running")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("name", bench.OPERATIONS)
def test_nothing_is_wrong(name: str, dtype: torch.dtype) -> None:
    row = bench.measure(bench.OPERATIONS[name], 240, dtype, "cpu", calls=2, rounds=1)
    assert row.wrong == 0
    assert row.bytes == row.count * dtype.itemsize == 240
    assert row.time_us > 0
    assert row.algbw_gbps == pytest.approx(row.bytes / row.time_us / 1e3)
    n = hvd.size()
    factor = {"allreduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(name, (n - 1) / n)
    assert row.busbw_gbps == pytest.approx(row.algbw_gbps * factor)


def test_wrong_elements_of_all_ranks_are_counted() -> None:
    right = bench.OPERATIONS["allreduce"]

    def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
        result = right.call(tensor)
        result[: 1 + hvd.rank()] += 1
        return result

    row = bench.measure(replace(right, call=off_by_one), 48, torch.float32, "cpu", calls=1, rounds=1)
    assert row.wrong == hvd.size() * (hvd.size() + 1) // 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--calls 0", "-n/--calls: '0': a whole number above 0"),
        ("--rounds -1", "--rounds: '-1': a whole number above 0"),
        ("--factor 1", "-f/--factor: '1': a whole number above 1"),
        ("--min-bytes 1M --max-bytes 1K", "--max-bytes 1024 is less than --min-bytes 1048576"),
        ("--device cuda", "--device cuda: torch finds no CUDA GPU here"),
    ],
)
def test_mistakes(words: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main(["allreduce", *words.split()])
    assert text in capsys.readouterr().err
