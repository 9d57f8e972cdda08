"""Wrong lines of what runs on the host."""

from __future__ import annotations

from mutant import Mutant

_COORDINATOR = "hvdlite/coordinator/"
_COLLECTIVES = "hvdlite/collectives/"
_TENSOR_PARALLEL = "hvdlite/tensor_parallel/"
_PLANS = "unit/test_plans.py unit/test_frozen_plan.py"
_ENDS = "unit/test_ends.py"
_EARLY = "unit/test_early.py"
_MESSAGES = "unit/test_native_messages.py"
_THREADS = "sanitizers/test_threads.py::test_every_case[ranks_as_threads]"

MUTANTS = [
    # The coordinator: whom it wakes, what it holds back, what it compares.
    Mutant(f"{_COORDINATOR}worker.py", "if missed or unfinished:", "if unfinished:", "unit/test_worker.py"),
    Mutant(f"{_COORDINATOR}worker.py", "if missed or unfinished:", "if missed:", "unit/test_worker.py"),
    Mutant(
        f"{_COORDINATOR}worker.py",
        "_unfinished\n        self.at_work.release()\n",
        "_unfinished\n",
        "unit/test_worker.py",
    ),
    Mutant(f"{_COORDINATOR}coordinator.py", "        self._has_rung = False\n", "", "2 mpi/test_runtime.py"),
    Mutant(
        f"{_COORDINATOR}in_flight.py",
        "for key in list(self._futures) if key not in self._executing]",
        "for key in list(self._futures)]",
        "unit/test_coordinator.py",
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "while len(self._spread) > unsent:",
        "while self._spread:",
        "unit/test_coordinator.py",
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "while self._own_words and self._own_words[0][0] <= self._published:",
        "while self._own_words:",
        "unit/test_coordinator.py",
    ),
    Mutant(
        "csrc/ready_counts.cpp",
        "return (word & ~kCountMask) == tag_of(plan) ? word & kCountMask : 0;",
        "return word & kCountMask;",
        "unit/test_control_page.py",
    ),
    # Rings that an assistant has followed are not its owner's, and no others.
    Mutant(
        "csrc/signal.cpp",
        "followed.load(std::memory_order_seq_cst) == rings",
        "followed.load(std::memory_order_seq_cst) != 0",
        "unit/test_native_signal.py",
    ),
    Mutant(
        "csrc/signal.cpp",
        "        followed.store(now + kFarAway, std::memory_order_relaxed);\n",
        "",
        "unit/test_native_signal.py",
    ),
    # How often a period comes without a wait.
    Mutant(f"{_COORDINATOR}plan_member.py", "waits.endswith(_PERIODS * last)", "waits.endswith(2 * last)", _PLANS),
    Mutant(f"{_COORDINATOR}order_watch.py", "if self._period < period <=", "if 0 < 0 <=", _PLANS),
    # Plans that run free across nodes: what has begun is executed only if it was not dropped.
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "(has_come and (not is_held or self._early.is_met(plan.next.request)))",
        "has_come",
        _PLANS,
    ),
    # Meetings: who is held goes in with those that have; and hears if somebody drops one.
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "(has_come and (not is_held or self._early.is_met(plan.next.request)))",
        "(has_come and not is_held)",
        _PLANS,
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
        f"{_COORDINATOR}coordinator.py",
        "        self._readiness.enter(batch)\n",
        "",
        "2 mpi/test_awaited.py",
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
        "any(node.count > count or node.is_begun for node in nodes)",
        "any(node.is_begun for node in nodes)",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
        "not (self._holding or self.runs_free)",
        "not self.runs_free",
        _ENDS,
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "if message.has_a_place:",
        "if False:",
        _ENDS,
    ),
    Mutant(
        f"{_COORDINATOR}coordinator.py",
        "                self._owner.early.drop(reaction.begun)\n",
        "",
        _PLANS,
    ),
    # Plans that run free: when an operation is due, what ends them, and what becomes of what has begun.
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "return plan if plan is not None and plan.is_free and self._held is None else None",
        "return plan if plan is not None and plan.is_free else None",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "[*plan.take_bursts(count)] if plan.is_free else [plan.take(count)]",
        "[plan.take(count)]",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}frozen_plan.py",
        "        turns.offered -= 1\n        self.ready -= 1\n",
        "        self.ready -= 1\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}frozen_plan.py",
        "if self._pending or self.done != self.ready:",
        "if self._pending:",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "self._plan.runs_free:\n            self._pass_on(self._plan.make_room())\n            verdicts = []\n",
        "False:\n            verdicts = []\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "if found.came_alone and prevail",
        "if prevail",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "2 * sum(map(self._early.takes, requests)) > len(requests)",
        "sum(map(self._early.takes, requests)) > 0",
        _PLANS,
    ),
    # Plans that begin anew.
    Mutant(
        f"{_COORDINATOR}leader.py",
        "                self._negotiation.take_back()\n",
        "                pass\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}order_watch.py",
        "(self._rotation - known.began_at) % len(order)",
        "self._rotation",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "        self._numbers.update(plan.next_numbers(count))\n",
        "",
        _PLANS,
    ),
    # Bursts: where they end, and what becomes of what does not come true.
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "        if plan.is_stuck:\n            return 0.0\n",
        "",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "if math.inf in pauses or min(pauses)",
        "if min(pauses)",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
        "(place - came_since) % period",
        "place",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}frozen_plan.py",
        "if self.ready != start or self.has_gap or",
        "if",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}collector.py",
        "                if expected[number] != request:\n                    return None\n",
        "",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}coordinator.py",
        "            self.collector.interrupt()\n            submission.assist",
        "            submission.assist",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}burst.py",
        "        if self.is_open:  # the rest may come only after this\n            self._take_apart()\n",
        "",
        _PLANS,
    ),
    Mutant(
        "csrc/places_in_turn.cpp",
        "turn_ % kSets * size_",
        "0 * size_",
        _THREADS,
    ),
    Mutant("csrc/places_in_turn.cpp", "turn_ += has_begun_ ? 1 : 2;", "turn_ += 2;", _THREADS),
    Mutant(
        "csrc/places_in_turn.cpp",
        "own.turn.store(turn_, std::memory_order_seq_cst);",
        "own.turn.store(turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant(
        "csrc/ready_counts.cpp",
        "own.store(tag_of(plan) | count, std::memory_order_seq_cst);",
        "own.store(tag_of(plan) | count, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant("csrc/prepared_allreduce.cpp", "  if (is_small_) small_.begin(job());\n", "", _THREADS),
    Mutant(
        "csrc/ordered_exchange.cpp",
        "own.turn.store(turn_, std::memory_order_seq_cst);",
        "own.turn.store(turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant("csrc/ordered_exchange.cpp", "if (!all_have_counted()) {", "if (false) {", _THREADS),
    Mutant(
        f"{_COORDINATOR}control_page.py",
        "self._capacity + min(map(_native.load64, self._tails))",
        "self._capacity + max(map(_native.load64, self._tails))",
        "unit/test_control_page.py",
    ),
    Mutant(
        f"{_COORDINATOR}negotiation.py",
        "        gathering.missing -= len(ranks)\n",
        "        gathering.missing -= 1\n",
        "unit/test_negotiation.py",
    ),
    Mutant(
        f"{_COORDINATOR}messages.py",
        "            self._slots.move_to_end(request)\n",
        "",
        "unit/test_messages.py",
    ),
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
    Mutant("csrc/early_allreduce.cpp", "  counts_.want_ring(false);\n", "", _EARLY),
    Mutant("csrc/early_allreduce.cpp", "  if (leads) spread();\n", "", _MESSAGES),
    Mutant("csrc/early_allreduce.cpp", "  if (!node_is_ready()) return Result::kNotYet;\n", "", _MESSAGES),
    Mutant(
        "csrc/early_allreduce.cpp",
        "return progress_ == Progress::kDone || progress_ == Progress::kFailed || has_news();",
        "return progress_ == Progress::kDone || progress_ == Progress::kFailed;",
        _MESSAGES,
    ),
    Mutant(
        "csrc/early_allreduce.cpp",
        "if (!turns_.all_have_begun()) return Progress::kNodeIsLate;",
        "",
        _MESSAGES,
    ),
    Mutant("csrc/early_allreduce.h", " && !messages_->is_closed()", "", _EARLY),
    Mutant("csrc/shortcut.cpp", "!entry->call->can_run() || ", "", "2 mpi/test_shortcut.py"),
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
    Mutant("csrc/bound_messages.cpp", "  wait_ = 0;\n", "", _MESSAGES),
    Mutant("csrc/bound_messages.cpp", "if (error_ != 0) return false;", "", _MESSAGES),
    Mutant("csrc/polite_look.h", "while (now < end && now >= from_) {", "while (now < end) {", _MESSAGES),
    Mutant(
        "csrc/early_turns.h",
        "word(rank_).store(++turn_, std::memory_order_release);",
        "word(rank_).store(++turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant(
        "csrc/early_turns.h",
        "word(size_).store(turn_, std::memory_order_release);",
        "word(size_).store(turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
    Mutant(
        "csrc/early_turns.cpp",
        "if (word(rank).load(std::memory_order_acquire) < turn_) return false;",
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
        "csrc/ordered_exchange.cpp",
        "if (inputs[rank_] != 0) sources[rank_]",
        "if (false) sources[rank_]",
        "2 mpi/test_reducescatter.py",
    ),
    Mutant(
        "csrc/ordered_exchange.cpp",
        "if (rank_ == owner) return true;\n    const std::uint64_t begin = k * window_bytes_,",
        "if (rank_ == owner) return true;\n    const std::uint64_t begin = 0,",
        "2 mpi/test_tensors_elsewhere.py",
    ),
    # Ranks that meet without MPI.
    Mutant(
        "hvdlite/meeting_point.py",
        "lambda: self._gone(gathering) or not gathering.missing",
        "lambda: not gathering.missing",
        "unit/test_rendezvous.py",
    ),
    Mutant(
        "hvdlite/meeting_point.py",
        "if rank in gathering.left or gathering.is_over:",
        "if rank in gathering.left:",
        "unit/test_rendezvous.py",
    ),
    Mutant("hvdlite/rendezvous.py", "self._subsets[members] += 1", "pass", "unit/test_rendezvous.py"),
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
        "csrc/signal.cpp",
        "if (assistants_asleep.load(std::memory_order_seq_cst) != 0) futex_wake_all(count, kAssistant);",
        "futex_wake_all(count, kOwner);",
        "unit/test_native_signal.py",
    ),
    Mutant(
        "csrc/signal.cpp",
        "  reducer.reduce(copies, copies, shard.begin, shard.end);\n  return wait(timeout_s);\n",
        "  reducer.reduce(copies, copies, shard.begin, shard.end);\n  return WaitStatus::kOk;\n",
        "unit/test_native_signal.py",
    ),
    Mutant(
        "csrc/staged_allreduce.cpp",
        "if (k <= windows) {",
        "if (k < windows) {",
        "unit/test_native_staged_allreduce.py",
    ),
    Mutant(
        "csrc/pack.cpp",
        "  if (at < end) mover.zero(place(), end - at);\n",
        "",
        "unit/test_native_pack.py",
    ),
    Mutant(
        "csrc/reduce.cpp",
        "constexpr double kAbove = 1 << 24;",
        "constexpr double kAbove = 1 << 4;",
        "unit/test_native_reduce.py",
    ),
    Mutant(
        "csrc/socket_bell.cpp",
        "EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET",
        "EPOLLIN | EPOLLRDHUP | EPOLLET",
        "unit/test_native_socket_bell.py",
    ),
    Mutant(
        f"{_COORDINATOR}order_watch.py",
        "elif not periods or (count % period and periods < self._patience):",
        "else:",
        "unit/test_plans.py",
    ),
]
