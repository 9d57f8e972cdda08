"""Lines of MPICH and Intel MPI on the exit codes of ranks: taken out of what passes through, and understood."""

from __future__ import annotations

import pytest

from hvdlite.cli.exit_codes import ExitCodes, culprit, is_telling, stands_out
from hvdlite.cli.job import Host, Launch

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
    assert codes.hosts == ["vm", "vm", "other"]


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


@pytest.mark.parametrize(
    ("codes", "first_end", "rank", "is_certain"),
    [
        ([-9, -9, -9], 1, 1, True),
        ([-9, -9, -9], None, 0, False),
        ([0, -9, -9], 0, 1, False),  # long before: mpirun would have let the others go on
        ([-9, -9, -15], None, 2, True),
        ([-9, -15, -15], None, 1, False),
        ([-9, -15, -15], 2, 2, True),
        ([-9, 1, -9], 0, 1, False),  # which may have failed for lack of rank 0
    ],
)
def test_who_was_killed_of_ranks_that_were_all_killed(
    codes: list[int], first_end: int | None, rank: int, is_certain: bool
) -> None:
    assert culprit(codes, first_end) == rank
    assert stands_out(rank, codes, first_end) is is_certain


@pytest.mark.parametrize(
    ("ranks", "slots", "options", "lines", "name"),
    [
        (3, {"a": 1, "me@b": 2}, [], "[a] 0\n[b] 0,768\n", "rank 2"),
        (3, {"a": 2, "b": 2}, [], "[a] 0,0\n[b] 768\n", "rank 2"),
        (3, {"a": 1, "b": 2}, [], "[b] 0,768\n", "a rank on b"),  # mpirun has not heard of a
        (4, {"a": 1, "b": 1}, [], "[a] 0,0\n[b] 768,0\n", "a rank on b"),  # rank 1
        (4, {"a": 2, "b": 2}, ["-ppn", "1"], "[a] 0,0\n[b] 768,0\n", "a rank on b"),  # rank 1
        (4, {"a": 2}, ["-ppn=1"], "[a] 0,0,768,0\n", "rank 2"),
        (2, {}, [], "[vm] 0,768\n", "rank 1"),
        (3, {"a": 1, "b": 2}, [], "[a:0] 0\n[b:0] 0,768\n", "rank 2"),  # Intel's
        (2, {}, [], "[c1] 0\n[c2] 768\n", "a rank on c2"),  # by a batch scheduler
    ],
)
def test_a_rank_has_its_number_where_the_order_is_known(
    ranks: int, slots: dict[str, int], options: list[str], lines: str, name: str
) -> None:
    codes = ExitCodes()
    codes.take_from(f"[mpiexec@a] Exit codes: {lines}".encode())
    codes.take_from(b"")
    place = culprit(codes.codes)
    assert place is not None
    launch = Launch(("train.py",), ranks, tuple(Host(*slot) for slot in slots.items()), options=tuple(options))
    assert codes.name(place, launch) == name


def test_only_an_end_of_its_own_is_worth_a_line() -> None:
    assert [is_telling(code) for code in (3, -11, 1, -9, -15)] == [True, True, False, False, False]
