"""What is wrong, found in facts alone: each finding says what, where, and what to do."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from hvdlite.doctor.links import NOBODY, Link
from hvdlite.rank_list import rank_list

Facts = Mapping[str, Any]

_FEW_FILES = 1024
_FEW_PROCESSES = 1024
_LITTLE_MEMORY_BYTES = 256 << 20
_LITTLE_LOCKED_BYTES = 1 << 30
_SHM_BYTES_PER_RANK = 8 << 20  # that MPI libraries take for themselves
_SLOW = 3.0  # times slower than the upper quartile of the links
_LATE = 5.0  # times the median's latency, and
_LATE_US = 1000.0
_CLOCK_S = 1.0
_MUST_AGREE = ("hvdlite", "torch", "numpy", "mpi4py")


class Severity(IntEnum):
    """A note does not matter to the exit status; where there is an obstacle, hvd.init() would fail or hang."""

    NOTE = 0
    PROBLEM = 1
    OBSTACLE = 2


@dataclass(frozen=True)
class Finding:
    """One sentence or two."""

    text: str
    severity: Severity = Severity.PROBLEM

    @property
    def is_problem(self) -> bool:
        return self.severity > Severity.NOTE


def of_machine(found: Facts) -> Iterator[Finding]:
    """What is wrong with one machine by itself."""
    limits = found["limits"]
    files, processes = limits["open files"], limits["processes"]
    if files is not None and files < _FEW_FILES:
        yield Finding(
            f"only {files} files may be open, and DataLoaders share memory by files: `ulimit -n {_FEW_FILES}` or more"
        )
    if processes is not None and processes < _FEW_PROCESSES:
        yield Finding(f"only {processes} processes and threads may run: `ulimit -u {4 * _FEW_PROCESSES}` or more")
    machine = found["machine"]
    if (processes := machine["process limit"]) is not None and processes < _FEW_PROCESSES:
        yield Finding(
            f"only {processes} processes and threads may run in this control group: give the container more "
            "(--pids-limit), or the unit (TasksMax)"
        )
    if found["versions"].get("torch") is None:
        yield Finding("torch is not installed: pip install torch")
    locked, devices = limits["locked memory"], machine["RDMA devices"]
    if devices and locked is not None and locked < _LITTLE_LOCKED_BYTES:
        yield Finding(
            f"only {locked >> 10} KiB of memory may be locked, and {devices[0]} locks what it sends: "
            "`ulimit -l unlimited`, in limits.conf or in the unit that starts the scheduler's daemon"
        )
    available = min(machine["memory available bytes"], machine["memory limit bytes"] or machine["memory bytes"])
    if available < _LITTLE_MEMORY_BYTES:
        yield Finding(
            f"{available >> 20} MiB of memory are left: end other programs, or give the container more (--memory)"
        )


def of_job(
    ranks: Sequence[Facts], nodes: Sequence[Sequence[int]], links: Sequence[Link], pairs: Sequence[tuple[int, int]]
) -> list[Finding]:
    """What is wrong with a job.

    Args:
        ranks: the facts of each.
        nodes: the ranks of each.
        links: between nodes, as far as they were measured; ``pairs``: which should have been.
    """
    names = names_of(ranks, nodes)
    return [
        *_of_each_machine(ranks, nodes),
        *_of_versions(ranks),
        *_of_settings(ranks),
        *_of_hosts(ranks, nodes),
        *_of_mpi(ranks, nodes),
        *_of_cores(ranks, nodes),
        *of_links(names, links),
        *_of_speed(names, links),
        *_of_interfaces(names, links),
        *_of_clocks(names, links),
        *_of_pairs(links, pairs),
    ]


def names_of(ranks: Sequence[Facts], nodes: Sequence[Sequence[int]]) -> list[str]:
    """The host of each node; with its place where others have the same name."""
    hosts = [ranks[members[0]]["host"] for members in nodes]
    return [host if hosts.count(host) == 1 else f"{host} (node {node})" for node, host in enumerate(hosts)]


def _of_each_machine(ranks: Sequence[Facts], nodes: Sequence[Sequence[int]]) -> Iterator[Finding]:
    said: dict[str, list[int]] = {}
    for facts in ranks:
        for finding in of_machine(facts):
            said.setdefault(finding.text, []).append(facts["rank"])
    for text, members in said.items():
        yield Finding(f"{_where(members, ranks, nodes)}: {text}")


def _of_versions(ranks: Sequence[Facts]) -> Iterator[Finding]:
    python = [facts["versions"]["python"].rpartition(".")[0] for facts in ranks]
    for package, versions in {
        "Python": python,
        **{name: [facts["versions"].get(name, "none") for facts in ranks] for name in _MUST_AGREE},
        "MPI": [facts["mpi"]["library"] if facts["mpi"] else "none" for facts in ranks],
    }.items():
        if differences := _differences(versions):
            cure = "Install the same on every host, and start ranks by the same environment"
            yield Finding(f"{package} differs: {differences}. {cure}")
    for what, key in (("processor", "processor"), ("kernel", "system")):
        if differences := _differences([facts["machine"][key] for facts in ranks]):
            yield Finding(f"the {what} differs, which does no harm by itself: {differences}", severity=Severity.NOTE)
    if differences := _differences([facts["native"]["instruction set"] for facts in ranks]):
        yield Finding(
            f"the instruction set differs: {differences}. Steps take as long as the slowest", severity=Severity.NOTE
        )


def _of_settings(ranks: Sequence[Facts]) -> Iterator[Finding]:
    names = sorted({name for facts in ranks for name in facts["settings"]})
    for name in names:
        if differences := _differences([facts["settings"].get(name, "not set") for facts in ranks]):
            way = "Those of rank 0 hold" if name.startswith(("HVDLITE_", "HOROVOD_")) else "Forward it to all hosts"
            yield Finding(f"{name} differs: {differences}. {way}", severity=Severity.NOTE)


def _of_hosts(ranks: Sequence[Facts], nodes: Sequence[Sequence[int]]) -> Iterator[Finding]:
    leaders = [ranks[members[0]] for members in nodes]
    for host, count in Counter(facts["host"] for facts in leaders).items():
        if count > 1:
            yield Finding(
                f"{count} nodes call themselves {host}. Where these are containers that is fine with hvdliterun; under "
                "Open MPI's own mpirun add `--mca coll ^han`, which tells nodes apart by their names",
                severity=Severity.NOTE,
            )
    for facts, members in zip(leaders, nodes, strict=True):
        needed = _SHM_BYTES_PER_RANK * len(members)
        free = facts["machine"]["/dev/shm free bytes"]
        if facts["mpi"] is not None and len(members) > 1 and free < needed:
            yield Finding(
                f"{facts['host']}: {free >> 20} MiB are free in /dev/shm, and MPI may need {needed >> 20} for "
                f"{len(members)} ranks: start the container with --shm-size={max(64, needed >> 20)}m or more"
            )


def _of_mpi(ranks: Sequence[Facts], nodes: Sequence[Sequence[int]]) -> Iterator[Finding]:
    if len(nodes) > 1 and any(facts["mpi"] is None for facts in ranks):
        hosts = ",".join(f"{ranks[members[0]]['host']}:{len(members)}" for members in nodes)
        yield Finding(
            f"ranks are on {len(nodes)} machines, or containers that share no memory, and were started without MPI, "
            f"which hvdlite needs between these: `hvdliterun -np {len(ranks)} -H {hosts} ...`",
            Severity.OBSTACLE,
        )
    weak = [facts["rank"] for facts in ranks if facts["mpi"] and facts["mpi"]["thread level"] != "MULTIPLE"]
    if weak:
        level = ranks[weak[0]]["mpi"]["thread level"]
        yield Finding(
            f"{_where(weak, ranks, nodes)}: MPI runs at MPI_THREAD_{level}: hvdlite needs MULTIPLE, or "
            "HVDLITE_MPI_THREADS_DISABLE=1 where nothing else calls MPI"
        )


def _of_cores(ranks: Sequence[Facts], nodes: Sequence[Sequence[int]]) -> Iterator[Finding]:
    for members in nodes:
        masks = [frozenset(ranks[rank]["core numbers"]) for rank in members]
        usable, cores = len(frozenset().union(*masks)), ranks[members[0]]["machine"]["cores"]
        host = ranks[members[0]]["host"]
        if usable < len(members) and usable < cores:
            yield Finding(
                f"{host}: {rank_list(members)} may use {usable} of its {cores} cores: start them with "
                "`--bind-to none`, as hvdliterun does, or give the container more (--cpus, --cpuset-cpus)"
            )
        elif usable < len(members):
            yield Finding(f"{host}: {len(members)} ranks share {usable} cores, which is slower", severity=Severity.NOTE)


def of_links(names: Sequence[str], links: Sequence[Link]) -> Iterator[Finding]:
    """What does not get through.

    Args:
        names: of the nodes.
    """
    yield from _of_reach(names, links)
    for link in links:
        if link.interfaces is None:
            continue
        way, interface = f"from {names[link.source]} to {names[link.target]}", link.interfaces[0]
        if link.mtu and link.frame_bytes and link.frame_bytes < link.mtu:
            yield Finding(
                f"{way}: frames of {link.frame_bytes} bytes arrive, and full ones of {link.mtu}, as {interface} sends "
                "them, are lost: large messages would hang. Give switches and interfaces of all hosts the same MTU, or "
                f"lower it: `ip link set {interface} mtu {link.frame_bytes}`",
                Severity.OBSTACLE,
            )
        elif link.is_stalled:
            yield Finding(
                f"{way}: single bytes arrive, and a stream does not: look for a lower MTU on the way, and at the "
                f"errors that `ip -s link show {interface}` counts",
                Severity.OBSTACLE,
            )


def _of_pairs(links: Sequence[Link], pairs: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    unmeasured = {*pairs} - {(link.source, link.target) for link in links}
    if unmeasured:
        text = f"{len(unmeasured)} of {len(pairs)} ways between hosts were not measured"
        yield Finding(text, severity=Severity.NOTE)


def _of_reach(names: Sequence[str], links: Sequence[Link]) -> Iterator[Finding]:
    """By what came of each address: who cannot be reached at all, and which interfaces lead nowhere."""
    nowhere: dict[tuple[str, str], list[str]] = {}
    for link in links:
        source, target = names[link.source], names[link.target]
        if link.interfaces is None:
            tried = ", ".join(f"{t.address} ({t.interface}): {t.outcome}" for t in link.tries) or "it has no address"
            yield Finding(
                f"{source} cannot reach {target}: {tried}. {_cure_of({t.outcome for t in link.tries})}",
                Severity.OBSTACLE,
            )
            continue
        for failed in link.tries:
            if failed.outcome != "ok":
                nowhere.setdefault((failed.interface, failed.outcome), []).append(f"{source} to {target}")
    working = sorted({link.interfaces[1] for link in links if link.interfaces is not None})
    for (interface, outcome), ways in nowhere.items():
        yield Finding(
            f"{interface} is up and does not connect {_some(ways)} ({outcome}), and MPI may wait on it: "
            f"`hvdliterun --network-interfaces {','.join(working)}`, or HVDLITE_NETWORK_INTERFACES"
        )


def _cure_of(outcomes: Iterable[str]) -> str:
    seen = set(outcomes)
    if NOBODY in seen:
        return (
            "Look for an error of its ranks, and for a firewall (`nft list ruleset`, `iptables -S`) at either host, "
            "which also keeps mpirun's daemons from calling back: allow all TCP ports between them"
        )
    if "refused" in seen or "no answer" in seen:
        how = "rejects" if seen == {"refused"} else "drops"
        return (
            f"A firewall {how} what goes to ports that programs choose (`nft list ruleset`, `iptables -S`), or the "
            "addresses are of a network that does not connect the hosts: allow all TCP ports between them, or name an "
            "interface in HVDLITE_NETWORK_INTERFACES"
        )
    if "another program answers" in seen:
        return "Several hosts have the same address: name an interface in HVDLITE_NETWORK_INTERFACES"
    return "Name an interface that connects the hosts in HVDLITE_NETWORK_INTERFACES, and look at `ip route`"


def _of_speed(names: Sequence[str], links: Sequence[Link]) -> Iterator[Finding]:
    """Links much slower than others; a host, if all its links are."""
    rates = {(link.source, link.target): link.gbit_per_s for link in links if link.gbit_per_s is not None}
    for group, factor in slow_links(rates):
        sources, targets = ({pair[end] for pair in group} for end in (0, 1))
        common = set.intersection(*({*pair} for pair in group))
        if len(group) > 1 and len(sources) == 1:
            where = f"all that {names[group[0][0]]} sends"
        elif len(group) > 1 and len(targets) == 1:
            where = f"all that {names[group[0][1]]} receives"
        elif len(group) > 1:
            where = f"all that {names[common.pop()]} sends and receives"
        else:
            where = f"the way from {names[group[0][0]]} to {names[group[0][1]]}"
        yield Finding(
            f"{where} is slow: {min(rates[pair] for pair in group):.2g} Gbit/s, and other links carry {factor:.1f} "
            "times as much. Every ring waits for its slowest link: look at cable, port speed (`ethtool`) and other "
            "traffic there"
        )
    latencies = [link.latency_us for link in links if link.latency_us is not None]
    for link in links:
        if link.latency_us is not None and link.latency_us > max(_LATE_US, _LATE * statistics.median(latencies)):
            source, target = names[link.source], names[link.target]
            yield Finding(
                f"a message from {source} to {target} takes {link.latency_us:.0f} us, where the median is "
                f"{statistics.median(latencies):.0f}",
                severity=Severity.NOTE,
            )


def _of_interfaces(names: Sequence[str], links: Sequence[Link]) -> Iterator[Finding]:
    """Interfaces much slower than others that connect the same hosts: a note, as an MPI may weigh or leave them out."""
    slow: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for link in links:
        if link.interfaces is None or link.gbit_per_s is None:
            continue
        rates = {link.interfaces[1]: link.gbit_per_s, **link.others_gbit_per_s}
        best = max(rates.values())
        fast = ",".join(sorted(interface for interface, rate in rates.items() if rate * _SLOW >= best))
        for interface, rate in rates.items():
            if rate * _SLOW < best:
                way = f"{names[link.source]} to {names[link.target]}"
                slow.setdefault((interface, fast), []).append((rate, best, way))
    for (interface, fast), ways in slow.items():
        rate, best, _ = min(ways)
        yield Finding(
            f"{interface} connects {_some([way for _, _, way in ways])} too, at {rate:.2g} Gbit/s, {fast} at "
            f"{best:.2g}; MPI may send as much by either: `hvdliterun --network-interfaces {fast}`, or "
            "HVDLITE_NETWORK_INTERFACES",
            severity=Severity.NOTE,
        )


def slow_links(rates: Mapping[tuple[int, int], float]) -> list[tuple[list[tuple[int, int]], float]]:
    """Links that are much slower than the upper quartile: all of a node, all that it sends, or receives, else one.

    One slow host of three makes most links slow, so that the median would say nothing.

    Returns:
        (the links, how many times slower the slowest is than the quartile).
    """
    if len(rates) < 3:
        return []
    usual = statistics.quantiles(rates.values(), n=4)[2]
    slow = {pair for pair, rate in rates.items() if rate * _SLOW < usual}
    found = []
    nodes = sorted({node for pair in rates for node in pair})
    groups = [[pair for pair in rates if node in pair] for node in nodes]
    groups += [[pair for pair in rates if pair[end] == node] for end in (0, 1) for node in nodes]
    for group in [*(group for group in groups if len(group) > 1), *([pair] for pair in rates)]:
        if slow.issuperset(group):
            found.append((group, usual / max(min(rates[pair] for pair in group), 1e-9)))
            slow -= {*group}
    return found


def _of_clocks(names: Sequence[str], links: Sequence[Link]) -> Iterator[Finding]:
    offsets = {link.target: link.clock_offset_s for link in links if link.source == 0 and link.clock_offset_s}
    for node, offset in sorted(offsets.items()):
        if abs(offset) > _CLOCK_S:
            how = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'}"
            yield Finding(
                f"the clock of {names[node]} is {how} that of {names[0]}, which logs show: run chrony or ntpd there",
                severity=Severity.NOTE,
            )


def _differences(values: Sequence[Hashable]) -> str:
    """'2.1 on rank 0, 2.2 on ranks 1 and 2'; empty where all are the same."""
    by_value: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return ""
    return ", ".join(f"{value} on {rank_list(members)}" for value, members in by_value.items())


def _where(members: Sequence[int], ranks: Sequence[Facts], nodes: Sequence[Sequence[int]]) -> str:
    """The hosts of ``members`` if these are all ranks there, else the ranks."""
    if len(members) == len(ranks):
        return "everywhere" if len(nodes) > 1 else ranks[0]["host"]
    whole = [place for place, node in enumerate(nodes) if {*node} <= {*members}]
    if sum(len(nodes[place]) for place in whole) == len(members):
        names = names_of(ranks, nodes)
        return ", ".join(names[place] for place in whole)
    return rank_list(members)


def _some(ways: Sequence[str]) -> str:
    return ", ".join(ways[:3]) + (f" and {len(ways) - 3} more" if len(ways) > 3 else "")
