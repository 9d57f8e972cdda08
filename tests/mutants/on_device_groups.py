"""Wrong lines of torch's process groups of tensors on GPUs."""

from __future__ import annotations

from mutant import Mutant

_GROUPS = "hvdlite/distributed/"

MUTANTS = [
    # Process groups: what follows what, what is kept, what is compared, what ends with the group.
    Mutant(
        f"{_GROUPS}device_site.py",
        "            self._stream.follow([where.ready])\n",
        "",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(f"{_GROUPS}device_site.py", "title, (run, where), ", "title, None, ", "2 mpi/test_cuda_distributed.py"),
    Mutant(
        f"{_GROUPS}device_site.py",
        "with streams.streams.on(self._ordinal, self._stream.handle):",
        "if True:",
        "2 mpi/test_cuda_distributed_calls.py",
    ),
    Mutant(
        f"{_GROUPS}device_site.py",
        "            self._stream.follow([ready])\n",
        "",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}membership.py",
        "run if self._on_gpu is None else self._on_gpu.settled(run)",
        "run",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}membership.py",
        "        if len(ordinals) > 1:\n",
        "        if False:\n",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_carrier.py",
        "        memory.stream.follow([self._moment()])\n",
        "",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_carrier.py",
        "        self._stream.follow([memory.moment()])\n",
        "",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_carrier.py",
        "        self._host.meet(call.on_gpus)\n        if self._device is None:",
        "        if self._device is None:",
        "2 mpi/test_cuda_distributed_calls.py",
    ),
    Mutant(
        f"{_GROUPS}device_carrier.py",
        "        with self._watch.enqueuing(str(call.on_gpus), self._host.timeout_s):\n",
        "        if True:\n",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}call.py",
        'return _call(call.operation, *call.facts, ("device", "a GPU"))',
        "return call",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_work.py",
        "        self.enqueued.moment.precede(stream)\n",
        "",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_work.py",
        "if stream == self._stream:  # which",
        "if True:  # which",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_work.py",
        "        if not self._is_good():\n            self._of.check()\n",
        "",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_work.py",
        "            self._await_device(timeout.total_seconds())\n",
        "            pass\n",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_watch.py",
        " and not group.has_failed",
        "",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_messages.py",
        "self._from_gpu.begin([where.ready], ",
        "self._from_gpu.begin([], ",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_messages.py",
        "self._to_gpu.begin([where.ready], ",
        "self._to_gpu.begin([], ",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}device_messages.py",
        "if pinned.nbytes >= nbytes and moment.is_reached:",
        "if pinned.nbytes >= nbytes:",
        "2 mpi/test_cuda_distributed.py",
    ),
    Mutant(
        f"{_GROUPS}work.py",
        "return all(work.wait() for work in self._works)",
        "return True",
        "2 mpi/test_cuda_distributed.py",
    ),
]
