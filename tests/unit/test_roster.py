"""Who becomes a rank of the next generation, and when."""

from __future__ import annotations

import pytest

from hvdlite.recovery.roster import Generation, Join, Roster


def roster(count: int, least: int = 1) -> Roster:
    """With workers 0, 1, ... on seats of the same numbers."""
    made = Roster(least)
    for worker in range(count):
        made.add(worker, worker)
    return made


def begin(made: Roster, *workers: int) -> Generation:
    """The generation that begins when ``workers`` have come."""
    for worker in workers:
        assert made.next_generation() is None
        made.come(Join(worker))
    generation = made.next_generation()
    assert generation is not None
    assert made.next_generation() is None
    return generation


def test_the_first_generation_has_all_in_the_order_of_seats() -> None:
    made = roster(3)
    assert begin(made, 2, 0, 1) == Generation(1, (0, 1, 2), are_alike=False)
    assert not (made.late or made.knocks or made.is_short)


def test_who_ends_before_the_first_generation_is_not_waited_for() -> None:
    made = roster(3)
    made.come(Join(0))
    made.come(Join(2))
    made.remove(1)
    assert made.next_generation() == Generation(1, (0, 2), are_alike=False)


def test_survivors_go_on_without_waiting_for_a_new_process() -> None:
    made = roster(3)
    begin(made, 0, 1, 2)
    made.remove(1)
    made.add(3, 1)
    made.come(Join(2, failed=1))
    assert made.late == {0}
    assert begin(made, 0) == Generation(2, (0, 2), are_alike=False)
    made.come(Join(3))
    assert made.knocks and not made.is_short and made.newcomers == {3}
    # They meet again at the next commit: the new one has the rank of the one whose seat it has.
    assert begin(made, 0, 2) == Generation(3, (0, 3, 2), are_alike=False)


@pytest.mark.parametrize(("failed", "are_alike"), [(None, True), (2, False)])
def test_ranks_that_only_got_fewer_are_alike_unless_one_has_gone_back(failed: int | None, are_alike: bool) -> None:
    """A rank may hear of a failure in the commit that others have come through."""
    made = roster(4)
    begin(made, 0, 1, 2, 3)
    made.remove(2)
    made.remove(3)
    made.come(Join(1, failed=failed))
    assert begin(made, 0) == Generation(2, (0, 1), are_alike)


def test_too_few_wait_for_a_new_process() -> None:
    made = roster(2, least=2)
    begin(made, 0, 1)
    made.remove(0)
    made.add(2, 0)
    made.come(Join(1))
    assert made.is_short and made.next_generation() is None
    assert begin(made, 2).workers == (1, 2)  # rank 0 is one that has the state


@pytest.mark.parametrize("follows_rank_0", [False, True])
def test_rank_0_may_be_new_only_where_nobody_follows_it(follows_rank_0: bool) -> None:
    made = roster(3)
    begin(made, 0, 1, 2)
    made.remove(0)
    made.add(3, 0)
    for worker in (3, 2, 1):
        made.come(Join(worker, follows_rank_0=follows_rank_0 or worker == 3))
    generation = made.next_generation()
    assert generation is not None
    assert generation.workers == ((1, 3, 2) if follows_rank_0 else (3, 1, 2))


def test_nobody_is_late_where_newcomers_alone_wait() -> None:
    made = roster(2)
    begin(made, 0, 1)
    made.add(2, 2)
    made.come(Join(2))
    assert made.late == set() and made.knocks and not made.is_short
    assert made.next_generation() is None
    made.remove(2)
    assert not made.knocks
