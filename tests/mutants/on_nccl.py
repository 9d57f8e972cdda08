"""Wrong lines of what works through NCCL."""

from __future__ import annotations

from mutant import Mutant

_COLLECTIVES = "hvdlite/collectives/"

MUTANTS = [
    # NCCL: what is enqueued when a call returns, who is called after the end, which copy is loaded.
    Mutant(
        "csrc/gpu/nccl_communicator.cpp",
        "return called ? settle(timeout_s) : WaitStatus::kAborted;",
        "return called ? WaitStatus::kOk : WaitStatus::kAborted;",
        "2 mpi/test_nccl_streams.py",
    ),
    Mutant("csrc/gpu/nccl_communicator.cpp", "    if (ended) return false;\n", "", "2 mpi/test_nccl_streams.py"),
    Mutant(
        "csrc/gpu/nccl_communicator.cpp",
        "is_finished ? library().destroy : library().abort",
        "library().destroy",
        "2 mpi/test_nccl_streams.py",
    ),
    Mutant(
        "csrc/gpu/nccl_communicator.cpp",
        "const std::uintptr_t own = address + rank_ * block_nbytes;",
        "const std::uintptr_t own = address + 0 * block_nbytes;",
        "2 mpi/test_nccl_streams.py",
    ),
    Mutant(
        "csrc/gpu/nccl_library.cpp",
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
        "csrc/gpu/device_memory.cpp",
        "      for (const auto& release : holding->releases) release();\n",
        "",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant(
        "csrc/gpu/nccl_communicator.cpp",
        "  for (Registered& memory : state_->registered) state_->deregister(memory);\n",
        "",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant(
        "csrc/gpu/nccl_communicator.cpp",
        "  if (status != WaitStatus::kOk) return status;\n  const std::lock_guard<std::mutex> turn(state_->turn);\n",
        "  const std::lock_guard<std::mutex> turn(state_->turn);\n",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant(
        "csrc/gpu/nccl_communicator.cpp",
        "      const std::lock_guard<std::mutex> lock(turn);\n      if (deregister",
        "      if (deregister",
        "2 mpi/test_nccl_registration.py",
    ),
    Mutant("csrc/gpu/nccl_communicator.cpp", "      if (!is_ready) return;\n", "", "2 mpi/test_nccl_registration.py"),
    Mutant(
        "csrc/gpu/nccl_communicator.cpp",
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
]
