"""Wrong lines of what works with GPUs: their memory, their streams, the ring between them."""

from __future__ import annotations

from mutant import Mutant

_PREPARED = "2 mpi/test_cuda_prepared.py"

MUTANTS = [
    # Memory that ranks share by handles: when it is freed, who is told, which kind all take.
    Mutant("csrc/gpu/handle_segment.cpp", "      wait_for_others();\n", "", "unit/test_shared_device_memory.py"),
    Mutant(
        "csrc/gpu/handle_segment.cpp",
        "      if (import.address != 0) driver().ipc_close(import.address);\n",
        "",
        "unit/test_shared_device_memory.py",
    ),
    Mutant(
        "csrc/gpu/handle_segment.cpp",
        "      static_cast<void>(write(import.pipe, &closed, 1) == 1);",
        "      static_cast<void>(closed);",
        "unit/test_shared_device_memory.py",
    ),
    Mutant(
        "csrc/gpu/handle_segment.cpp",
        "      if (count == 0 || (count < 0 && errno != EINTR)) return;\n",
        "      if (count < 0 && errno != EINTR) return;\n",
        "unit/test_shared_device_memory.py",
    ),
    Mutant(
        "hvdlite/device_engine.py",
        "return _memory(everybody, node, ordinal, config, _native.FileSegment)",
        "return _memory(everybody, node, ordinal, config, _native.HandleSegment)",
        "2 mpi/test_device_runtime.py",
    ),
    # GPUs: every wait, and what goes where.
    Mutant(
        "csrc/gpu/device_stream.cpp",
        "    check(driver().stream_wait_event(stream_, moment->event(), 0)",
        "    if (moment == nullptr) check(driver().stream_wait_event(stream_, moment->event(), 0)",
        "unit/test_cuda_driver.py",
    ),
    Mutant(
        "csrc/gpu/cuda_driver.h",
        "  void exchange_mode() noexcept { driver().exchange_capture_mode(&capture_mode_); }\n",
        "  void exchange_mode() noexcept {}\n",
        "unit/test_cuda_driver.py",
    ),
    Mutant(
        "csrc/gpu/device_stream.cpp",
        '  check(driver().event_synchronize(event_), "cuEventSynchronize");\n',
        "",
        "unit/test_cuda_driver.py",
    ),
    Mutant(
        "csrc/gpu/device_stream.cpp",
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
        "        self.enqueued(moment, *(submission for _, submission in bucket))\n",
        "",
        "2 mpi/test_cuda_training.py -k kept",
    ),
    Mutant(
        "hvdlite/executor.py",
        "len(self._enqueued) > _MOST_ENQUEUED",
        "False",
        "unit/test_executor.py",
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
        "csrc/gpu/direct_allreduce.cpp",
        "  barrier.meet();\n  if (shard.begin < shard.end) {",
        "  if (shard.begin < shard.end) {",
        "2 mpi/test_cuda.py",
    ),
    Mutant(
        "csrc/gpu/direct_allreduce.cpp",
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
        "hvdlite/torch/reducer.py",
        "            follow(bucket.streams, bucket.slots[0].param)\n",
        "            pass\n",
        "2 mpi/test_cuda_training.py -k several_streams",
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
    # What repeats is enqueued by one call.
    Mutant("csrc/gpu/prepared_device_allreduce.cpp", "  stream.follow({ready_.get()});\n", "", _PREPARED),
    Mutant("csrc/gpu/prepared_device_allreduce.cpp", "  done_->precede(stream_);\n", "", _PREPARED),
    Mutant(
        "csrc/prepared/prepared_in_node.cpp",
        "  begin(inputs, outputs);\n  last_ = {plan, count, Result::kNotYet};\n",
        "  last_ = {plan, count, Result::kNotYet};\n  begin(inputs, outputs);\n",
        _PREPARED,
    ),
    Mutant(
        "hvdlite/operations/prepared_on_device.py",
        "        self._enqueuing.use_stream(self._current_stream())\n",
        "        self._stream = self.__dict__.get('_stream', self._current_stream())\n"
        "        self._enqueuing.use_stream(self._stream)\n",
        _PREPARED,
    ),
    Mutant(
        "hvdlite/operations/prepared_on_device.py",
        "is_first = self._enqueued(done, self)",
        "is_first = False",
        "2 mpi/test_cuda.py -k watches",
    ),
]
