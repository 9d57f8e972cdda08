"""HVDLITE_CHECK_EVERY: whether ranks that train alike still have the same parameters and optimizer state.

All ranks do the same to the same numbers, so they stay the same, to the last bit. A bit that flips in the memory of one
rank stays there: gradients are averaged, parameters are not.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.errors import DivergenceError
from hvdlite.group import Group
from hvdlite.rank_list import rank_list
from hvdlite.torch.alike import checksums, find_differences
from hvdlite.torch.process_set import ProcessSet
from hvdlite.torch.tensor_view import has_memory

_COMPARED_ENTRIES = 24  # of the state of a parameter that differs, to name the one
_MASK = (1 << 64) - 1


class StateCheck:
    """Compares an optimizer between the ranks of ``process_set``, after every ``every`` steps.

    Args:
        group: that of ``process_set``.
    """

    def __init__(self, every: int, group: Group, process_set: ProcessSet) -> None:
        self._every = every
        self._group = group
        self._process_set = process_set
        self._steps = 0
        self._joins = group.world.joins
        self._alike_after = 0  # the last step after which all ranks were
        self._left = every  # steps before the next comparison

    @classmethod
    def wanted(cls, group: Group, process_set: ProcessSet) -> StateCheck | None:
        """What the settings ask for; None: nothing."""
        every = group.config.check_every
        return cls(every, group, process_set) if every else None

    def after_step(
        self, named: Sequence[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None, label: str
    ) -> None:
        """Compare, if it is time. Collective.

        Args:
            named: the parameters.
            optimizer: whose state and settings are compared as well.
            label: of the operations.

        Raises:
            DivergenceError: on every rank, if something differs; names it, and who.
        """
        self._steps += 1
        if self._joins != self._group.world.joins:  # some ranks have taken more steps than others
            self._joins = self._group.world.joins
            self._left = self._every
        self._left -= 1
        if self._left:
            return
        self._left = self._every
        records = [] if optimizer is None else _records(named, optimizer)
        own = torch.cat([checksums([parameter for _, parameter in named]), _digests([record for _, record in records])])
        found = find_differences(own, label, self._group, self._process_set)
        if found is None:
            self._alike_after = self._steps
            return
        first = found.places[0]
        what, values = f"parameter '{named[first][0]}'" if first < len(named) else "", found.values[0]
        if not what:
            name, record = records[first - len(named)]
            entry, values = self._differing_entry(record, values, label)
            what = f"{entry} {name}"
        more = f" (and something in {found.count - 1} more places)" if found.count > 1 else ""
        raise DivergenceError(
            f"after step {self._steps} {what} {_who(values)}{more}; {self._since()}. Bits have flipped in the memory "
            "of a machine, or the program changes parameters on some ranks only. Go on from a checkpoint of before, as "
            "hvd.elastic.run does from its last commit. HVDLITE_CHECK_EVERY has found this."
        )

    def _since(self) -> str:
        before = self._alike_after
        return f"after step {before} all ranks had the same" if before else "no step before that was looked at"

    def _differing_entry(
        self, record: Mapping[str, Any], values: dict[int, int], label: str
    ) -> tuple[str, dict[int, int]]:
        """(which of ``record`` differs, the values of it by rank). Collective."""
        keys = sorted(record)
        shown = keys[:_COMPARED_ENTRIES]
        own = torch.zeros(1 + _COMPARED_ENTRIES, dtype=torch.int64, device="cpu")
        own[0] = zlib.crc32("\n".join(keys).encode())
        own[1 : 1 + len(shown)] = _sums([record[key] for key in shown])
        found = find_differences(own, f"{label}.entries", self._group, self._process_set)
        if found is None:
            return "what the optimizer keeps", values  # beyond the entries that are compared
        if found.places[0] == 0:
            return "which entries there are", found.values[0]
        return f"'{shown[found.places[0] - 1]}'", found.values[0]


def _records(
    named: Sequence[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer
) -> list[tuple[str, dict[str, Any]]]:
    """What ``optimizer`` keeps for each parameter, and its settings of each group: tensors and numbers, by name."""
    states = [(f"of the optimizer for '{name}'", optimizer.state.get(parameter, {})) for name, parameter in named]
    groups = [(f"of parameter group {number}", group) for number, group in enumerate(optimizer.param_groups)]
    return [
        (name, {str(key): value for key, value in record.items() if _is_compared(value)})
        for name, record in [*states, *groups]
    ]


def _is_compared(value: object) -> bool:
    return has_memory(value) if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _digests(records: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """(records,): one number for all entries of each, and for which they are."""
    pairs = [(row, key, value) for row, record in enumerate(records) for key, value in record.items()]
    digests = torch.zeros(len(records), dtype=torch.int64, device="cpu")
    if pairs:
        hashes = {key: zlib.crc32(key.encode()) << 1 | 1 for _, key, _ in pairs}
        weights = torch.tensor([hashes[key] for _, key, _ in pairs], device="cpu")
        rows = torch.tensor([row for row, _, _ in pairs], device="cpu")
        digests.index_add_(0, rows, (_sums([value for _, _, value in pairs]) + 1) * weights)
    return digests


def _sums(values: Sequence[torch.Tensor | int | float]) -> torch.Tensor:
    """(values,): the checksums of tensors, the bits of numbers."""
    tensors = iter(checksums([value for value in values if isinstance(value, torch.Tensor)]).tolist())
    found = [next(tensors) if isinstance(value, torch.Tensor) else _bits(value) for value in values]
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def _bits(number: int | float) -> int:
    if isinstance(number, float):
        return int(struct.unpack("q", struct.pack("d", number))[0])
    return (number & _MASK) - ((number & _MASK) >> 63 << 64)


def _who(values: Mapping[int, int]) -> str:
    """Which ranks have another value than most; which have which, where there are no most."""
    counts = Counter(values.values()).most_common()
    if len(counts) == 1 or counts[0][1] == counts[1][1]:
        return f"differs between {rank_list(sorted(values))}"
    odd = [rank for rank, value in values.items() if value != counts[0][0]]
    return f"of {rank_list(sorted(odd))} differs from that of the other ranks"
