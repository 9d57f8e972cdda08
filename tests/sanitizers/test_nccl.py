"""Communicators of NCCL under ThreadSanitizer, on the simulated NCCL and driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler import COMPILER, CSRC, THREAD_FLAGS, Run, of_gpus, run, runtimes, thread_driver
from gpusim.build import nccl_command

CALLED = ["-ffunction-sections", "-Wl,--gc-sections"]  # so that what is not called need not be there
SOURCES = [
    *of_gpus("cuda_driver", "device_memory", "device_stream", "file_segment", "nccl_communicator", "nccl_library"),
    CSRC / "waiting" / "signal.cpp",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, fixed_addresses: list[str]) -> Run:
    """What is run with the name of a case, and names all cases without one."""
    directory = tmp_path_factory.mktemp("nccl")
    runtimes("thread", directory, fixed_addresses)
    driver, nccl, binary = thread_driver(tmp_path_factory), directory / "libnccl.so", directory / "nccl_as_threads"
    sources = [*SOURCES, Path(__file__).with_name("nccl_as_threads.cpp")]
    for build in (
        nccl_command(nccl, *COMPILER, *THREAD_FLAGS),
        [*COMPILER, *THREAD_FLAGS, *CALLED, *sources, "-ldl", "-o", binary],
    ):
        result = run(*build)
        assert result.returncode == 0, result.stdout
    suppressions = directory / "suppressions"
    suppressions.write_text("race:dl_deallocate_tls\n")  # glibc's own: variables of threads that have ended
    options = f"halt_on_error=1 suppressions={suppressions}"
    return lambda *case: run(*fixed_addresses, binary, driver, nccl, *case, TSAN_OPTIONS=options)


def test_a_race_is_seen(program: Run) -> None:
    result = program("race")
    assert result.returncode != 0
    assert "data race" in result.stdout


@pytest.mark.parametrize("case", ["streams", "aborts", "drops"])
def test_every_case(program: Run, case: str) -> None:
    assert case in program().stdout.splitlines()
    result = program(case)
    assert result.returncode == 0, result.stdout
