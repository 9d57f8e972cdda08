"""Layers whose weights are split between ranks, for models that are too large or too slow for one::

import hvdlite.torch as hvd
import hvdlite.tensor_parallel as tp

hvd.init()
grid = tp.init(tp_size=2)
up = tp.ColumnParallelLinear(1024, 4096, grid.tp)
down = tp.RowParallelLinear(4096, 1024, grid.tp)
optimizer = hvd.DistributedOptimizer(optimizer, process_set=grid.dp)

On one node ranks exchange rows through shared memory that matmuls read and write in place, or through memory of their
GPUs; across nodes by hvdlite's operations. See docs/tensor_parallel.md.
"""

from __future__ import annotations

from hvdlite.tensor_parallel.checkpoint import load_unsplit_state_dict, unsplit_state_dict
from hvdlite.tensor_parallel.clipping import clip_grad_norm_
from hvdlite.tensor_parallel.grid import Grid, init
from hvdlite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from hvdlite.tensor_parallel.matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    replicated_matmul,
)
from hvdlite.tensor_parallel.parallelize import parallelize
from hvdlite.tensor_parallel.regions import gather_columns, gather_rows, split_columns, split_rows, sum_gradients
from hvdlite.tensor_parallel.team import Team
from hvdlite.tensor_parallel.userbuffers import initialize_userbuffers
from hvdlite.tensor_parallel.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "Grid",
    "RowParallelLinear",
    "Team",
    "VocabularyParallelEmbedding",
    "all_gather_matmul",
    "clip_grad_norm_",
    "gather_columns",
    "gather_rows",
    "init",
    "initialize_userbuffers",
    "load_unsplit_state_dict",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "parallelize",
    "replicated_matmul",
    "split_columns",
    "split_rows",
    "sum_gradients",
    "unsplit_state_dict",
    "vocabulary_parallel_cross_entropy",
]
