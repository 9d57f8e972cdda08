"""Wrong lines of what runs on the host, beside the coordinator."""

from __future__ import annotations

from mutant import Mutant

_COLLECTIVES = "hvdlite/collectives/"
_TENSOR_PARALLEL = "hvdlite/tensor_parallel/"
_EARLY = "unit/test_early.py"
_BOUND = "unit/test_collective_executors.py"
_MESSAGES = "unit/test_native_messages.py"
_RING = "2 mpi/test_backends.py -k on_its_way"
_THREADS = "sanitizers/test_threads.py::test_every_case[ranks_as_threads]"

MUTANTS = [
    Mutant(
        "csrc/node/ready_counts.cpp",
        "return (word & ~kCountMask) == tag_of(plan) ? word & kCountMask : 0;",
        "return word & kCountMask;",
        "unit/test_control_page.py",
    ),
    # Rings that an assistant has followed are not its owner's, and no others.
    Mutant(
        "csrc/waiting/signal.cpp",
        "followed.load(std::memory_order_seq_cst) == rings",
        "followed.load(std::memory_order_seq_cst) != 0",
        "unit/test_native_signal.py",
    ),
    Mutant(
        "csrc/waiting/signal.cpp",
        "        followed.store(now + kFarAway, std::memory_order_relaxed);\n",
        "",
        "unit/test_native_signal.py",
    ),
    Mutant(
        "hvdlite/early_operations.py",
        "self._end_meeting(request, is_dropped=True)",
        "self._end_meeting(request, is_dropped=False)",
        _EARLY,
    ),
    Mutant(
        "hvdlite/collectives/early_call.py",
        "ANY = Reduction(ReduceOp.MAX)",
        "ANY = Reduction(ReduceOp.MIN)",
        _EARLY,
    ),
    Mutant(
        "csrc/node/places_in_turn.cpp",
        "turn_ % kSets * size_",
        "0 * size_",
        _THREADS,
    ),
    Mutant("csrc/node/places_in_turn.cpp", "turn_ += has_begun_ ? 1 : 2;", "turn_ += 2;", _THREADS),
    Mutant(
        "csrc/node/places_in_turn.cpp",
        "own.turn.store(turn_, std::memory_order_seq_cst);",
        "own.turn.store(turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant(
        "csrc/node/ready_counts.cpp",
        "own.store(tag_of(plan) | count, std::memory_order_seq_cst);",
        "own.store(tag_of(plan) | count, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant("csrc/prepared/prepared_allreduce.cpp", "  if (is_small_) small_.begin(job());\n", "", _THREADS),
    Mutant(
        "csrc/node/ordered_exchange.cpp",
        "own.turn.store(turn_, std::memory_order_seq_cst);",
        "own.turn.store(turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant("csrc/node/ordered_exchange.cpp", "if (!all_have_counted()) {", "if (false) {", _THREADS),
    # Allreduces that are begun early, in Python and in native code: who may read and write a place, and when.
    Mutant(
        f"{_COLLECTIVES}early.py",
        "return self._exchange is None and self._turns.has_come()",
        "return self._exchange is None",
        _EARLY,
    ),
    Mutant(f"{_COLLECTIVES}early.py", "        if not all_have_begun():\n", "        if False:\n", _EARLY),
    Mutant(
        f"{_COLLECTIVES}early.py",
        "            self._exchange = None\n            self._spread()\n",
        "            self._exchange = None\n            self._turns.bring()\n",
        _EARLY,
    ),
    Mutant(
        f"{_COLLECTIVES}early.py",
        "return reduction.split() if self._is_split else (None, reduction)",
        "return None, reduction",
        _EARLY,
    ),
    Mutant("csrc/messages/early_allreduce.cpp", "  counts_.want_ring(false);\n", "", _EARLY),
    Mutant("csrc/messages/early_allreduce.cpp", "  if (leads()) spread();\n", "", _MESSAGES),
    Mutant("csrc/messages/early_allreduce.cpp", "  if (!node_is_ready()) return Result::kNotYet;\n", "", _MESSAGES),
    Mutant(
        "csrc/messages/early_allreduce.cpp",
        "if (!look_.until([&] { return advance() || has_news(); })) {",
        "if (!look_.until([&] { return advance(); })) {",
        _MESSAGES,
    ),
    # Who sleeps in such a call, and is woken.
    Mutant("csrc/messages/early_turns.cpp", " && all_have_begun()) counts_.stir(0);", ") return;", _EARLY),
    Mutant("csrc/messages/early_turns.cpp", "++rank) counts_.stir(rank);", "++rank) counts_.rank();", _EARLY),
    Mutant("csrc/waiting/signal.h", "happened() || is_interrupted ||", "happened() ||", _EARLY),
    Mutant("csrc/node/ready_counts.cpp", "if (wanted == kStir) doorbell(rank).stir();", "", _EARLY),
    Mutant(
        "csrc/messages/early_allreduce.cpp",
        "if (!turns_.all_have_begun()) return Progress::kNodeIsLate;",
        "",
        _MESSAGES,
    ),
    Mutant("csrc/messages/early_allreduce.h", " && !messages_->is_closed()", "", _EARLY),
    Mutant("csrc/calls/shortcut.cpp", "!entry->call->can_run() || ", "", "2 mpi/test_shortcut.py"),
    Mutant(
        f"{_COLLECTIVES}early_call.py",
        "return self._resumed if self._resumed[:2] == last[:2] else last",
        "return last",
        _EARLY,
    ),
    Mutant(
        f"{_COLLECTIVES}early_call.py",
        "            self._schedule.count_done(times)\n",
        "            pass\n",
        "2 mpi/test_shortcut.py",
    ),
    Mutant("csrc/messages/bound_messages.cpp", "  wait_ = 0;\n", "", _MESSAGES),
    Mutant("csrc/messages/bound_messages.cpp", "if (error_ != 0) return false;", "", _MESSAGES),
    Mutant("csrc/messages/bound_pipeline.cpp", "sent_ = left_ = posted_ = taken_ = 0;", "sent_ = 0;", _MESSAGES),
    Mutant(
        "csrc/messages/bound_pipeline.cpp", " || !have_left(receive.after)) return false;", ") return false;", _MESSAGES
    ),
    Mutant(
        "csrc/messages/bound_pipeline.cpp",
        "if (!receive.has_slot && !have_left(receive.after)) break;",
        "",
        _MESSAGES,
    ),
    Mutant(
        "csrc/messages/bound_pipeline.cpp",
        "if (sent_ + 1 > window_ && !have_left(sent_ + 1 - window_)) break;",
        "",
        _MESSAGES,
    ),
    Mutant("csrc/messages/bound_pipeline.cpp", " && have_left(sent_);", ";", _MESSAGES),
    Mutant("csrc/messages/bound_pipeline.cpp", "if (error_ != 0 || !is_here ||", "if (!is_here ||", _MESSAGES),
    Mutant("csrc/messages/bound_pipeline.cpp", "if (error_ != 0 || !has_left)", "if (!has_left)", _MESSAGES),
    Mutant("csrc/messages/working.h", " || messages.moved() != before;", ";", _MESSAGES),
    # What is on its way comes to its end first, and what is bound is given back.
    Mutant(f"{_COLLECTIVES}ring.py", "(config)\n        self._in_flight.wait()\n", "(config)\n", _RING),
    Mutant(f"{_COLLECTIVES}ring.py", ".wait()\n        self._bound.close()\n", ".wait()\n", _RING),
    Mutant(f"{_COLLECTIVES}ring.py", ".is_immediate\n        self._in_flight.wait()\n", ".is_immediate\n", _RING),
    Mutant(f"{_COLLECTIVES}ring.py", "self._in_flight.wait()\n        self._adder", "self._adder", _RING),
    Mutant(f"{_COLLECTIVES}ring.py", "backend\n        self._bound.close()\n", "backend\n", _RING),
    Mutant("hvdlite/collectives/bound_requests.py", " or native.moved != moved", "", _BOUND),
    Mutant(
        "hvdlite/collectives/bound_requests.py", "if progress == _native.BoundMessages.FAILED:", "if False:", _BOUND
    ),
    Mutant("hvdlite/collectives/early.py", " or clock() >= until_s)", ")", _EARLY),
    Mutant("hvdlite/early_operations.py", "lambda: counts.has_news(heard)", "lambda: False", _EARLY),
    Mutant("hvdlite/collectives/early_call.py", "lambda: direct.has_news", "lambda: False", _EARLY),
    Mutant("hvdlite/collectives/early_call.py", "partial(counts.has_news, heard)", "lambda: False", _EARLY),
    Mutant("hvdlite/collectives/bound.py", "                self._once.clear()\n", "                pass\n", _BOUND),
    Mutant("hvdlite/collectives/bound.py", "if bound >= _MOST or self", "if self", _BOUND),
    Mutant("hvdlite/collectives/bound.py", "clear()\n        self._messages = 0\n", "clear()\n", _BOUND),
    Mutant("hvdlite/collectives/bound.py", "            pipeline.close()\n", "            pass\n", _BOUND),
    Mutant("hvdlite/collectives/bound_pipeline.py", "if not self._is_under_way:", "if True:", _BOUND),
    Mutant(
        "hvdlite/collectives/bound_pipeline.py",
        "        self._requests.count_done(1)\n        self._is_under_way = False\n",
        "        self._requests.count_done(1)\n",
        _BOUND,
    ),
    Mutant("csrc/waiting/polite_look.h", "while (now < end && now >= from_) {", "while (now < end) {", _MESSAGES),
    Mutant(
        "csrc/messages/early_turns.cpp",
        "word(counts_.rank()).store(++turn_, std::memory_order_seq_cst);",
        "word(counts_.rank()).store(++turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant(
        "csrc/messages/early_turns.cpp",
        "word(counts_.size()).store(turn_, std::memory_order_seq_cst);",
        "word(counts_.size()).store(turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant(
        "csrc/messages/early_turns.cpp",
        "if (word(rank).load(std::memory_order_seq_cst) < turn_) return false;",
        "if (word(rank).load(std::memory_order_relaxed) < turn_) return false;",
        _THREADS,
    ),
    # Collectives: bytes that come from the wrong place, too early, or scaled twice.
    Mutant(f"{_COLLECTIVES}shm.py", "if not (alone and stays_open):", "if not stays_open:", "3 mpi/test_backends.py"),
    Mutant(
        f"{_COLLECTIVES}thresholds.py",
        "halvings if nodes & (nodes - 1) == 0 else halvings + 1",
        "halvings",
        "unit/test_algorithms.py",
    ),
    Mutant(
        f"{_COLLECTIVES}algorithms.py",
        "own_first=rank < partner,",
        "own_first=True,",
        "unit/test_schedules.py unit/test_collective_executors.py",
    ),
    Mutant(
        f"{_COLLECTIVES}algorithms.py",
        "postscale=postscale if step == size - 2 else 1.0,",
        "postscale=postscale if step == 0 else 1.0,",
        "unit/test_schedules.py unit/test_collective_executors.py",
    ),
    Mutant(
        f"{_COLLECTIVES}algorithms.py",
        "if now == size and size % 2 == 1:",
        "if now == size and size % 4 == 1:",
        "unit/test_schedules.py unit/test_collective_executors.py",
    ),
    Mutant(
        f"{_COLLECTIVES}pairwise.py",
        "ahead, behind = (rank + distance) % size, (rank - distance) % size\n                    incoming",
        "ahead, behind = (rank + distance) % size, (rank + distance) % size\n                    incoming",
        "3 mpi/test_alltoall.py",
    ),
    Mutant(
        f"{_COLLECTIVES}shm_exchange.py",
        "zip(accumulate(received, initial=target), received, strict=False)",
        "zip(accumulate(sent, initial=target), received, strict=False)",
        "3 mpi/test_alltoall.py",
    ),
    Mutant(
        f"{_COLLECTIVES}pairwise.py",
        "count = min(distance, size - distance)",
        "count = 1",
        "4 mpi/test_tensors_elsewhere.py",
    ),
    Mutant(
        "csrc/node/ordered_exchange.cpp",
        "if (inputs[rank_] != 0) sources[rank_]",
        "if (false) sources[rank_]",
        "2 mpi/test_reducescatter.py",
    ),
    Mutant(
        "csrc/node/ordered_exchange.cpp",
        "if (rank_ == owner) return true;\n    const std::uint64_t begin = k * window_bytes_,",
        "if (rank_ == owner) return true;\n    const std::uint64_t begin = 0,",
        "2 mpi/test_tensors_elsewhere.py",
    ),
    # Ranks that meet without MPI.
    Mutant(
        "hvdlite/start/meeting_point.py",
        "lambda: self._gone(gathering) or not gathering.missing, most_s",
        "lambda: not gathering.missing, most_s",
        "unit/test_rendezvous.py",
    ),
    Mutant(
        "hvdlite/start/meeting_point.py",
        "if rank in gathering.left or gathering.is_over:",
        "if rank in gathering.left:",
        "unit/test_rendezvous.py",
    ),
    Mutant("hvdlite/start/rendezvous.py", "self._subsets[members] += 1", "pass", "unit/test_rendezvous.py"),
    Mutant(
        "hvdlite/cli/ranks.py",
        "end_with_parent(signal.SIGKILL)",
        "end_with_parent(signal.SIGTERM)",
        "faults/test_run_front.py",
    ),
    Mutant("hvdlite/cli/ranks.py", "self._ending.within(self._grace_s)", "pass", "unit/test_run.py"),
    # Tensor parallelism: windows in turns, whose rows, whose gradients.
    Mutant(
        f"{_TENSOR_PARALLEL}window.py",
        "        self._filled_so_far += 1\n",
        "",
        "3 mpi/test_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}window.py",
        "        begin = self.rank * height * columns\n",
        "        begin = 0\n",
        "2 mpi/test_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}window.py",
        "        return view.own.clone()",
        "        return view.own",
        "4 mpi/test_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}meeting.py",
        "if cards.count(card) != self.size:",
        "if card not in cards:",
        "unit/test_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}matmul.py",
        "return bias if carrier.rank == 0 else None",
        "return bias",
        "2 mpi/test_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}clipping.py",
        "(own if id(parameter) in split else common).add_(square)",
        "own.add_(square)",
        "2 mpi/test_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}vocabulary.py",
        "highest.masked_fill(highest.isinf(), 0)",
        "highest",
        "2 mpi/test_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}grid.py",
        "for node in hvdlite.runtime().topology.nodes for rank in node]",
        "for rank in range(size)]",
        "4 mpi/test_tensor_parallel_nodes.py",
    ),
    # Native code: who is woken, what is rounded, where an edge is.
    Mutant(
        "csrc/waiting/signal.cpp",
        "    stir();\n  } else if",
        "    futex_wake_all(count);\n  } else if",
        "unit/test_native_signal.py",
    ),
    Mutant(
        "csrc/waiting/signal.cpp",
        "  reducer.reduce(copies, copies, shard.begin, shard.end);\n  return wait(timeout_s);\n",
        "  reducer.reduce(copies, copies, shard.begin, shard.end);\n  return WaitStatus::kOk;\n",
        "unit/test_native_signal.py",
    ),
    Mutant(
        "csrc/node/staged_allreduce.cpp",
        "if (k <= windows) {",
        "if (k < windows) {",
        "unit/test_native_staged_allreduce.py",
    ),
    Mutant(
        "csrc/kernels/pack.cpp",
        "  if (at < end) mover.zero(place(), end - at);\n",
        "",
        "unit/test_native_pack.py",
    ),
    Mutant(
        "csrc/kernels/reduce.cpp",
        "constexpr double kAbove = 1 << 24;",
        "constexpr double kAbove = 1 << 4;",
        "unit/test_native_reduce.py",
    ),
    Mutant(
        "csrc/waiting/socket_bell.cpp",
        "EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET",
        "EPOLLIN | EPOLLRDHUP | EPOLLET",
        "unit/test_native_socket_bell.py",
    ),
    Mutant(
        "csrc/calls/shortcut.h",
        "return taken_ == nullptr || taken_->is_settled() ? nullptr : taken_;",
        "return nullptr;",
        "2 mpi/test_started_names.py",
    ),
]
