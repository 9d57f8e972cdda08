"""The wrong lines, and the tests that must notice each; run.py applies them."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """``line`` of ``path``, which is there once, becomes ``wrong``.

    Attributes:
        tests: files below tests/ and options of pytest, before them the number of ranks for those under mpirun.
    """

    path: str
    line: str
    wrong: str
    tests: str


_COORDINATOR = "hvdlite/coordinator/"
_COLLECTIVES = "hvdlite/collectives/"
_TORCH = "hvdlite/torch/"
_TENSOR_PARALLEL = "hvdlite/tensor_parallel/"
_KERNELS = "csrc/cuda/kernels.h"
_PLANS = "unit/test_plans.py unit/test_frozen_plan.py"
_THREADS = "sanitizers/test_threads.py::test_every_case[ranks_as_threads]"
_VALUES = "csrc/cuda/values.h"
_LOOPS = "unit/test_kernels.py::test_as_the_kernels_of_the_host"

MUTANTS = [
    # The coordinator: whom it wakes, what it holds back, what it compares.
    Mutant(f"{_COORDINATOR}worker.py", "if missed or unfinished:", "if unfinished:", "unit/test_worker.py"),
    Mutant(f"{_COORDINATOR}worker.py", "if missed or unfinished:", "if missed:", "unit/test_worker.py"),
    Mutant(f"{_COORDINATOR}worker.py", "                at_work.release()\n", "", "unit/test_worker.py"),
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
    # Plans that run free across nodes: what has begun is executed only if it was not dropped.
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "(not is_held and self._early.has_begun and self._early.has_come())",
        "(self._early.has_begun and self._early.has_come())",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "        if plan.told == plan.done < plan.ready:\n            plan.told = plan.done + 1\n",
        "        if plan.told < plan.ready:\n            plan.told = plan.ready\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
        "any(node.count > count or node.is_begun for node in nodes)",
        "any(node.is_begun for node in nodes)",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}coordinator.py",
        "                self._owner.early.drop(reaction.begun)\n",
        "",
        _PLANS,
    ),
    Mutant(
        f"{_COLLECTIVES}early.py",
        "return self._exchange is None and _native.load64(self._turns.address) >= self._turn",
        "return self._exchange is None",
        "4 mpi/test_prepared.py",
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
        "[*self.plan.take_bursts(count)] if self.plan.is_free else [self.plan.take(count)]",
        "[self.plan.take(count)]",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "        turns.offered -= 1\n        self.ready -= 1\n",
        "        self.ready -= 1\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_member.py",
        "if self._pending or self.done != self.ready:",
        "if self._pending:",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}leader.py",
        "        if self._plan.runs_free:\n",
        "        if False:\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}readiness.py",
        "if found.came_alone and all(",
        "if all(",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}coordinator.py",
        "self._queue or not self._in_flight.is_quiet or self.collector.is_open:",
        "self._queue or self.collector.is_open:",
        "3 mpi/test_prepared.py",
    ),
    # Plans that begin anew.
    Mutant(
        f"{_COORDINATOR}leader.py",
        "                self._negotiation.take_back()\n",
        "                pass\n",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}plan_leader.py",
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
        f"{_COORDINATOR}plan_member.py",
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
        "            self.collector.interrupt()\n            in_flight.admit",
        "            in_flight.admit",
        _PLANS,
    ),
    Mutant(
        f"{_COORDINATOR}burst.py",
        "        if self.is_open:  # the rest may come only after this\n            self._take_apart()\n",
        "",
        _PLANS,
    ),
    Mutant(
        "csrc/small_allreduce.cpp",
        "turn_ % kPlaces) * kMostBytes",
        "0) * kMostBytes",
        _THREADS,
    ),
    Mutant("csrc/small_allreduce.cpp", "turn_ += has_begun_ ? 1 : 2;", "turn_ += 2;", _THREADS),
    Mutant(
        "csrc/small_allreduce.cpp",
        "own.turn.store(turn_, std::memory_order_seq_cst);",
        "own.turn.store(turn_, std::memory_order_relaxed);",
        _THREADS,
    ),
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
        f"{_COORDINATOR}negotiation.py",
        "return tuple(ranks[i] for i in order), tuple(sizes[i] for i in order)",
        "return tuple(ranks[i] for i in order), sizes",
        "unit/test_negotiation.py",
    ),
    Mutant(
        f"{_COORDINATOR}messages.py",
        "            self._slots.move_to_end(request)\n",
        "",
        "unit/test_messages.py",
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
        "ahead, behind = (rank + distance) % size, (rank - distance) % size",
        "ahead, behind = (rank + distance) % size, (rank + distance) % size",
        "3 mpi/test_alltoall.py",
    ),
    Mutant(
        f"{_COLLECTIVES}shm_exchange.py",
        "end = begin + self._window",
        "end = begin + self._window // 2",
        "2 mpi/test_alltoall.py",
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
    Mutant("hvdlite/cli/ranks.py", "self._end_within(self._grace_s)", "pass", "unit/test_run.py"),
    # NCCL: what is enqueued when a call returns, who is called after the end, which copy is loaded.
    Mutant(
        "csrc/nccl_communicator.cpp",
        "return called ? settle(timeout_s) : WaitStatus::kAborted;",
        "return called ? WaitStatus::kOk : WaitStatus::kAborted;",
        "2 mpi/test_nccl_streams.py",
    ),
    Mutant("csrc/nccl_communicator.cpp", "    if (ended) return false;\n", "", "2 mpi/test_nccl_streams.py"),
    Mutant(
        "csrc/nccl_communicator.cpp",
        "is_finished ? library().destroy : library().abort",
        "library().destroy",
        "2 mpi/test_nccl_streams.py",
    ),
    Mutant(
        "csrc/nccl_communicator.cpp",
        "const std::uintptr_t own = address + rank_ * block_nbytes;",
        "const std::uintptr_t own = address + 0 * block_nbytes;",
        "2 mpi/test_nccl_streams.py",
    ),
    Mutant(
        "csrc/nccl_library.cpp",
        "const int deep = there == nullptr ? 0 : RTLD_DEEPBIND;",
        "const int deep = 0;",
        "unit/test_nccl_library.py",
    ),
    Mutant(
        f"{_COLLECTIVES}nccl.py",
        "if list(ranges) != [(start + rank * numel, start + (rank + 1) * numel)]:",
        "if len(ranges) != 1:",
        "2 mpi/test_nccl.py",
    ),
    Mutant(
        f"{_COLLECTIVES}nccl.py",
        "if dtype.is_half and op is ReduceOp.SUM and abs(postscale) < 1.0:",
        "if dtype.is_half and abs(postscale) < 1.0:",
        "1 mpi/test_nccl_streams.py",
    ),
    Mutant(
        f"{_COLLECTIVES}nccl.py",
        "        except HorovodInternalError:\n            raise\n",
        "",
        "2 mpi/test_nccl_streams.py",
    ),
    Mutant(
        f"{_COLLECTIVES}nccl.py",
        "if len({version // 100 for version in versions}) > 1:",
        "if len(set(versions)) > 1:",
        "2 mpi/test_nccl_streams.py",
    ),
    # Memory that NCCL works in: how long it is registered, who may call NCCL when, whether ranks do the same.
    Mutant(
        "csrc/device_memory.cpp",
        "      for (const auto& release : holding->releases) release();\n",
        "",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant(
        "csrc/nccl_communicator.cpp",
        "  for (Registered& memory : state_->registered) state_->deregister(memory);\n",
        "",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant(
        "csrc/nccl_communicator.cpp",
        "  if (status != WaitStatus::kOk) return status;\n  const std::lock_guard<std::mutex> turn(state_->turn);\n",
        "  const std::lock_guard<std::mutex> turn(state_->turn);\n",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant(
        "csrc/nccl_communicator.cpp",
        "      const std::lock_guard<std::mutex> lock(turn);\n      if (deregister",
        "      if (deregister",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant("csrc/nccl_communicator.cpp", "      if (!is_ready) return;\n", "", "2 mpi/test_nccl_registration.py"),
    Mutant(
        "csrc/nccl_communicator.cpp",
        "    given_back.wait(lock, [this] { return is_given_back; });\n",
        "",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant(
        f"{_COLLECTIVES}nccl.py",
        "        if not self.memory.settle(self._timeout_s):",
        "        if False:",
        "2 mpi/test_nccl_registration.py",
    ),
    # Memory that ranks share by handles: when it is freed, who is told, which kind all take.
    Mutant("csrc/handle_segment.cpp", "      wait_for_others();\n", "", "unit/test_shared_device_memory.py"),
    Mutant(
        "csrc/handle_segment.cpp",
        "      if (import.address != 0) driver().ipc_close(import.address);\n",
        "",
        "unit/test_shared_device_memory.py",
    ),
    Mutant(
        "csrc/handle_segment.cpp",
        "      static_cast<void>(write(import.pipe, &closed, 1) == 1);",
        "      static_cast<void>(closed);",
        "unit/test_shared_device_memory.py",
    ),
    Mutant(
        "csrc/handle_segment.cpp",
        "      if (count == 0 || (count < 0 && errno != EINTR)) return;\n",
        "      if (count < 0 && errno != EINTR) return;\n",
        "unit/test_shared_device_memory.py",
    ),
    Mutant(
        "hvdlite/device_engine.py",
        "return _agreed(everybody, lambda: _memory(node, ordinal, config, _native.FileSegment))",
        "return _agreed(everybody, lambda: _memory(node, ordinal, config, _native.HandleSegment))",
        "2 mpi/test_device_runtime.py",
    ),
    # Gradients: what is counted, who contributes, what is agreed on.
    Mutant(
        f"{_TORCH}arrival.py",
        "            and all(map(operator.is_, self._noted, self._inner_parameters))\n",
        "",
        "unit/test_optimizer_sequences.py unit/test_optimizer_buckets.py",
    ),
    Mutant(
        f"{_TORCH}arrival.py",
        "for slot in (self.order[0], self.order[-1]) if is_as_expected else self.order:",
        "for slot in self.order[:1] + self.order[-1:]:",
        "unit/test_optimizer_sequences.py",
    ),
    Mutant(
        f"{_TORCH}arrival.py",
        "return self._came_as_expected or slot.passes_left < self._passes",
        "return slot.passes_left < self._passes",
        "unit/test_optimizer_changes.py unit/test_optimizer_sequences.py",
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
    # GPUs: every wait, and what goes where.
    Mutant(
        "csrc/device_stream.cpp",
        "    check(driver().stream_wait_event(stream_, moment->event(), 0)",
        "    if (moment == nullptr) check(driver().stream_wait_event(stream_, moment->event(), 0)",
        "unit/test_cuda_driver.py",
    ),
    Mutant(
        "csrc/device_stream.cpp",
        '  check(driver().event_synchronize(event_), "cuEventSynchronize");\n',
        "",
        "unit/test_cuda_driver.py",
    ),
    Mutant(
        "csrc/device_stream.cpp",
        '  check(driver().event_record(event_, handle), "cuEventRecord");\n',
        "",
        "unit/test_cuda_driver.py",
    ),
    Mutant(
        "hvdlite/device_transfer.py",
        "        self._moments[view.device.ready] = None\n",
        "        self._moments = {view.device.ready: None}\n",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "hvdlite/device_transfer.py",
        "self._copies.begin(list(self._moments), self._uploads)",
        "self._copies.begin([], self._uploads)",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "hvdlite/device_transfer.py",
        "        self._used += nbytes\n",
        "",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "hvdlite/device_transfer.py",
        "            return self._place(allocate(index, shape), uploads=True)\n",
        "            return self._place(allocate(index, shape))\n",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "hvdlite/device_transfer.py",
        "downloads=True, uploads=in_place)",
        "downloads=True)",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "hvdlite/executor.py",
        "follow(list({view.device.ready: None for view in views if view.device is not None}))",
        "follow([])",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "hvdlite/executor.py",
        "            self._enqueued.append(_Enqueued(moment, submission, time.monotonic()))\n",
        "",
        "2 mpi/test_cuda_training.py -k kept",
    ),
    Mutant(
        "hvdlite/coordinator/submission.py",
        "        moment.precede(stream)\n",
        "",
        "2 mpi/test_cuda_training.py -k one_process",
    ),
    Mutant(
        "hvdlite/coordinator/submission.py",
        "        if stream == self._stream:",
        "        if stream:",
        "2 mpi/test_cuda_training.py -k kept",
    ),
    Mutant(
        "hvdlite/device_engine.py",
        "            if view.device is not None:\n",
        "            if view.device is not None and index < 0:\n",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "csrc/direct_allreduce.cpp",
        "  barrier.meet();\n  if (shard.begin < shard.end) {",
        "  if (shard.begin < shard.end) {",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "csrc/direct_allreduce.cpp",
        "  barrier.meet();\n}\n",
        "}\n",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "hvdlite/collectives/pinned.py",
        "            self._doze_until(arrived, name, label)\n",
        "",
        "2 mpi/test_cuda_nodes.py -k many",
    ),
    Mutant(
        "hvdlite/collectives/pinned.py",
        "            self.memory.stream.follow([emptied])\n",
        "",
        "2 mpi/test_cuda_nodes.py -k many",
    ),
    # The ring between GPUs: what MPI must not be given yet, and what must not be used yet.
    Mutant(
        "hvdlite/collectives/pipeline.py",
        "        if self._ready is None or self._ready.is_reached:\n",
        "        if True:\n",
        "unit/test_collective_executors.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/pipeline.py",
        "            self._endpoint.doze(lambda: ready.is_reached,",
        "            (lambda *_: None)(lambda: ready.is_reached,",
        "unit/test_collective_executors.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/pipeline.py",
        "                added.wait()\n",
        "                pass\n",
        "unit/test_collective_executors.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/pipeline.py",
        "            if after > self._added or not",
        "            if after > self._arrived or not",
        "unit/test_collective_executors.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/pipeline.py",
        "min(self._added + WINDOW,",
        "min(self._arrived + WINDOW,",
        "unit/test_collective_executors.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/pipeline.py",
        "is None or added.is_reached):",
        "is None or added):",
        "unit/test_collective_executors.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/pipeline.py",
        "        self._adder.end()\n",
        "",
        "2 mpi/test_device_ring.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/adder.py",
        "        self._stream.follow([self._memory.moment()])\n",
        "",
        "2 mpi/test_device_ring.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/adder.py",
        "        return self._enqueue(calls) if calls else None\n",
        "        self._enqueue(calls)\n",
        "2 mpi/test_device_ring.py -k late",
    ),
    Mutant(
        "hvdlite/collectives/adder.py",
        "        return self._context\n",
        "        return nullcontext()\n",
        "2 mpi/test_device_ring.py -k context",
    ),
    Mutant(
        "hvdlite/collectives/device_trial.py",
        "pinned.address, nbytes)\n                memory.moment().wait()\n",
        "pinned.address, nbytes)\n",
        "2 mpi/test_device_trial.py -k right",
    ),
    Mutant(
        "hvdlite/collectives/device_trial.py",
        "arrived.address, nbytes)\n                memory.moment().wait()\n",
        "arrived.address, nbytes)\n",
        "2 mpi/test_device_trial.py -k right",
    ),
    Mutant(
        "hvdlite/collectives/device_trial.py",
        "                if not np.array_equal(",
        "                if nbytes < 0 and not np.array_equal(",
        "2 mpi/test_device_trial.py -k compared",
    ),
    Mutant(
        "hvdlite/collectives/device_trial.py",
        "not all(everybody.allgather(",
        "not any(everybody.allgather(",
        "2 mpi/test_device_trial.py -k not_tried",
    ),
    Mutant(
        "hvdlite/collectives/device_trial.py",
        "        check()  # the failure of a rank is no word on MPI\n",
        "",
        "2 mpi/test_device_trial.py -k no_word",
    ),
    Mutant(
        "hvdlite/collectives/requests.py",
        "check=self._check, channel=channel)",
        "check=self._check)",
        "2 mpi/test_device_trial.py -k stay_behind",
    ),
    Mutant(
        "hvdlite/torch/device_homes.py",
        "        super().load()\n        here = Now().on_device(self.slots[0].param)",
        "        here = Now().on_device(self.slots[0].param)\n        super().load()",
        "2 mpi/test_cuda_training.py -k late",
    ),
    Mutant(
        "hvdlite/torch/gradients.py",
        "dtype=self.dtype, device=gradient.device)",
        "dtype=self.dtype)",
        "2 mpi/test_cuda_training.py -k layout",
    ),
    Mutant(
        "hvdlite/torch/functions.py",
        'self._gpu if is_on_device else "cpu"',
        '"cpu"',
        "2 mpi/test_cuda_training.py -k resumed",
    ),
    Mutant(
        "hvdlite/torch/device.py",
        "    gpus.choose(ordinal)\n",
        "",
        "2 mpi/test_cuda_training.py -k second_gpu",
    ),
    Mutant(
        "hvdlite/operations/allgather.py",
        "            return results[-1]\n",
        "            return results.pop()\n",
        "2 mpi/test_cuda_join.py",
    ),
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
    # On GPUs: each wait of a stream for another one, and each meeting.
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "            self._met.precede(stream)\n",
        "            pass\n",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "            if stream != self._stream:",
        "            if False:",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "        self.follow(self.first)\n        self._barrier.meet()\n",
        "        self._barrier.meet()\n",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "        self._barrier.meet()\n        self._met",
        "        self._met",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "        self.follow(self.first)\n        self._barrier.allreduce",
        "        self._barrier.allreduce",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "        self.meet()\n        self.ended",
        "        self.ended",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "_WINDOWS = 2",
        "_WINDOWS = 1",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "        self._barrier.release()\n",
        "        pass\n",
        "faults/test_cuda_tensor_parallel_deaths.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "        if time.monotonic() - since_s > limit_s:",
        "        if False:",
        "faults/test_cuda_tensor_parallel_deaths.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        windows.join()\n        windows.ended",
        "        windows.ended",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        for peer, moment in copied:\n            moment.precede(stream)\n",
        "        for peer, moment in copied:\n",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "            for _, moment in copied:\n                moment.precede(stream)\n            sources",
        "            sources",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        windows.second.follow([windows.moment(windows.first)])\n",
        "",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "            windows.follow(stream)\n",
        "",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        windows.join()\n        windows.meet()\n",
        "        windows.meet()\n",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "            done.precede(stream)\n",
        "",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        self._windows.ended(str(rows)).precede(stream)",
        "        self._windows.ended(str(rows))",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "            windows.meet()\n            offset",
        "            offset",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}chosen.py",
        "                self._begun.settle()\n",
        "                pass\n",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        "hvdlite/device_transfer.py",
        "                device.leave_behind()\n",
        "                pass\n",
        "unit/test_device_transfer.py",
    ),
    Mutant(
        "hvdlite/device_transfer.py",
        "                self._await(device.download(), label)\n",
        "                device.download()\n",
        "unit/test_device_transfer.py",
    ),
    # Multicast: what is there before it is written or read, and until when; what ranks agree on.
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        windows.await_readers()\n        windows.follow",
        "        windows.follow",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        windows.await_readers()\n        for peer",
        "        for peer",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "            self.second.follow([self.moment(self.first)])\n",
        "",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        windows.follow(windows.first)\n        windows.first.multicast_store",
        "        windows.first.multicast_store",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device.py",
        "        sources = [source]",
        "        sources: list[torch.Tensor] = []",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "        self.first.multicast_sum(0, place.multicast + start, stop - start, dtype)\n        self.meet()\n",
        "        self.first.multicast_sum(0, place.multicast + start, stop - start, dtype)\n",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}device_windows.py",
        "            self._barrier.meet()\n            self._last",
        "            self._last",
        "faults/test_cuda_tensor_parallel_ways.py",
    ),
    Mutant(
        f"{_TENSOR_PARALLEL}multicast_trial.py",
        'return "" if is_added_up and is_added_up_for_all else',
        'return "" if is_added_up_for_all else',
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        "hvdlite/memory/device.py",
        "            if len(set(gpus)) < len(gpus):",
        "            if False:",
        "3 mpi/test_cuda_tensor_parallel.py",
    ),
    Mutant(
        "hvdlite/memory/device.py",
        "                self._agreed(join)\n",
        "                join()\n",
        "3 mpi/test_cuda_tensor_parallel.py",
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
    # Kernels for GPUs: edges of tiles, groups and tables, what is rounded when, who does what.
    Mutant(
        _KERNELS,
        "const Count stop = smaller(tile + kTileNumel, p.end);",
        "const Count stop = smaller(tile + kTileNumel - 1, p.end);",
        _LOOPS,
    ),
    Mutant(_KERNELS, "      if (at < begin) body.gap(at, begin);\n", "", _LOOPS),
    Mutant(
        "csrc/cuda/multicast.h",
        "  const Count stride = Count(own.blocks) * own.threads;",
        "  const Count stride = own.threads;",
        "sanitizers/test_kernels_as_fibers.py::test_every_case[thread]",
    ),
    Mutant("csrc/cuda/multicast.h", "values[i] = copy == 0 ? value :", "values[i] = copy < 2 ? value :", _LOOPS),
    Mutant(_VALUES, "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "(bits + 0x8000) >> 16", _LOOPS),
    Mutant(
        _VALUES,
        "return float_of((bits_of(nearest) - (too_far ? 1 : 0)) | (inexact ? 1 : 0));",
        "return nearest;",
        _LOOPS,
    ),
    Mutant(_KERNELS, "if constexpr (kScaled) values[i] = scaled(values[i], p.prescale, 0.0);", "", _LOOPS),
    Mutant(_VALUES, "singles = numel - groups * kCount;", "singles = head;", _LOOPS),
    Mutant(
        _VALUES,
        "for (Count i = first; i < groups; i += stride)",
        "for (Count i = first; i <= groups; i += stride)",
        _LOOPS,
    ),
    Mutant(_KERNELS, "return a < b || a != a ? a : b;", "return a < b ? a : b;", _LOOPS),
    Mutant(
        _KERNELS,
        "divisor == 0.0 ? value * static_cast<float>(factor) : value / static_cast<float>(divisor)",
        "value * static_cast<float>(factor)",
        _LOOPS,
    ),
    Mutant(_KERNELS, "numel, alike ? head : numel,", "numel, head,", _LOOPS),
    Mutant(_KERNELS, "if (tensor.address != 0 && to != from) move", "if (to != from) move", _LOOPS),
    Mutant(  # the result is the same
        _KERNELS,
        "tile += own.blocks * kTileNumel",
        "tile += kTileNumel",
        "sanitizers/test_kernels_as_fibers.py::test_every_case[thread]",
    ),
    Mutant(
        "csrc/device_kernels.cpp",
        "p.end = is_any_left() ? p.tensors[p.count - 1].end : end;",
        "p.end = end;",
        _LOOPS,
    ),
    Mutant(
        "csrc/device_kernels.cpp",
        "p.buffer = buffer + (at - begin) * buffer_item_bytes;",
        "p.buffer = buffer + at * buffer_item_bytes;",
        _LOOPS,
    ),
]
