"""Numbers of things in messages."""

from hvdlite.autotune.log import Workload
from hvdlite.counted import counted


def test_one_is_no_plural() -> None:
    assert [counted(count, "rank") for count in range(3)] == ["0 ranks", "1 rank", "2 ranks"]
    assert str(Workload(8, 1, 40)) == "8 ranks on 1 node with 40 bytes of gradients"
