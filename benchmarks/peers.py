"""The peers that hvdlite is measured against, as their users start them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from hvdlite.config import Config
from hvdlite.links.interfaces import select

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 4 << 20  # of a large Allreduce over MPI: few enough to fit into the cache, enough to be worth a call


def start_gloo(comm: MPI.Comm) -> None:
    """Make torch.distributed's default process group: Gloo, between the ranks of ``comm``."""
    address = select(Config.from_env().network_interfaces)[0].address
    if comm.rank == 0:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        comm.bcast((address, store.port))
    else:
        address, port = comm.bcast(None)
        store = dist.TCPStore(address, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def allow_coll_sm() -> None:
    """Let Open MPI offer its component coll/sm; call it before MPI starts.

    Its priority of 1 is the lowest, so no communicator takes it unless it asks for it; `with_coll_sm` does.
    """
    os.environ.setdefault("OMPI_MCA_coll_sm_priority", "1")


def with_coll_sm(comm: MPI.Comm) -> MPI.Comm | None:
    """A duplicate of ``comm`` whose collectives run in coll/sm, as ``mpirun --mca coll_sm_priority 100`` makes them.

    None where MPI is not Open MPI 5 or later, or the ranks span nodes. Chosen per communicator, it can be measured in
    turn with the stock components, in one run.
    """
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    if name != "Open MPI" or version[0] < 5:
        return None
    info = MPI.Info.Create()
    info["ompi_comm_coll_preference"] = "sm"
    duplicate = comm.Dup_with_info(info)
    info.Free()
    return duplicate
