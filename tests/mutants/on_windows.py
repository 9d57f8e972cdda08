"""Wrong lines of what ranks do in the memory of one another's GPUs, where layers are tensor-parallel."""

from __future__ import annotations

from mutant import Mutant

_TENSOR_PARALLEL = "hvdlite/tensor_parallel/"

MUTANTS = [
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
]
