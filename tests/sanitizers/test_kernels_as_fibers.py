"""The kernels for GPUs under the sanitizers, every GPU thread a fiber that another one may interrupt at any access."""

from __future__ import annotations

import pytest

from compiler import COMPILER, Run, run, runtimes
from kernels.build import build, build_unwatched

SANITIZERS = ["thread", "address,undefined,float-cast-overflow"]


@pytest.fixture(scope="module", params=SANITIZERS, ids=["thread", "address"])
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fixed_addresses: list[str]
) -> Run:
    """What is run with a case and a seed, and names all cases without."""
    directory = tmp_path_factory.mktemp("kernels")
    runtimes(request.param, directory, fixed_addresses)
    unwatched = build_unwatched(COMPILER)
    built = build(directory, COMPILER, unwatched, f"-fsanitize={request.param}", "-fno-sanitize-recover=all")
    return lambda *case: run(*fixed_addresses, built, *case, TSAN_OPTIONS="halt_on_error=1")


@pytest.mark.parametrize("program", ["thread"], indirect=True)
def test_a_race_is_seen(program: Run) -> None:
    result = program("race", "0")
    assert result.returncode != 0
    assert "data race" in result.stdout


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_case(program: Run, seed: int) -> None:
    cases = program().stdout.splitlines()
    assert len(cases) > 1
    results = {case: program(case, str(seed)) for case in cases}
    failures = {case: result.stdout for case, result in results.items() if result.returncode != 0}
    assert not failures, "\n".join(f"{case}:\n{output}" for case, output in failures.items())
