"""What is corrupt ends a job.

A gradient that is not finite, before any parameter hears of it: HVDLITE_CHECK_NUMERICS=raise. A parameter that differs
between ranks: HVDLITE_CHECK_EVERY.
"""

from __future__ import annotations

import pytest

from fault_lab import run

PROGRAM = """
import torch
import hvdlite.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
try:
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 100)).sum()
        if step == 4 and hvd.rank() == hvd.size() - 1:
            loss = loss * float(sys.argv[1])
        loss.backward()
        optimizer.step()
finally:
    say("finite", all(bool(p.isfinite().all()) for p in model.parameters()), "at step", step)
"""


@pytest.mark.parametrize(
    ("n", "value", "what"), [(2, "nan", "NaN"), pytest.param(3, "inf", "Inf", marks=pytest.mark.thorough)]
)
def test_the_rank_that_has_it_ends_the_job(n: int, value: str, what: str) -> None:
    result = run(PROGRAM, value, n=n, env={"HVDLITE_CHECK_NUMERICS": "raise"}, alone=True)
    assert result.returncode != 0 and not result.leftovers, result
    own, other = result.ranks[n - 1].stderr, result.ranks[0].stderr
    found = "NumericsError: step 4: the gradient of '"
    assert own.startswith(f"hvdlite.errors.{found}"), result
    assert f" {what}" in own and "loss.backward()" in own and "/hvdlite/" not in own, result
    assert f"rank {n - 1} raised hvdlite.errors.{found}" in other, result
    assert [rank.stdout for rank in result.ranks] == ["finite True at step 4\n"] * n, result


FLIPPED = """
import torch
import hvdlite.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
for step in range(1, 6):
    optimizer.zero_grad()
    model(torch.ones(1, 100)).sum().backward()
    if step == 3 and hvd.rank() == hvd.size() - 1:
        model[1].weight.detach().view(torch.int32).flatten()[7] ^= 1  # the lowest of a mantissa
    say("step", step)
    optimizer.step()
say("went on")
"""


@pytest.mark.parametrize(
    ("n", "who"),
    [(3, "of rank 2 differs from that of the other ranks"), (2, "differs between ranks 0 and 1")],
)
def test_a_parameter_that_differs_ends_the_job(n: int, who: str) -> None:
    """Of two ranks nobody knows which is right."""
    result = run(FLIPPED, n=n, env={"HVDLITE_CHECK_EVERY": "2"}, alone=True)
    assert result.returncode != 0 and not result.leftovers, result
    found = f"hvdlite.errors.DivergenceError: after step 4 parameter '1.weight' {who};"
    assert found in result.stderr, result
    assert "optimizer.step()" in result.stderr and "/hvdlite/" not in result.stderr, result
    assert [rank.stdout for rank in result.ranks] == ["".join(f"step {i}\n" for i in range(1, 5))] * n, result
