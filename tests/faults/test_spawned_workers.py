"""DataLoader workers that are spawned: each begins by importing the script, beside a rank that MPI has started.

In a script of their own, since a module under tests/mpi imports MPI, and a child that starts MPI would be taken for its
parent by the launcher. Each takes several seconds to import torch.
"""

from __future__ import annotations

import pytest

from launching import launch

LOADING = """
import sys
import torch
import hvdlite.torch as hvd

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        assert "mpi4py.MPI" not in sys.modules
        assert not hvd.is_initialized()
        return torch.tensor([index])

def main():
    hvd.init()
    data = Rows()
    sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
    loader = torch.utils.data.DataLoader(
        data, 2, sampler=sampler, num_workers=1, multiprocessing_context=sys.argv[1], persistent_workers=True
    )
    for epoch in range(2):
        sums = [hvd.allreduce(batch, op=hvd.Sum).flatten().tolist() for batch in loader]
        assert sums == [[1, 5], [9, 13], [17, 21]], sums
    print("rank", hvd.rank(), "is through")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers(method: str) -> None:
    result = launch(2, LOADING, method, timeout=150).check()
    assert result.stdout == "rank 0 is through\nrank 1 is through\n"


UNGUARDED = """
import multiprocessing
import hvdlite

hvdlite.init()
worker = multiprocessing.get_context("spawn").Process(target=print)
worker.start()
worker.join()
print("the worker ended with", worker.exitcode)
"""


@pytest.mark.parametrize("mpi", ["current", "none"])
def test_a_script_that_does_not_guard_its_start(mpi: str) -> None:
    """Its workers would start MPI as well, or come to their parent's place, and wait without end."""
    result = launch(2, UNGUARDED, mpi=mpi).check()
    assert result.stdout == "the worker ended with 1\n" * 2
    for number, rank in enumerate(result.ranks):
        assert f"StartupError: hvd.init() was called in a child process of rank {number}" in rank.stderr
        assert '`if __name__ == "__main__":`' in rank.stderr


MADE_RANKS = """
import os, sys, time
import torch
import torch.multiprocessing as mp
import hvdlite.torch as hvd

def work(rank, size, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)}
    hvd.init()
    time.sleep(0.3 * rank)
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    os.write(1, f"sum {total}\\n".encode())  # in one piece, as both write into one pipe
    if sys.argv[1] == "raise":
        if rank == 1:
            raise ValueError("no good")
        try:
            hvd.allreduce(torch.ones(1))
        except hvd.HorovodInternalError as error:
            print(str(error).splitlines()[0], flush=True)
            raise
    time.sleep(0.5 * rank)  # nobody takes the end of rank 0 for its death

if __name__ == "__main__":
    import socket
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    mp.start_processes(work, args=(2, port), nprocs=2, start_method="fork")
"""


def test_processes_that_are_made_ranks_by_their_own_program() -> None:
    """As of torch.multiprocessing.spawn: they set RANK, WORLD_SIZE and the like themselves."""
    result = launch(1, MADE_RANKS, "end", mpi="none").check()
    assert result.stdout == "sum 2.0\n" * 2
    assert "died" not in result.stderr and "ERROR" not in result.stderr


def test_one_of_them_raises() -> None:
    result = launch(1, MADE_RANKS, "raise", mpi="none")
    assert result.returncode != 0
    assert "rank 1 raised ValueError: no good" in result.stdout
    assert "died without a word" not in result.stderr
    assert "ValueError: no good" in result.stderr
