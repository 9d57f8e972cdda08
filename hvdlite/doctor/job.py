"""The ranks of a job: each tells its facts, hosts measure their links, and all compute sums together.

Ranks meet as in hvd.init(), by MPI or without. What init() does then, leaders connect to one another for example, comes
last, and only where nothing stands in its way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from hvdlite import mpi
from hvdlite.agreement import Bootstrap, exchange
from hvdlite.config import Config
from hvdlite.doctor import facts, findings, memory, network
from hvdlite.doctor.check import CHECK_BYTES, check_group, summary
from hvdlite.doctor.findings import Finding, Severity
from hvdlite.doctor.links import Address, Door, Link, mtu_of
from hvdlite.doctor.station import Station
from hvdlite.errors import StartupError
from hvdlite.job_runtime import Runtime
from hvdlite.links.interfaces import select
from hvdlite.node import discover
from hvdlite.peers import Peers, start_deadline

_CHECK_S = 0.2  # of each of two bandwidths
_CHECK_BYTES_ACROSS = 4 << 20  # nodes
_LOOK_S = 0.002
_FINALIZE_S = 5.0


def examine(config: Config) -> tuple[int, dict[str, Any]]:
    """(this rank, what was found, the same on every rank). Collective over all ranks that were started.

    Raises:
        StartupError: they do not find one another.
    """
    deadline = start_deadline(config)
    started = time.monotonic()
    try:
        with Peers().of(None, config) as ranks:
            mpi.unlink_shared_files()
            found = _examine(ranks, config)
            found["seconds"] = time.monotonic() - started
            rank = 0 if ranks is None else ranks.rank
    finally:
        deadline.cancel()
    mpi.finalize(_FINALIZE_S, lambda: False)
    return rank, found


def _examine(ranks: Bootstrap | None, config: Config) -> dict[str, Any]:
    rank = 0 if ranks is None else ranks.rank
    told = exchange(ranks, lambda: facts.of_rank(rank, config))
    nodes, node = discover(ranks, config.start_timeout_s)
    try:
        node.timeout_s = config.start_timeout_s
        place = next(i for i, members in enumerate(nodes) if rank == members[0]) if node.is_leader else None
        links, pairs = _links(ranks, place, len(nodes), told[rank]["host"], config)
        shared = exchange(ranks, lambda: memory.measure(node))
    finally:
        node.close()
    noted = findings.of_job(told, nodes, links, pairs)
    found: dict[str, Any] = {
        "ranks": told,
        "nodes": [list(members) for members in nodes],
        "found by": "who can pass file descriptors: ranks of a node connect by abstract sockets",
        "shared memory": [shared[members[0]] for members in nodes],
        "links": [asdict(link) for link in links],
        "started": "without MPI" if ranks is None or ranks.comm is None else "by MPI",
    }
    if all(finding.severity < Severity.OBSTACLE for finding in noted):
        found["check"] = _check(ranks, config, CHECK_BYTES if len(nodes) == 1 else _CHECK_BYTES_ACROSS)
        if problem := found["check"].get("problem"):
            noted.append(Finding(problem))
    found["problems"] = [finding.text for finding in noted if finding.is_problem]
    found["notes"] = [finding.text for finding in noted if not finding.is_problem]
    return found


def _links(
    ranks: Bootstrap | None, node: int | None, nodes: int, host: str, config: Config
) -> tuple[list[Link], list[tuple[int, int]]]:
    """(the links that were measured, those that are between all nodes). Collective.

    Args:
        node: that this rank leads; None: none.
    """
    if nodes == 1:
        return [], []
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    with ExitStack() as stack:

        def open_door() -> Door | None:
            if node is None:
                return None
            station = stack.enter_context(closing(Station(host, addresses_of(config))))
            return station.door

        doors = [door for door in exchange(ranks, open_door) if door is not None]

        def gather(link: Link | None) -> list[Link | None]:
            _wait_quietly(ranks)  # ranks that wait inside MPI would keep the cores from those that measure
            assert ranks is not None
            return ranks.allgather(link)

        def measured(rounds: Iterable[list[tuple[int, int]]]) -> list[Link]:
            return [
                link
                for pairs in rounds
                for directed in network.in_both_directions(pairs)
                for link in network.measure_round(directed, node, doors, gather)
            ]

        links = measured(network.rounds(nodes))
        slow = findings.slow_links({(link.source, link.target): link.gbit_per_s or 0.0 for link in links})
        # What looks slow is measured once more: another program may have been at work.
        again = {tuple(sorted(pair)) for group, _ in slow for pair in group}
        for better in measured([[(a, b)] for a, b in sorted(again)]):
            links = [_faster(link, better) for link in links]
        return links, pairs


def addresses_of(config: Config) -> list[Address]:
    return [
        Address(interface.name, interface.address, mtu_of(interface.name))
        for interface in select(config.network_interfaces)
    ]


def _faster(link: Link, other: Link) -> Link:
    is_same = (link.source, link.target) == (other.source, other.target)
    return other if is_same and (other.gbit_per_s or 0.0) > (link.gbit_per_s or 0.0) else link


def _wait_quietly(ranks: Bootstrap | None) -> None:
    """Sleep until all ranks are here."""
    if ranks is None or ranks.comm is None:
        return
    request = ranks.comm.Ibarrier()
    while not request.Test():
        time.sleep(_LOOK_S)


def _check(ranks: Bootstrap | None, config: Config, nbytes: int) -> dict[str, Any]:
    """Start hvdlite on all ranks, and compute. Collective."""
    try:
        runtime = Runtime(ranks, config, versions={})
    except StartupError as error:
        return {"problem": f"hvd.init() fails: {error}"}
    with closing(runtime):
        own = check_group(runtime.group, _CHECK_S, nbytes)
    return summary(exchange(ranks, lambda: own), nbytes)
