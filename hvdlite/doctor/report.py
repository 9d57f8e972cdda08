"""What was found, for people: problems first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvdlite.doctor.findings import names_of
from hvdlite.rank_list import rank_list


def of_machine(found: dict[str, Any], built_in: str) -> str:
    """One machine.

    Args:
        built_in: what this hvdlite has, as text.
    """
    lines = [verdict(found)]
    for title in ("versions", "machine", "limits", "native", "settings", "check"):
        if found.get(title):
            lines += ["", f"{title.capitalize()}:", *_rows(found[title])]
    return "\n".join([*lines, "", built_in])


def of_job(found: dict[str, Any]) -> str:
    """The ranks of a job."""
    ranks, nodes = found["ranks"], found["nodes"]
    lines = [verdict(found), "", f"{_count(ranks, 'rank')} on {_count(nodes, 'node')}, started {found['started']}:"]
    lines.append(f"  nodes by {found['found by']}")
    for node, members in enumerate(nodes):
        lines += _node(ranks, nodes, node, members, found["shared memory"][node])
    lines += _links(found)
    for title in ("versions", "limits", "native", "settings"):
        lines += ["", f"{title.capitalize()} of rank 0:", *_rows(ranks[0][title])]
    if "check" in found:
        lines += ["", "Check:", *_rows(found["check"])]
    return "\n".join([*lines, "", f"{found['seconds']:.1f} s"])


def verdict(found: dict[str, Any]) -> str:
    """What is wrong, or that nothing is."""
    problems, notes = found["problems"], found.get("notes", ())
    lines = ["Problems:", *(f"  {problem}" for problem in problems)] if problems else ["No problems."]
    return "\n".join([*lines, *(["", "Notes:", *(f"  {note}" for note in notes)] if notes else [])])


def _node(
    ranks: Sequence[Any], nodes: Sequence[Sequence[int]], node: int, members: Sequence[int], memory: Any
) -> Iterator[str]:
    facts = ranks[members[0]]
    machine = facts["machine"]
    share = f" (limit {machine['core limit']:g})" if machine["core limit"] else ""
    cores = f"{machine['cores']} cores{share}"
    yield f"  {names_of(ranks, nodes)[node]}: {rank_list(members)}, {cores}, {machine['processor']}"
    if facts["mpi"] is not None:
        yield f"    {facts['mpi']['library']}, MPI_THREAD_{facts['mpi']['thread level']}"
    limit = machine["memory limit bytes"]
    yield (
        f"    memory {machine['memory available bytes'] >> 20:,} MiB available"
        f"{f', limit {limit >> 20:,}' if limit else ''}; /dev/shm {machine['/dev/shm free bytes'] >> 20:,} MiB free"
    )
    bound = {rank: ranks[rank]["core numbers"] for rank in members}
    if any(len(own) < machine["cores"] for own in bound.values()):
        yield f"    cores: {', '.join(f'rank {rank} on {_ranges(own)}' for rank, own in bound.items())}"
    shown = [
        f"{i['name']} {i['address']} mtu {i['mtu']}{'' if i['chosen'] else ', not used'}"
        for i in facts["interfaces"]
        if i["up"] and not i["loopback"]
    ]
    yield f"    interfaces: {'; '.join(shown) or 'none'}"
    if memory is not None:
        yield f"    shared memory: barrier {memory['barrier us']:.1f} us, neighbour's read at {memory['GB/s']:.1f} GB/s"


def _links(found: dict[str, Any]) -> Iterator[str]:
    ranks, nodes = found["ranks"], found["nodes"]
    if not found["links"]:
        return
    names = names_of(ranks, nodes)
    rows = [("from", "to", "by", "latency, us", "Gbit/s", "largest frame", "clock, ms")]
    for link in found["links"]:
        ends = (names[link["source"]], names[link["target"]])
        by = "unreachable" if link["interfaces"] is None else " to ".join(dict.fromkeys(link["interfaces"]))
        offset_s = link["clock_offset_s"]
        figures = (
            _figure(link["latency_us"], ".0f"),
            _figure(link["gbit_per_s"], ".2f"),
            _figure(link["frame_bytes"], "d"),
            _figure(None if offset_s is None else offset_s * 1e3, "+.1f"),
        )
        rows.append((*ends, by, *figures))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield from ("", "Links:")
    for row in rows:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _count(things: Sequence[object], what: str) -> str:
    return f"{len(things)} {what}{'s' * (len(things) != 1)}"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ranges(numbers: Sequence[int]) -> str:
    """'0-3,8' of sorted numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _rows(section: dict[str, Any]) -> list[str]:
    return [f"  {name:<24} {_shown(name, value)}" for name, value in section.items() if name != "problem"]


def _shown(name: str, value: object) -> str:
    if value is None:
        return "no limit"
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
