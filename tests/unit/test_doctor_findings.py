"""What the doctor finds in facts: one test a finding, and none where all is well."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hvdlite.doctor import facts, findings, report
from hvdlite.doctor.findings import Severity, of_job, slow_links
from hvdlite.doctor.links import NOBODY, Link, Try
from hvdlite.doctor.network import rounds

NODES = [[0, 1], [2, 3], [4, 5]]
OWN = facts.of_machine()


def ranks(nodes: Sequence[Sequence[int]] = NODES) -> list[dict[str, Any]]:
    """Of a job in which nothing is wrong."""
    healthy = copy.deepcopy(OWN)
    healthy["machine"] |= {
        "cores": 8,
        "core limit": None,
        "memory available bytes": 8 << 30,
        "memory limit bytes": None,
        "process limit": None,
    }
    healthy["machine"] |= {"/dev/shm free bytes": 1 << 30, "RDMA devices": []}
    healthy["limits"] = dict.fromkeys(healthy["limits"])
    healthy["versions"]["torch"] = "2.13.0"
    mpi = {"library": "Open MPI v5.0.11", "standard": "3.1", "thread level": "MULTIPLE"}
    eth0 = {"name": "eth0", "address": "10.0.0.1", "up": True, "loopback": False, "chosen": True, "mtu": 1500}
    return [
        copy.deepcopy(
            {
                **healthy,
                "rank": rank,
                "host": f"node{node}",
                "mpi": mpi,
                "core numbers": [*range(8)],
                "interfaces": [eth0],
            }
        )
        for node, members in enumerate(nodes)
        for rank in members
    ]


def link(source: int, target: int, gbit_per_s: float = 1.0, **more: Any) -> Link:
    tries = [Try("eth0", f"10.0.0.{target + 1}", "ok")]
    figures = {"latency_us": 20.0, "clock_offset_s": 1e-6, "mtu": 1500, "frame_bytes": 1500}
    return Link(
        source, target, **{"tries": tries, "interfaces": ("eth0", "eth0"), **figures, "gbit_per_s": gbit_per_s, **more}
    )


PAIRS = [(a, b) for a in range(3) for b in range(3) if a != b]


def found(
    change: Callable[[list[dict[str, Any]]], object], links: Sequence[Link] | None = None
) -> list[findings.Finding]:
    told = ranks()
    change(told)
    return of_job(told, NODES, [link(*pair) for pair in PAIRS] if links is None else links, PAIRS)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert found(lambda told: None) == []


def assign(told: list[dict[str, Any]], wanted: Sequence[int], *path: Any) -> None:
    *keys, last, value = path
    for rank in wanted:
        place = told[rank]
        for key in keys:
            place = place[key]
        place[last] = value


@pytest.mark.parametrize(
    ("wanted", "path", "severity", "words"),
    [
        (
            [2, 3],
            ("versions", "torch", "2.4.0"),
            Severity.PROBLEM,
            "torch differs: 2.13.0 on ranks 0, 1, 4 and 5, 2.4.0 on",
        ),
        ([5], ("versions", "python", "3.9.1"), Severity.PROBLEM, "Python differs: "),
        ([0, 1], ("limits", "open files", 256), Severity.PROBLEM, "node0: only 256 files may be open"),
        ([4], ("limits", "open files", 256), Severity.PROBLEM, "rank 4: only 256 files may be open"),
        (range(6), ("limits", "open files", 256), Severity.PROBLEM, "everywhere: only 256 files may be open"),
        ([2], ("mpi", "thread level", "SERIALIZED"), Severity.PROBLEM, "rank 2: MPI runs at MPI_THREAD_SERIALIZED"),
        ([2, 3], ("mpi", None), Severity.OBSTACLE, "`hvdliterun -np 6 -H node0:2,node1:2,node2:2 ...`"),
        (
            [0, 1],
            ("core numbers", [0]),
            Severity.PROBLEM,
            "node0: ranks 0 and 1 may use 1 of its 8 cores: start them with",
        ),
        (
            [2],
            ("machine", "/dev/shm free bytes", 1 << 20),
            Severity.PROBLEM,
            "node1: 1 MiB are free in /dev/shm, and MPI",
        ),
        ([0], ("limits", "processes", 50), Severity.PROBLEM, "rank 0: only 50 processes and threads may run: `ulimit"),
        ([3], ("mpi", "library", "MPICH 4.2"), Severity.PROBLEM, "MPI differs: "),
        ([3], ("native", "instruction set", "baseline"), Severity.NOTE, "the instruction set differs: "),
        ([1], ("machine", "memory limit bytes", 100 << 20), Severity.PROBLEM, "rank 1: 100 MiB of memory are left"),
        (
            [1],
            ("machine", "process limit", 60),
            Severity.PROBLEM,
            "rank 1: only 60 processes and threads",
        ),
        (
            [1],
            ("settings", "HVDLITE_RAILS", "2"),
            Severity.NOTE,
            "HVDLITE_RAILS differs: not set on ranks 0, 2, 3, 4 and 5",
        ),
        ([4, 5], ("host", "node1"), Severity.NOTE, "2 nodes call themselves node1"),
        ([4, 5], ("machine", "processor", "other"), Severity.NOTE, "the processor differs"),
    ],
)
def test_facts_of_ranks(wanted: Sequence[int], path: tuple[Any, ...], severity: Severity, words: str) -> None:
    for finding in (result := found(lambda told: assign(told, wanted, *path))):
        if words in finding.text:
            assert finding.severity is severity
            return
    pytest.fail(f"{words!r} is not in {result}")


def test_locked_memory_matters_where_there_is_an_adapter_that_needs_it() -> None:
    def change(told: list[dict[str, Any]]) -> None:
        assign(told, range(4), "limits", "locked memory", 8 << 20)  # of nodes 0 and 1
        assign(told, range(2, 6), "machine", "RDMA devices", ["mlx5_0", "mlx5_1"])  # of nodes 1 and 2

    (finding,) = found(change)
    assert finding.is_problem
    assert finding.text.startswith(
        "node1: only 8192 KiB of memory may be locked, and mlx5_0 locks what it sends: `ulimit"
    )


def test_more_ranks_than_cores_are_a_note() -> None:
    def squeeze(told: list[dict[str, Any]]) -> None:
        assign(told, [0, 1], "machine", "cores", 1)
        assign(told, [0, 1], "core numbers", [0])

    (finding,) = found(squeeze)
    assert finding.text == "node0: 2 ranks share 1 cores, which is slower" and not finding.is_problem


def with_link(changed: Link) -> list[Link]:
    return [changed if pair == (changed.source, changed.target) else link(*pair) for pair in PAIRS]


@pytest.mark.parametrize(
    ("outcome", "cure"),
    [
        ("no answer", "A firewall drops what goes to ports"),
        ("refused", "A firewall rejects what goes to ports"),
        (NOBODY, "a firewall (`nft list ruleset`, `iptables -S`) at either host"),
        ("no route", "look at `ip route`"),
        ("another program answers", "Several hosts have the same address"),
    ],
)
def test_a_host_that_cannot_be_reached(outcome: str, cure: str) -> None:
    lost = Link(0, 2, [Try("eth0", "10.0.0.3", outcome)])
    (finding,) = found(lambda told: None, with_link(lost))
    assert finding.text.startswith(f"node0 cannot reach node2: 10.0.0.3 (eth0): {outcome}. ") and cure in finding.text
    assert finding.severity is Severity.OBSTACLE


def test_an_interface_that_leads_nowhere() -> None:
    tries = [Try("eth0", "10.0.0.2", "ok"), Try("eth1", "10.1.0.2", "no answer")]
    (finding,) = found(lambda told: None, with_link(link(0, 1, tries=tries)))
    assert "eth1 is up and does not connect node0 to node1 (no answer)" in finding.text
    assert "--network-interfaces eth0`" in finding.text and finding.is_problem


def test_frames_that_are_lost() -> None:
    (finding,) = found(lambda told: None, with_link(link(1, 0, mtu=9000, frame_bytes=1500)))
    assert finding.text.startswith("from node1 to node0: frames of 1500 bytes arrive, and full ones of 9000")
    assert finding.severity is Severity.OBSTACLE
    (finding,) = found(lambda told: None, with_link(link(1, 0, is_stalled=True, frame_bytes=None)))
    assert "a stream does not" in finding.text and finding.severity is Severity.OBSTACLE


@pytest.mark.parametrize(
    ("is_slow", "where"),
    [
        (
            lambda pair: pair == (0, 1),
            "the way from node0 to node1 is slow: 0.1 Gbit/s, and other links carry 10.0 times",
        ),
        (lambda pair: pair[0] == 1, "all that node1 sends is slow"),
        (lambda pair: pair[1] == 1, "all that node1 receives is slow"),
        (lambda pair: 1 in pair, "all that node1 sends and receives is slow"),
    ],
)
def test_slow_links_by_what_they_have_in_common(is_slow: Callable[[tuple[int, int]], bool], where: str) -> None:
    (finding,) = found(lambda told: None, [link(*pair, 0.1 if is_slow(pair) else 1.0) for pair in PAIRS])
    assert where in finding.text and finding.is_problem


def test_an_interface_that_is_slower_than_another_is_a_note() -> None:
    links = [link(*pair, others_gbit_per_s={"eth1": 0.02, "eth2": 0.9}) for pair in PAIRS]
    (finding,) = found(lambda told: None, links)
    assert "eth1 connects node0 to node1, " in finding.text and not finding.is_problem
    assert "too, at 0.02 Gbit/s, eth0,eth2 at 1; " in finding.text
    assert "`hvdliterun --network-interfaces eth0,eth2`" in finding.text
    (finding,) = found(lambda told: None, [link(*pair, others_gbit_per_s={"eth1": 9.0}) for pair in PAIRS])
    assert finding.text.startswith("eth0 connects ") and "`hvdliterun --network-interfaces eth1`" in finding.text


def test_what_varies_is_not_slow() -> None:
    assert slow_links({(0, 1): 1.0, (1, 0): 0.4}) == []
    assert slow_links({(0, 1): 10.0, (1, 0): 4.0, (0, 2): 8.0, (2, 0): 12.0, (1, 2): 9.0, (2, 1): 5.0}) == []


def test_clocks_and_latencies_are_notes() -> None:
    late, ahead = link(0, 2, latency_us=2500.0), link(0, 1, clock_offset_s=-3.0)
    texts = [finding.text for finding in found(lambda told: None, [late, ahead, *(link(*pair) for pair in PAIRS[2:])])]
    assert any("takes 2500 us, where the median is 20" in text for text in texts)
    assert any("the clock of node1 is 3.0 s behind that of node0" in text for text in texts)


def test_ways_that_were_not_measured_are_said() -> None:
    (finding,) = found(lambda told: None, [link(0, 1)])
    assert finding.text == "5 of 6 ways between hosts were not measured"


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 12])
def test_rounds_meet_each_pair_once(nodes: int) -> None:
    met = rounds(nodes)
    assert sorted(pair for pairs in met for pair in pairs) == [
        (a, b) for a in range(nodes) for b in range(a + 1, nodes)
    ]
    for pairs in met:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))


def test_many_nodes_are_measured_in_part() -> None:
    assert len(rounds(64)) == 11 and {node for pair in rounds(64)[0] for node in pair} == {*range(64)}


def test_the_text_has_all_parts() -> None:
    told = ranks()
    assign(told, [0], "core numbers", [0, 1, 2, 5])
    found = {
        "ranks": told,
        "nodes": NODES,
        "found by": "what they can do",
        "shared memory": [{"barrier us": 1.0, "GB/s": 9.0}, None, None],
        "links": [vars(link(0, 1)), vars(Link(1, 2))],
        "started": "by MPI",
        "problems": ["something is wrong"],
        "notes": ["something is odd"],
        "seconds": 1.0,
    }
    text = report.of_job(found)
    assert text.startswith("Problems:\n  something is wrong\n\nNotes:\n  something is odd\n")
    assert "6 ranks on 3 nodes, started by MPI:\n  nodes by what they can do\n  node0: " in text
    assert "rank 0 on 0-2,5" in text
    assert "node1  node2  unreachable  -" in text and "node0  node1  eth0         20           1.00" in text
