"""MPICH's lines on the exit codes of its ranks: taken out of what passes through, and understood."""

from __future__ import annotations

import pytest

from hvdlite.cli.exit_codes import ExitCodes, culprit, is_telling

OUTPUT = b"step 1\nstep 2 \r[50%]\n[mpiexec@vm] Exit codes: [vm] 0,768 [other] 9\nYOUR APPLICATION TERMINATED\n[mpiexec"


@pytest.mark.parametrize("between_hosts", [b" ", b"\n"])
@pytest.mark.parametrize("length", [1, 2, 7, 30, len(OUTPUT)])
def test_the_lines_are_taken_out_wherever_pieces_end(length: int, between_hosts: bytes) -> None:
    codes = ExitCodes()
    output = OUTPUT.replace(b" [other]", between_hosts + b"[other]")
    passed = b"".join(codes.take_from(output[i : i + length]) for i in range(0, len(output), length))
    passed += codes.take_from(b"")
    assert passed == b"step 1\nstep 2 \r[50%]\nYOUR APPLICATION TERMINATED\n[mpiexec"
    assert codes.codes == [0, 3, -9]


def test_what_is_no_such_line_passes_at_once() -> None:
    codes = ExitCodes()
    assert codes.take_from(b"loss: 0.1") == b"loss: 0.1"
    assert codes.take_from(b"[a") == b"[a"
    assert codes.take_from(b"[mpi") + codes.take_from(b"4py]") == b"[mpi4py]"
    assert codes.take_from(b"[mpiexec@vm] Timeout\nstep 1") == b"[mpiexec@vm] Timeout\nstep 1"
    assert codes.take_from(b"[mpiexec@vm\n[mpiexec@vm] Ex") == b"[mpiexec@vm\n"
    assert codes.take_from(b"cept\n[mpiexec@") == b"[mpiexec@vm] Except\n"
    assert codes.take_from(b"") == b"[mpiexec@"


@pytest.mark.parametrize(
    ("codes", "rank"),
    [([0, 0], None), ([1, 3, -9], 1), ([-9, -9, -11], 2), ([-9, 1, -9], 1), ([-15, -9], 0), ([0, -6, 1], 1)],
)
def test_who_is_guilty(codes: list[int], rank: int | None) -> None:
    assert culprit(codes) == rank


def test_only_an_end_of_its_own_is_worth_a_line() -> None:
    assert [is_telling(code) for code in (3, -11, 1, -9, -15)] == [True, True, False, False, False]
