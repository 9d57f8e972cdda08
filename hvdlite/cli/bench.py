"""`python -m hvdlite bench allreduce`: time and bandwidth of an operation by size, on the ranks that run it.

The table is that of nccl-tests: size is that of the whole tensor of a rank (of an allgather's result), algbw = size /
time, and busbw what a link carries in an algorithm that is optimal, comparable between operations and ranks.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

import hvdlite.torch as hvd
from hvdlite.cli.reader import ends_with_reader
from hvdlite.counted import counted

_PERIOD = 5  # of the input, whose sums over ranks stay exact in 16-bit floats up to 16 ranks
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")


@dataclass(frozen=True)
class Operation:
    """How to run one, and what should come of it.

    Args:
        call: the input -> the result.
        expected: (pattern, ranks) -> the result.
        input_share: (ranks) -> the part of the size that the input has.
        bus_factor: (ranks) -> busbw / algbw.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    expected: Callable[[torch.Tensor, int], torch.Tensor]
    input_share: Callable[[int], float]
    bus_factor: Callable[[int], float]


def _sum_over_ranks(pattern: torch.Tensor, ranks: int) -> torch.Tensor:
    return pattern * ranks + ranks * (ranks - 1) // 2


def _own_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(hvd.size())[hvd.rank()]


OPERATIONS = {
    "allreduce": Operation(
        lambda tensor: hvd.allreduce(tensor, name="bench", op=hvd.Sum),
        _sum_over_ranks, lambda n: 1.0, lambda n: 2 * (n - 1) / n,
    ),
    "allgather": Operation(
        lambda tensor: hvd.allgather(tensor, name="bench"),
        lambda pattern, n: torch.cat([pattern + rank for rank in range(n)]), lambda n: 1 / n, lambda n: (n - 1) / n,
    ),
    "broadcast": Operation(
        lambda tensor: hvd.broadcast(tensor, 0, name="bench"), lambda pattern, n: pattern, lambda n: 1.0, lambda n: 1.0,
    ),
    "alltoall": Operation(
        lambda tensor: hvd.alltoall(tensor, name="bench"),
        lambda pattern, n: torch.cat([_own_rows(pattern) + rank for rank in range(n)]),
        lambda n: 1.0, lambda n: (n - 1) / n,
    ),
    "reducescatter": Operation(
        lambda tensor: hvd.reducescatter(tensor, name="bench", op=hvd.Sum),
        lambda pattern, n: _own_rows(_sum_over_ranks(pattern, n)), lambda n: 1.0, lambda n: (n - 1) / n,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table: the mean over calls of the slowest rank, the median over rounds."""

    bytes: int
    count: int
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    wrong: int


@ends_with_reader
def main(argv: Sequence[str]) -> int:
    """Print the table on rank 0; returns 1 where a result was wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.max_bytes < options.min_bytes:
        parser.error(f"--max-bytes {options.max_bytes} is less than --min-bytes {options.min_bytes}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA GPU here")
    hvd.init()
    operation = OPERATIONS[options.operation]
    rows = []
    ranks = counted(hvd.size(), "rank")
    _say(
        options,
        f"{options.operation}, {options.dtype} on {options.device}, {ranks}\n"
        f"{'bytes':>12} {'count':>12} {'time us':>10} {'algbw GB/s':>11} {'busbw GB/s':>11} {'wrong':>8}",
    )
    for nbytes in _sizes(options.min_bytes, options.max_bytes, options.factor):
        row = measure(operation, nbytes, getattr(torch, options.dtype), options.device, options.calls, options.rounds)
        rows.append(row)
        _say(
            options,
            f"{row.bytes:12} {row.count:12} {row.time_us:10.1f} {row.algbw_gbps:11.3f} {row.busbw_gbps:11.3f} "
            f"{row.wrong:8}",
        )
    found = {**vars(options), "ranks": hvd.size(), "rows": [asdict(row) for row in rows]}
    is_told = hvd.rank() == 0 and options.json
    hvd.shutdown()
    if is_told:
        print(json.dumps(found, indent=2))
    return 1 if any(row.wrong for row in rows) else 0


def _say(options: argparse.Namespace, text: str) -> None:
    """On rank 0; where nobody reads it, all ranks end."""
    failure: OSError | None = None
    if hvd.rank() == 0 and not options.json:
        try:
            print(text, flush=True)
        except OSError as error:
            failure = error
    if hvd.broadcast_object(failure is not None, 0):
        hvd.shutdown()
        raise failure or SystemExit(128 + signal.SIGPIPE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvdlite bench",
        description="Measure an operation on all ranks: hvdliterun -np 2 python -m hvdlite bench allreduce",
    )
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("-b", "--min-bytes", type=_bytes, default=1 << 10, metavar="SIZE", help="default 1K")
    parser.add_argument("-e", "--max-bytes", type=_bytes, default=64 << 20, metavar="SIZE", help="default 64M")
    parser.add_argument("-f", "--factor", type=partial(_above, 1), default=4, help="between sizes (default 4)")
    parser.add_argument("-d", "--dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("-n", "--calls", type=partial(_above, 0), default=20, help="per round (default 20)")
    parser.add_argument("--rounds", type=partial(_above, 0), default=5, help="of which the median is shown (default 5)")
    parser.add_argument("--json", action="store_true")
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0, perhaps with K, M or G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


def _above(bound: int, text: str) -> int:
    if not text.isdecimal() or int(text) <= bound:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above {bound}")
    return int(text)


def _sizes(least: int, most: int, factor: int) -> Iterator[int]:
    while least <= most:
        yield least
        least *= factor


def measure(
    operation: Operation, nbytes: int, dtype: torch.dtype, device: str, calls: int = 20, rounds: int = 5
) -> Row:
    """Run ``operation`` on about ``nbytes``: a multiple of what each rank has a part of. Collective.

    The first call is checked in full, on every rank, and warms up.
    """
    ranks = hvd.size()
    where = torch.device("cuda", hvd.local_rank()) if device == "cuda" else torch.device("cpu")
    share = operation.input_share(ranks)
    count = max(1, nbytes // dtype.itemsize // ranks) * ranks
    pattern = torch.arange(round(count * share)) % _PERIOD
    tensor = (pattern + hvd.rank()).to(dtype).to(where)
    differs = operation.call(tensor) != operation.expected(pattern, ranks).to(dtype).to(where)
    wrong = int(hvd.allreduce(differs.sum().cpu(), name="bench.wrong", op=hvd.Sum))
    times = [_round(operation, tensor, calls) for _ in range(rounds)]
    seconds = statistics.median(times)
    algbw = count * dtype.itemsize / seconds / 1e9
    return Row(count * dtype.itemsize, count, seconds * 1e6, algbw, algbw * operation.bus_factor(ranks), wrong)


def _round(operation: Operation, tensor: torch.Tensor, calls: int) -> float:
    """Seconds per call, of the slowest rank."""
    hvd.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        operation.call(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    own = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64)
    return float(hvd.allreduce(own, name="bench.time", op=hvd.Max))
