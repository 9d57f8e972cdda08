"""How the world of a job begins: what ranks tell one another, who shares a machine, who watches whom."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hvdlite import launched, mpi
from hvdlite.agreement import Bootstrap, exchange
from hvdlite.config import Config
from hvdlite.errors import HorovodVersionMismatchError, StartupError
from hvdlite.links.interfaces import select
from hvdlite.links.leader_links import close_all, connect_leaders
from hvdlite.links.link_probe import Tried, slow_link, try_links
from hvdlite.liveness.health import Health
from hvdlite.node import discover
from hvdlite.processes import ProcessAddress
from hvdlite.recorder import Recorder
from hvdlite.topology import Topology
from hvdlite.version import exact_version
from hvdlite.world import LINKS_SHARE, World

_LOG = logging.getLogger("hvdlite")


@dataclass(frozen=True)
class Card:
    """What every rank tells every other at the start."""

    config: Config
    hostname: str
    pid: int
    process: str
    world_rank: int | None
    started_as: int | None
    addresses: tuple[str, ...]
    news: Any


@dataclass(frozen=True)
class Start:
    """A world that has been built, whose coordinators do not run yet.

    Attributes:
        news: what the first rank had to tell.
        world_ranks: what COMM_WORLD calls each rank; None without MPI.
        hosts: names of the other nodes, by address.
        processes: what tells the process of each rank from all others.
    """

    world: World
    news: Any
    world_ranks: tuple[int | None, ...]
    hosts: dict[str, str]
    processes: tuple[str, ...]


def start_world(
    ranks: Bootstrap | None,
    config: Config,
    recorder: Recorder,
    *,
    versions: Mapping[str, str],
    news: Callable[[], Any],
    on_notice: Callable[[dict[str, Any]], None],
    names: Sequence[int] | None = None,
    recovers: bool = False,
) -> Start:
    """The first world of a job. Collective over ``ranks``.

    Args:
        ranks: who takes part; None for this process alone.
        config: what rank 0 has, every rank gets, since all must plan alike.
        versions: of packages that must be the same on every rank, by name.
        news: what the first rank tells all; called there only.
        on_notice: see `World`.
        names: what failures call the ranks; their own numbers unless given.
        recovers: see `Health`.

    Raises:
        StartupError: names what is wrong and the way out, on every rank.
    """
    links_deadline_s = time.monotonic() + LINKS_SHARE * config.start_timeout_s
    with ExitStack() as undo:
        own = None if ranks is None or ranks.size == 1 else ranks.subset(range(ranks.size))
        if own is not None:
            undo.callback(own.close)  # all ranks fail here or none does, so all of them close it
        spec = config.network_interfaces  # of this host, which may call its interfaces otherwise than rank 0's
        # Text alone: all that follows may have another form in another version.
        _check_versions(exchange(own, lambda: _versions(versions)))
        cards = exchange(own, lambda: _card(own, config, news))
        config = cards[0].config
        nodes, node = discover(own, LINKS_SHARE * config.start_timeout_s)
        undo.callback(node.close)
        _check_reach(own, nodes, cards)
        mpi.unlink_shared_files()  # every local rank has mapped them by now
        topology = Topology(0 if own is None else own.rank, nodes)
        links: dict[int, socket.socket] = {}
        if own is not None and len(nodes) > 1:
            fanout = config.tree_fanout
            links = connect_leaders(own, topology.leaders, topology, fanout, spec, links_deadline_s)
            undo.callback(close_all, links.values())
            hostnames = [cards[leader].hostname for leader in topology.leaders]
            _try_links(own, links, topology, fanout, hostnames, links_deadline_s)
        neighbours = {topology.leaders[index]: link for index, link in links.items()}
        neighbours |= node.take_watch_links()
        called = range(len(cards)) if names is None else names
        started_as = _other_numbers(called, cards)
        watched = [
            (called[rank], _where(cards[rank], started_as.get(called[rank])), link) for rank, link in neighbours.items()
        ]
        launcher = launched.launcher_process()
        health = Health(called[topology.rank], watched, config, launcher, started_as, recovers=recovers)
        undo.pop_all()
    world = _built(own, health, lambda: World(own, topology, node, config, recorder, health, on_notice))
    world_ranks, processes = [card.world_rank for card in cards], [card.process for card in cards]
    return Start(world, cards[0].news, tuple(world_ranks), _other_hosts(topology, cards), tuple(processes))


def _try_links(
    ranks: Bootstrap,
    links: Mapping[int, socket.socket],
    topology: Topology,
    fanout: int,
    hostnames: Sequence[str],
    deadline_s: float,
) -> None:
    """Let each leader try the links to its children, and say so if one of all is slow. Collective."""

    def tried() -> list[Tried]:
        return try_links(links, topology, fanout, hostnames, deadline_s) if topology.is_leader else []

    sentence = slow_link([link for some in exchange(ranks, tried) for link in some], hostnames)
    for link in links.values():
        link.setblocking(True)
    if topology.rank == 0 and sentence:
        _LOG.warning("%s", sentence)


def _other_hosts(topology: Topology, cards: Sequence[Card]) -> dict[str, str]:
    """Names of the other nodes, by address."""
    own = cards[topology.rank].addresses
    leaders = [cards[leader] for leader in topology.leaders]
    return {address: card.hostname for card in leaders for address in card.addresses if address not in own}


def _built(ranks: Bootstrap | None, health: Health, build: Callable[[], World]) -> World:
    """The world of every rank, or of none."""
    built: list[World] = []
    try:
        exchange(ranks, lambda: built.extend([build()]))
    except BaseException as error:
        health.report(error)
        for world in built:
            world.release()
        health.close()
        raise
    return built[0]


def _versions(others: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """(this host, versions of packages by name)."""
    own = {"hvdlite": exact_version(), **{name: str(version) for name, version in others.items()}}
    return socket.gethostname(), own


def _card(ranks: Bootstrap | None, config: Config, news: Callable[[], Any]) -> Card:
    is_first, process = ranks is None or ranks.rank == 0, launched.this_process()
    select(config.network_interfaces)  # a mistake is said at once, though one node needs no interface
    return Card(
        config,
        socket.gethostname(),
        os.getpid(),
        _process(),
        mpi.world_rank(),
        None if process is None else process.rank,
        tuple(address for interface in select(config.network_interfaces) for address in interface.addresses),
        news() if is_first else None,
    )


def _other_numbers(called: Sequence[int], cards: Sequence[Card]) -> dict[int, int]:
    """What the launcher calls ranks that failures call otherwise, as where hvd.init(comm=...) has named some of all."""
    numbers = [card.started_as for card in cards]
    if len({*numbers}) < len(numbers):  # it does not say
        return {}
    pairs = zip(called, numbers, strict=True)
    return {rank: number for rank, number in pairs if number is not None and number != rank}


def _where(card: Card, started_as: int | None) -> str:
    number = "" if started_as is None else f", started as rank {started_as}"
    return f"pid {card.pid} on {card.hostname}{number}"


def _process() -> str:
    """Other on every machine, in every container and of every process."""
    return " ".join(map(str, (socket.gethostname(), *ProcessAddress.own())))


def _check_reach(ranks: Bootstrap | None, nodes: Sequence[Sequence[int]], cards: Sequence[Card]) -> None:
    """Refuses several nodes without MPI, on every rank."""
    if ranks is None or ranks.comm is not None or len(nodes) == 1:
        return
    process = launched.this_process()
    name = "the launcher" if process is None else process.launcher.name
    hosts = ",".join(f"{cards[node[0]].hostname}:{len(node)}" for node in nodes)
    raise StartupError(
        f"{name} started ranks on {len(nodes)} machines, or containers that share no memory ({hosts}), and between "
        f"those hvdlite needs MPI. Start them with `hvdliterun -np {ranks.size} -H {hosts} python train.py`."
    )


def _check_versions(told: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Refuses ranks that run different versions, by the `_versions` of each."""
    for package in dict.fromkeys(name for _, versions in told for name in versions):
        found: dict[str, list[int]] = {}
        for rank, (_, versions) in enumerate(told):
            found.setdefault(versions.get(package, "not loaded"), []).append(rank)
        if len(found) > 1:
            where = ", ".join(f"{version} on rank {r[0]} ({told[r[0]][0]})" for version, r in found.items())
            raise HorovodVersionMismatchError(
                f"the ranks run different versions of {package}: {where}. Install the same version on every host."
            )
