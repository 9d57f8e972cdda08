"""NCCL keeps the contract of backends, as far as streams let it; run with 1, 2, 3 and 4 ranks under mpirun.

The NCCL is a simulated one, between the processes of the ranks, see tests/gpusim/nccl.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi4py import MPI

from device_backend_lab import Settled
from hvdlite.collectives.base import Backend
from hvdlite.dtypes import DType
from nccl_lab import OwnMemory, build
from test_backends import (  # noqa: F401 (tests that pytest finds here as well, with the fixtures of this module)
    REDUCING,
    take,
    test_a_reduce_scatter_that_stays_open_and_the_allgather_that_closes_it,
    test_allgather_of_ragged_blocks,
    test_allreduce_combines_with_every_operation,
    test_allreduce_sums_at_every_size,
    test_barrier_waits_for_the_last,
    test_broadcast_from_every_root,
    test_every_rank_gets_the_same_bits_every_time,
    test_operations_back_to_back,
    test_operations_that_are_begun_complete_in_order,
    test_prescale_keeps_fp16_in_range,
    test_reduce_scatter_leaves_every_block_with_its_rank,
    test_rounding_stays_small,
    test_scales_apply_before_and_after,
)

pytestmark = pytest.mark.any_mpi


@pytest.fixture(autouse=True, scope="module")
def types_that_nccl_has() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_backends.REDUCING", [dtype for dtype in REDUCING if dtype is not DType.INT16])
        yield


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    memory = OwnMemory()
    backend = Settled(build(MPI.COMM_WORLD.Dup(), memory=memory), memory)
    yield backend
    backend.close()
