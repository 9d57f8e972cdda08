"""Mutants of gradients on their way: which have come, how they are loaded and delivered, and who counts on them."""

from __future__ import annotations

from mutant import Mutant

_TORCH = "hvdlite/torch/"
_BUCKETS = "unit/test_optimizer_buckets.py"
_SEQUENCES = "unit/test_optimizer_sequences.py"
_SNAPSHOT = "unit/test_native_gradient_snapshot.py"

MUTANTS = [
    Mutant(f"{_TORCH}arrival.py", "        if passes > 1:\n            self.watch_closely()\n", "", _BUCKETS),
    Mutant(f"{_TORCH}arrival.py", " and order[0] is expected[0]", "", _BUCKETS),
    Mutant(
        f"{_TORCH}arrival.py",
        "self._orderly_steps + 1 if is_orderly else 0",
        "self._orderly_steps + is_orderly",
        _BUCKETS,
    ),
    Mutant(f"{_TORCH}arrival.py", "        self._orderly_steps = -1  # this one does not count\n", "", _BUCKETS),
    Mutant(f"{_TORCH}arrival.py", "        _watching.discard(self)\n", "", "unit/test_optimizer_arguments.py"),
    Mutant(f"{_TORCH}reducer.py", "        self.arrival.note_changes()\n", "", _BUCKETS),
    Mutant(f"{_TORCH}reducer.py", "                self.arrival.watch_closely()\n", "", _BUCKETS),
    Mutant(f"{_TORCH}reducer.py", "        if not self.arrival.watches_ends:  #", "        if True:  #", _BUCKETS),
    Mutant(f"{_TORCH}reducer.py", "            bucket.is_exposed = True\n", "", "2 mpi/test_small_gradients.py"),
    Mutant(f"{_TORCH}arrival.py", "self._came_as_expected and is_orderly else", "is_orderly else", _SEQUENCES),
    Mutant(
        f"{_TORCH}arrival.py",
        " or (slot in self._uncounted and slot.param.grad is not None)",
        "",
        _BUCKETS,
    ),
    Mutant(
        f"{_TORCH}block.py",
        "are_new = not before or before == self._versions",
        "are_new = True",
        "2 mpi/test_small_gradients.py",
    ),
    Mutant(f"{_TORCH}block.py", " and not self._taken.require_grad()", "", "2 mpi/test_small_gradients.py"),
    Mutant(
        f"{_TORCH}block.py",
        "if self._is_usual and (not is_exposed or self._taken.are_unchanged(self._parameters)):",
        "if self._is_usual:",
        "2 mpi/test_small_gradients.py",
    ),
    Mutant(
        f"{_TORCH}block.py",
        "            and all(map(_is_active, self._slots))\n",
        "",
        "unit/test_optimizer_changes.py",
    ),
    Mutant(
        "csrc/calls/gradient_snapshot.cpp",
        " || version_of(now) != versions_[i]) return false;",
        ") return false;",
        _SNAPSHOT,
    ),
    Mutant(
        "csrc/calls/gradient_snapshot.cpp",
        "    if (!addresses_.empty() && address_of(now) != addresses_[i]) return false;\n",
        "",
        _SNAPSHOT,
    ),
    Mutant("csrc/calls/gradient_snapshot.cpp", "if (!now.is(gradients_[i]) || ", "if (", _SNAPSHOT),
    Mutant(
        "csrc/calls/gradient_snapshot.cpp",
        "call(gradient, names().is_contiguous).ptr() == Py_True && number(",
        "number(",
        _SNAPSHOT,
    ),
    Mutant("csrc/calls/gradient_snapshot.cpp", " || !known->is_contiguous()) return {};", ") return {};", _SNAPSHOT),
    Mutant("csrc/calls/gradient_snapshot.cpp", "if (known->dtype != dtype_ || ", "if (", _SNAPSHOT),
    Mutant(
        "csrc/calls/exchanged_tensor.cpp",
        " || found.dtype == kAmbiguous[0] || found.dtype == kAmbiguous[1]) return {};",
        ") return {};",
        _SNAPSHOT,
    ),
    Mutant(
        "csrc/calls/exchanged_tensor.cpp",
        "    if (shape[i] == 1) continue;  // whose stride says nothing\n",
        "",
        _SNAPSHOT,
    ),
    Mutant(
        f"{_TORCH}reducer.py",
        "            and not any(map(_requires_grad, self._left_out))\n",
        "",
        "unit/test_optimizer_changes.py unit/test_optimizer_sequences.py",
    ),
    Mutant(
        f"{_TORCH}reducer.py",
        "elif not arrival.has_come(slot):  # switched off before backward, not after it",
        "else:",
        "unit/test_optimizer_changes.py unit/test_optimizer_sequences.py",
    ),
    Mutant(
        f"{_TORCH}reducer.py",
        "late = sorted(arrival.late, key=lambda slot: slot.index)",
        "late = list(arrival.late)",
        "2 mpi/test_optimizer.py mpi/test_optimizer_in_torch.py",
    ),
    Mutant(
        f"{_TORCH}reducer.py",
        "            bucket.missing = bucket.active\n",
        "            bucket.missing = len(bucket.slots)\n",
        "unit/test_optimizer_buckets.py",
    ),
    Mutant(
        f"{_TORCH}bucketing.py",
        "order = list(dict.fromkeys(reversed(arrived)))[::-1]",
        "order = list(dict.fromkeys(arrived))",
        "unit/test_bucketing.py",
    ),
    Mutant(
        f"{_TORCH}bucketing.py",
        "return nodes > 1 or have or stay",
        "return nodes > 1 or stay",
        "unit/test_bucketing.py",
    ),
]
