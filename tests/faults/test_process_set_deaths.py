"""A rank that goes wrong while several process sets are at work: members of its sets and others end all the same.

Ranks 0 and 1 play one node, 2 and 3 another; every pair of neighbours is a set, so each rank is in two.
"""

from __future__ import annotations

import pytest

from fault_lab import check_end, run

SETS = """
kind, victim = sys.argv[1], int(sys.argv[2])
hvdlite.init()
runtime = hvdlite.runtime()
made = [runtime.add_group(ranks)[1] for ranks in ([0, 1], [1, 2], [2, 3], [0, 3])]
mine = [group for group in made if group is not None]

def work():
    views = [tensor(300_000, 0.0) for _ in mine]
    for handle in [allreduce_async(group, [view], [view], name="t") for group, view in zip(mine, views)]:
        handle.wait()

work()
if runtime.rank == victim:
    time.sleep(0.2)  # its neighbours wait for it in their sets by now
    say("dying at", time.time())
    if kind == "raise":
        raise ValueError("the loss is not a number")
    if kind == "exit":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    work()
"""


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank(victim: int) -> None:
    result = run(SETS, "SIGKILL", str(victim), machines="0011", alone=True)
    check_end(result, f"rank {victim} (pid", "died without a word")


def test_an_exception() -> None:
    result = run(SETS, "raise", "2", machines="0011", alone=True)
    check_end(result, "rank 2 raised ValueError: the loss is not a number")


def test_a_rank_that_leaves_early() -> None:
    result = run(SETS, "exit", "1", machines="0011")
    check_end(result, "ShutDownError: rank 1 has shut down hvdlite (its process ended), so")


def test_an_end_in_order_with_sets_that_nobody_removed() -> None:
    script = """
hvdlite.init()
groups = [hvdlite.runtime().add_group(ranks)[1] for ranks in ([0, 1], [1, 2], [0, 2, 3])]
for group in groups:
    if group is not None:
        barrier_async(group).wait()
barrier_async(hvdlite.runtime().group).wait()
say("done")
"""
    result = run(script, machines="0011").check()
    assert result.stdout.count("done") == 4
