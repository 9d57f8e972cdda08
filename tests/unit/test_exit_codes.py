"""Lines of MPICH and Intel MPI on the exit codes of ranks: taken out of what passes through, and understood."""

from __future__ import annotations

import pytest

from hvdlite.cli.exit_codes import ExitCodes, culprit, is_telling, stands_out
from hvdlite.cli.job import Host, Launch
from hvdlite.cli.run import _status_of
from hvdlite.cli.supervise import Ending

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


KILLED_FIRST = b"""step 1
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4242 RUNNING AT b
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
"""


@pytest.mark.parametrize("length", [1, 30, len(KILLED_FIRST)])
def test_a_launcher_that_names_only_the_rank_that_was_killed_first(length: int) -> None:
    """As MPICH's over several hosts, which ends with 255."""
    codes = ExitCodes()
    pieces = [KILLED_FIRST[i : i + length] for i in range(0, len(KILLED_FIRST), length)]
    assert b"".join(map(codes.take_from, [*pieces, b""])) == KILLED_FIRST
    launch = Launch(("train.py",), 4, (Host("a", 2), Host("b", 2)))
    assert codes.codes == [-9] and codes.first_host == "b"
    assert codes.place_of(None, launch) == codes.place_of(3, launch) == 0
    assert codes.name(0, launch) == "a rank on b (pid 4242)"


@pytest.mark.parametrize(("lines", "were_killed"), [("[b] 0,9\n", True), ("[a] 256,0\n[b] 0,9\n", False)])
def test_a_launcher_that_has_not_heard_of_all_ends(lines: str, were_killed: bool) -> None:
    """As MPICH's at times, and then it says 0 of them."""
    codes = ExitCodes()
    codes.take_from(KILLED_FIRST)
    codes.take_from(f"[mpiexec@a] Exit codes: {lines}".encode())
    codes.take_from(b"")
    assert codes.were_killed_at_first_host is were_killed


@pytest.mark.parametrize(
    ("lines", "were_killed"),
    [
        ("[a:0] 9,9\n[b:0] 9,9\n", True),
        ("[a:0] 0,0\n[b:0] 9,15\n", True),
        ("[b:0] 9,9\n", True),
        ("[a:0] 9,9\n[b:0] 0,9\n", False),  # perhaps because of the one that has ended with 0
        ("[a:0] 9,256\n[b:0] 9,9\n", False),
    ],
)
def test_where_ranks_were_killed_first_of_a_launcher_that_says_more(lines: str, were_killed: bool) -> None:
    codes = ExitCodes()
    codes.take_from(KILLED_FIRST.replace(b"PID", b"RANK 2 PID").replace(b"EXIT CODE: 9", b"KILLED BY SIGNAL: 9 (Kil)"))
    codes.take_from(f"[mpiexec@a] Exit codes: {lines}".encode())
    codes.take_from(b"")
    assert codes.first_host == "b" and codes.were_killed_at_first_host is were_killed
    launch = Launch(("train.py",), 4, (Host("a", 2), Host("b", 2)))
    assert codes.place_of(None, launch) is None
    assert codes.place_of(3, launch) == (3 if "[a" in lines else None)


@pytest.mark.parametrize(
    ("codes", "missed", "rank"),
    [
        ([1, 1, -9, -9], 3, 3),  # the others have failed for lack of it
        ([-9, -9, -9, -9], 2, 2),
        ([1, 1, 7, -9], 3, 2),  # it was killed because of that one
        ([1, 1, -9, 0], 3, 0),  # it has succeeded
    ],
)
def test_whom_the_others_missed(codes: list[int], missed: int, rank: int) -> None:
    assert culprit(codes, None, missed) == rank


def test_only_an_end_of_its_own_is_worth_a_line() -> None:
    assert [is_telling(code) for code in (3, -11, 1, -9, -15)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("codes", "failed", "said"),
    [
        ("9,9,0", 2, "rank 2 ended before its time, and the others for lack of it"),
        ("9,9,0", None, ""),
        ("9,768,0", 2, "rank 1 ended with exit status 3"),
    ],
)
def test_who_has_left_the_others_with_status_0_is_named(
    codes: str, failed: int | None, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by os._exit(0)."""
    ends = ExitCodes()
    ends.take_from(f"[mpiexec@vm] Exit codes: [vm] {codes}\n".encode())
    ends.take_from(b"")
    status = _status_of(ends, Launch(("true",), 3), Ending(255, None), failed)
    assert status == (3 if "3" in said else 137)
    assert capfd.readouterr().err == (f"hvdlite run: {said}\n" if said else "")
