"""Mutants of calls that repeat: what they are recognized by, and what native code leaves to Python."""

from __future__ import annotations

from mutant import Mutant

_SHORTCUT = "2 mpi/test_shortcut.py"

MUTANTS = [
    Mutant("csrc/signature.cpp", " || arguments.op != op_.ptr()) return false;", ") return false;", _SHORTCUT),
    Mutant(
        "csrc/signature.cpp",
        "if (!same_text(arguments.name, name_.ptr()) || !same_number",
        "if (!same_number",
        _SHORTCUT,
    ),
    Mutant(
        "csrc/signature.cpp",
        "    if (!equal(attribute(tensor, names().shape).ptr(), shape_.ptr())) return false;\n",
        "",
        _SHORTCUT,
    ),
    Mutant(
        "csrc/signature.cpp",
        "    if (call(tensor, names().is_contiguous).ptr() != Py_True) return false;\n",
        "",
        _SHORTCUT,
    ),
    Mutant(
        "csrc/signature.cpp",
        "  if (!same_number(arguments.postscale, postscale_.ptr())) return false;\n",
        "",
        _SHORTCUT,
    ),
    Mutant("csrc/signature.cpp", " && (home_.is_none() || !home_().is_none());", ";", _SHORTCUT),
    Mutant("csrc/shortcut.cpp", '    if (is_true(result, "requires_grad")) return {};\n', "", _SHORTCUT),
    Mutant("csrc/shortcut.cpp", '  if (is_true(recorder_, "enabled")) return {};\n', "", _SHORTCUT),
    Mutant("csrc/shortcut.cpp", "  if (entry->unnamed != nullptr) ++entry->unnamed->next;\n", "", _SHORTCUT),
    Mutant("csrc/shortcut.cpp", "if (PyErr_CheckSignals() != 0) interrupt.emplace();", "", "2 mpi/test_prepared.py"),
    Mutant(
        "csrc/collecting.cpp",
        "  if (signatures_ == nullptr || parts_.size() + 1 >=",
        "  if (signatures_ == nullptr || parts_.size() >=",
        _SHORTCUT,
    ),
    Mutant(
        "hvdlite/coordinator/coordinator.py",
        "            self.at_once.shortcut.close()\n            self.collector.interrupt()\n",
        "            self.collector.interrupt()\n",
        _SHORTCUT,
    ),
    Mutant("hvdlite/coordinator/at_once.py", "            plan.count_done(prepared.request, times)\n", "", _SHORTCUT),
    Mutant("hvdlite/coordinator/at_once.py", "            prepared.count_done(times)\n", "", _SHORTCUT),
]
