"""Mutants of calls that repeat: what they are recognized by, and what native code leaves to Python."""

from __future__ import annotations

from mutant import Mutant

_SHORTCUT = "2 mpi/test_shortcut.py"
_STARTED = "2 mpi/test_started.py"
_NAMES = "2 mpi/test_started_names.py"
_OPEN = "2 mpi/test_open_bursts.py"
_SMALL_BURSTS = "unit/test_small_bursts.py"
_CHANGES = "unit/test_plan_changes.py"
_BROADCASTS = "2 mpi/test_small_broadcasts.py"
_PACKETS = "2 mpi/test_packets.py"
_ROWS = "2 mpi/test_repeated_rows.py"
_EARLY = "unit/test_early.py"

MUTANTS = [
    Mutant("csrc/calls/signature.cpp", " || arguments.op != op_.ptr()) return false;", ") return false;", _SHORTCUT),
    Mutant(
        "csrc/calls/signature.cpp",
        "if (!same_text(arguments.name, name_.ptr()) || !same_number",
        "if (!same_number",
        _SHORTCUT,
    ),
    Mutant(
        "csrc/calls/signature.cpp",
        "         equal(attribute(tensor, names().shape).ptr(), shape_.ptr()) &&\n",
        "",
        _SHORTCUT,
    ),
    Mutant(
        "csrc/calls/signature.cpp",
        " &&\n         call(tensor, names().is_contiguous).ptr() == Py_True;",
        ";",
        _SHORTCUT,
    ),
    Mutant("csrc/calls/signature.cpp", "tensor.has_shape(sizes_) && ", "", _SHORTCUT),
    Mutant("csrc/calls/signature.cpp", " && tensor.is_contiguous();", ";", _SHORTCUT),
    Mutant("csrc/calls/signature.cpp", "tensor.dtype == exchanged_type_ && ", "", _SHORTCUT),
    Mutant(
        "csrc/calls/signature.cpp",
        "  if (!same_number(arguments.postscale, postscale_.ptr())) return false;\n",
        "",
        _SHORTCUT,
    ),
    Mutant("csrc/calls/signature.cpp", "address == place_ && ", "", _SHORTCUT),
    Mutant(
        "csrc/calls/shortcut.cpp", "    if (is_true(next.result, names().requires_grad)) return false;\n", "", _SHORTCUT
    ),
    Mutant("csrc/calls/shortcut.cpp", "  if (is_recording()) return false;\n\n", "", _SHORTCUT),
    Mutant("csrc/calls/shortcut.cpp", "  if (entry->unnamed != nullptr) ++entry->unnamed->next;\n", "", _SHORTCUT),
    Mutant(
        "csrc/calls/shortcut.cpp", "if (PyErr_CheckSignals() != 0) interrupt.emplace();", "", "2 mpi/test_prepared.py"
    ),
    Mutant(
        "csrc/calls/collecting.cpp",
        "if (signatures_ != signatures || !is_full()) return handle;",
        "if (expected() != nullptr) return handle;",
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
    Mutant(
        "hvdlite/coordinator/at_once.py",
        "            self.reopen(closings)\n        return left\n",
        "            pass\n        return left\n",
        _SHORTCUT,
    ),
    # Changes of plans without the log: what is wanted, whether all want it, and what begins then.
    Mutant("csrc/node/ready_counts.cpp", "  if (all_want(wish)) tell_who_wants();\n", "", _CHANGES),
    Mutant(
        "csrc/node/ready_counts.cpp",
        "    if (other >> kNextBits == wish >> kNextBits && other != wish) return true;",
        "",
        _CHANGES,
    ),
    Mutant(
        "csrc/node/ready_counts.cpp",
        "  while (found < 2 * plan) {\n",
        "  while (true) {\n",
        "sanitizers/test_threads.py",
    ),
    Mutant(
        "csrc/calls/shortcut.cpp",
        "  if (starts && split_phase == nullptr) return false;\n",
        "",
        _STARTED,
    ),
    Mutant("csrc/calls/shortcut.cpp", "if (starts) owner = owner_of(arguments.tensor, next.result);", "", _STARTED),
    Mutant("hvdlite/coordinator/at_once.py", "            self._in_flight.resume(submission)\n", "", _STARTED),
    Mutant("hvdlite/coordinator/at_once.py", "                started.fail(error)\n", "", "1 mpi/test_started.py"),
    Mutant("hvdlite/coordinator/coordinator.py", "        self.settle_started()\n", "", _NAMES),
    Mutant(
        "hvdlite/coordinator/small_bursts.py",
        "        if outcome is not _NOT_YET:\n            self._take(plan, burst, prepared)\n        self._worker",
        "        self._worker",
        _SMALL_BURSTS,
    ),
    Mutant("csrc/calls/collecting.cpp", "now_s + longest_s_ < next_look_->at_s || ", "", _OPEN),
    Mutant("csrc/calls/collecting.cpp", "    parts_ = py::list();  // whose memory is the burst's\n", "", _OPEN),
    Mutant(
        "csrc/calls/shortcut.cpp",
        "  if (entry.burst == nullptr) return has_the_name(entry.signature);\n",
        "  return has_the_name(entry.signature);\n",
        _NAMES,
    ),
    Mutant("csrc/calls/shortcut.cpp", "  done_ += entry.size();\n", "  done_ += 1;\n", _STARTED),
    Mutant("csrc/calls/started_burst.cpp", "  if (take_apart) take_apart();\n", "", _OPEN),
    Mutant("hvdlite/coordinator/at_once.py", "        self._in_flight.resume(burst)\n", "", _STARTED),
    Mutant("csrc/calls/shortcut.cpp", "return entries_.at(position).prepared.is(prepared);", "return true;", _SHORTCUT),
    Mutant("hvdlite/coordinator/plan_member.py", " if earlier.has_lasted else None", "", _CHANGES),
    Mutant(
        "hvdlite/coordinator/plan_member.py",
        "            if earlier is None or earlier.order is now:\n",
        "            if earlier is None:\n",
        _CHANGES,
    ),
    Mutant("hvdlite/coordinator/plan_member.py", "wish.first == 0 and not earlier.plan.counts and", "", _CHANGES),
    Mutant("hvdlite/coordinator/frozen_plan.py", "            turns.offered = 0\n", "            pass\n", _CHANGES),
    Mutant("hvdlite/coordinator/order_watch.py", "(known.began_at + first) % len(order)", "first", _CHANGES),
    Mutant(
        "hvdlite/coordinator/coordinator.py",
        "            self._station.changed(wish, done, len(self._plan.plan))\n",
        "",
        _SHORTCUT,
    ),
    # Few bytes are an allreduce.
    Mutant("csrc/calls/shortcut.cpp", "entry->gives ? input : 0", "input", _BROADCASTS),
    Mutant("hvdlite/operations/broadcast.py", "return rank == self.root_rank", "return True", _BROADCASTS),
    Mutant(
        "hvdlite/operations/prepared.py",
        "inputs = [source if self.gives else 0]",
        "inputs = [source]",
        _BROADCASTS,
    ),
    Mutant(
        "hvdlite/operations/telling.py",
        "packets if most <= packets.room else None",
        "packets if self.nbytes(numbers[engine.rank]) <= packets.room else None",
        _PACKETS,
    ),
    Mutant(
        "hvdlite/memory/packets.py", "address + self._start + start", "address + self._start", "unit/test_packets.py"
    ),
    Mutant("hvdlite/memory/packets.py", "                    at += nbytes\n", "", "unit/test_packets.py"),
    Mutant(
        "hvdlite/operations/reducescatter.py",
        "[view.address if r == engine.rank else 0",
        "[view.address if r == 0 else 0",
        _PACKETS,
    ),
    # Rows within a node.
    Mutant("csrc/calls/signature.cpp", "  if (arguments.kind != kind_.ptr()) return false;\n", "", _ROWS),
    Mutant("csrc/prepared/prepared_gather.cpp", "    expected_.become(told);\n", "", _ROWS),
    Mutant("csrc/prepared/expected_rows.h", "bytes(rank) + bytes_of(of(rank), shape_.column)", "bytes(rank)", _ROWS),
    Mutant(
        "csrc/prepared/prepared_gather.cpp",
        "shape.numbers[shape.is_alltoall ? rank : 0]",
        "shape.numbers[0] + 0 * rank",
        _ROWS,
    ),
    # The same across nodes.
    Mutant("csrc/messages/early_gather.cpp", "!is_expected || expected_", "expected_", _ROWS),
    Mutant("csrc/messages/early_gather.cpp", "  room_.note(expected_.most_bytes());\n", "", _ROWS),
    Mutant("csrc/messages/early_gather.h", "return room_.now() == room_then_;", "return true;", _ROWS),
    Mutant("csrc/messages/early_reduce_scatter.cpp", "end += numel * item_bytes(shape.dtype);", "", _ROWS),
    Mutant("hvdlite/operations/telling.py", "return packets.are_all_at(address)", "return True", _EARLY),
    Mutant("hvdlite/operations/telling.py", "        packets.write_dropped()\n", "", _EARLY),
    Mutant("hvdlite/coordinator/at_once.py", "if not prepared.is_valid:", "if False:", _ROWS),
    Mutant("csrc/prepared/prepared_reduce_scatter.cpp", "    at += numel * item_bytes(shape_.dtype);\n", "", _ROWS),
    Mutant("csrc/node/small_allreduce.cpp", "reducer.reduce({tensor - begin_bytes}", "reducer.reduce({tensor}", _ROWS),
    Mutant("csrc/prepared/prepared_broadcast.cpp", "source_ != 0 && source_ != target_", "false", _BROADCASTS),
    Mutant(
        "hvdlite/operations/telling.py",
        "gather if max(map(self.nbytes, numbers)) <= gather.room(len(own)) else None",
        "gather if self.nbytes(own) <= gather.room(len(own)) else None",
        _ROWS,
    ),
    Mutant("hvdlite/torch/repeated_rows.py", "result.set_(new_result(result, shape))", "result.resize_(shape)", _ROWS),
    Mutant("hvdlite/operations/prepared_telling.py", "if len(result) != rows:", "if False:", _ROWS),
    Mutant("csrc/calls/shortcut.cpp", " || (new_like && entry->call->result_rows() != rows)", "", _ROWS),
    Mutant(
        "hvdlite/torch/repeated_rows.py",
        "with torch.inference_mode(result.is_inference()):",
        "with torch.inference_mode(False):",
        _ROWS,
    ),
    Mutant(
        "hvdlite/coordinator/at_once.py",
        "                self._check()\n",
        "                pass\n",
        "2 mpi/test_awaited.py",
    ),
    Mutant(
        "hvdlite/early_operations.py",
        "        if _is_begun(self._engine, submission.request):\n            self._begun",
        "        if False:\n            self._begun",
        "2 mpi/test_prepared.py -k profiled",
    ),
    Mutant("hvdlite/world.py", "        self.coordinator.forget_prepared()\n", "", "2 mpi/test_prepared.py -k little"),
]
