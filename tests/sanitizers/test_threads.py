"""The native code under ThreadSanitizer, in programs of its own.

ThreadSanitizer would see little in a Python that was not built for it, whose GIL orders nearly everything.
"""

from __future__ import annotations

import pytest

from compiler import COMPILER, HERE, THREAD_FLAGS, Run, of_gpus, ranks_as_threads, run, runtimes, thread_driver
from gpusim.build import joined


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, fixed_addresses: list[str]) -> dict[str, Run]:
    """What is run with the name of a case, and names all cases without one."""
    directory = tmp_path_factory.mktemp("thread")
    runtimes("thread", directory, fixed_addresses)
    driver = thread_driver(tmp_path_factory)
    of_devices = of_gpus("cuda_driver", "device_copies", "device_stream")
    chosen = {
        "ranks_as_threads": (ranks_as_threads(directory), []),
        "device_as_threads": (joined([*of_devices, HERE / "device_as_threads.cpp"]), [driver]),
        "device_schedules": (joined([*of_devices, HERE / "device_schedules.cpp"]), [driver]),
    }
    for name, (parts, _) in chosen.items():
        result = run(*COMPILER, *THREAD_FLAGS, *parts, "-ldl", "-o", directory / name)
        assert result.returncode == 0, result.stdout

    def program(name: str) -> Run:
        command = [*fixed_addresses, directory / name, *chosen[name][1]]
        return lambda *case: run(*command, *case, TSAN_OPTIONS="halt_on_error=1")

    return {name: program(name) for name in chosen}


NAMES = ["ranks_as_threads", "device_as_threads", "device_schedules"]


def cases_of(program: Run, *, racy: bool) -> list[str]:
    return [case for case in program().stdout.splitlines() if case.endswith("race") == racy]


@pytest.mark.parametrize("name", NAMES)
def test_a_race_is_seen(programs: dict[str, Run], name: str) -> None:
    cases = cases_of(programs[name], racy=True)
    assert cases
    for case in cases:
        result = programs[name](case)
        assert result.returncode != 0, case
        assert "data race" in result.stdout, result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_case(programs: dict[str, Run], name: str) -> None:
    program = programs[name]
    cases = cases_of(program, racy=False)
    assert len(cases) > 1
    results = {case: program(case) for case in cases}
    failures = {case: result.stdout for case, result in results.items() if result.returncode != 0}
    assert not failures, "\n".join(f"{case}:\n{output}" for case, output in failures.items())
