"""How native code asks tensors what they are: all at once, where torch lets it, or attribute by attribute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hvdlite._native import exchange_tensors_by

TABLE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


@pytest.fixture(params=["at once", "by attributes"])
def asked(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "at once" and TABLE is None:
        pytest.skip("not with this version of torch")
    exchange_tensors_by(TABLE if request.param == "at once" else None)
    yield
    exchange_tensors_by(TABLE)
