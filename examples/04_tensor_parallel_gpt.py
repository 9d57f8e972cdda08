"""A small GPT whose layers are split between ranks, trained on the source of Python's standard library, byte by byte.

    python -m hvdlite run -np 1 04_tensor_parallel_gpt.py
    python -m hvdlite run -np 2 04_tensor_parallel_gpt.py               # the same losses from half the weights per rank
    python -m hvdlite run -np 4 04_tensor_parallel_gpt.py --tp-size 2   # two teams, each with half of the batch
    python -m hvdlite run -np 2 04_tensor_parallel_gpt.py --save gpt.pt # as one process would save it

It shows sequence parallelism, a grid of tensor and data parallelism, and the checkpoint of the unsplit model.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import hvdlite.tensor_parallel as tp
import hvdlite.torch as hvd

VOCABULARY = 256  # bytes


def load_text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def sample_batch(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(context, batch) bytes, and those that follow each; the same for the same ``seed``."""
    starts = torch.randint(len(text) - context, (1, batch), generator=torch.Generator().manual_seed(seed))
    window = text[starts + torch.arange(context + 1).unsqueeze(1)].long()
    return window[:-1], window[1:]


class Block(nn.Module):
    """Between the split layers each rank holds some of the positions; inside them, some of the heads and features."""

    def __init__(self, width: int, heads: int, team: tp.Team) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = tp.ColumnParallelLinear(width, 3 * width, team, sequence_parallel=True, blocks=3)
        self.out = tp.RowParallelLinear(width, width, team, sequence_parallel=True)
        self.up = tp.ColumnParallelLinear(width, 4 * width, team, sequence_parallel=True)
        self.down = tp.RowParallelLinear(4 * width, width, team, sequence_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm1(x))))
        return x + self.down(gelu(self.up(self.norm2(x))))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """(context, batch, 3 * features of this rank) to (context, batch, features of this rank)."""
        queries, keys, values = (
            part.unflatten(2, (-1, self.head_width)).permute(1, 2, 0, 3) for part in qkv.chunk(3, 2)
        )
        return scaled_dot_product_attention(queries, keys, values, is_causal=True).permute(2, 0, 1, 3).flatten(2)


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int, team: tp.Team) -> None:
        super().__init__()
        self.team = team
        self.token = tp.VocabularyParallelEmbedding(VOCABULARY, width, team, sequence_parallel=True)
        self.position = nn.Parameter(torch.zeros(context, 1, width))
        self.blocks = nn.Sequential(*[Block(width, heads, team) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = tp.ColumnParallelLinear(width, VOCABULARY, team, bias=False, sequence_parallel=True)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                tp.sum_gradients(module, team)  # each rank normalizes positions of its own

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + tp.split_rows(self.position, self.team)
        return tp.vocabulary_parallel_cross_entropy(self.head(self.norm(self.blocks(x))), targets, self.team)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp-size", type=int, help="ranks that share a model (default: all)")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences per step of all ranks (default: %(default)s)"
    )
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="per layer (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="0: at the end (default: 10)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the weights of the unsplit model at the end")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    hvd.init()
    grid = tp.init(options.tp_size or hvd.size())
    if options.batch_size < 1 or options.batch_size % grid.dp.size():
        raise SystemExit(f"--batch-size {options.batch_size}: must be a multiple of {grid.dp.size()} (teams), not 0")
    if options.heads < 1 or options.width % options.heads or options.heads % grid.tp.size:
        raise SystemExit(
            f"--heads {options.heads}: must divide --width {options.width}, and be a multiple of the {grid.tp.size} "
            "ranks that share a model"
        )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))  # ranks share the cores
    torch.manual_seed(0)  # on every rank, so that all parts are of the same model

    text = load_text()
    model = GPT(options.context, options.width, options.layers, options.heads, grid.tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=grid.dp)
    if hvd.rank() == 0:
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"{grid.tp.size} x {grid.dp.size()} ranks, {millions:.2f} M parameters on each", flush=True)

    start, logged = time.perf_counter(), 0
    for step in range(options.steps):
        tokens, targets = sample_batch(text, options.batch_size, options.context, seed=step)
        own = slice(grid.dp.rank(), None, grid.dp.size())  # a team works on the same sequences
        optimizer.zero_grad()
        loss = model.loss(tokens[:, own], targets[:, own])
        loss.backward()
        optimizer.step()

        done = step + 1
        if done == options.steps or (options.log_every and done % options.log_every == 0):
            loss = hvd.allreduce(loss.detach(), name="loss", process_set=grid.dp)
            if hvd.rank() == 0:
                speed = (done - logged) * tokens.numel() / (time.perf_counter() - start)
                print(f"step {done:5}  loss {loss.item():.3f}  {speed:,.0f} tokens/s", flush=True)
            start, logged = time.perf_counter(), done

    if options.save:
        state = tp.unsplit_state_dict(model)  # all ranks take part
        if hvd.rank() == 0:
            torch.save(state, options.save)
    hvd.barrier()  # whoever ends first ends the job, and with it what others do in process sets of their own


if __name__ == "__main__":
    main()
