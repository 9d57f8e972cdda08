"""A small GPT whose weights, gradients and optimizer are sharded over the ranks by torch's FSDP2, over hvdlite.

    python -m hvdlite run -np 2 05_fsdp2.py
    python -m hvdlite run -np 2 05_fsdp2.py --steps 100 --checkpoints gpt
    python -m hvdlite run -np 3 05_fsdp2.py --checkpoints gpt       # goes on, with another number of ranks
    torchrun --nproc-per-node 2 05_fsdp2.py                         # or mpirun -np 2 python 05_fsdp2.py

It learns the source of Python's standard library, byte by byte. Lines marked (hvd) are all that differs from the same
program over Gloo. The batch is that of all ranks together, so any number of ranks takes the same steps.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import hvdlite.distributed  # noqa: F401 (hvd)

VOCABULARY = 256  # bytes


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The top-level modules of the standard library as bytes: (training, validation), the latter the last twentieth."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    cut = len(text) * 19 // 20
    return text[:cut], text[cut:]


def sample_batch(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the (batch, context) bytes that are all ranks', and the bytes that follow each."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=torch.Generator().manual_seed(seed))
    own = starts[dist.get_rank() :: dist.get_world_size()]
    window = text[own + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context) bytes to (batch, context, VOCABULARY) logits of the next ones."""
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def loss_of(model: GPT, text: torch.Tensor, batch: int, seed: int) -> torch.Tensor:
    """The mean over this rank's rows."""
    tokens, targets = sample_batch(text, batch, model.position.shape[0], seed)
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def mean(loss: torch.Tensor) -> float:
    """Over all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item()


class Checkpoints:
    """A directory with a checkpoint for each number of steps.

    Each rank writes its shards, and reads what its own shards are made of, whoever wrote that.
    """

    def __init__(self, path: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.model, self.optimizer = path, model, optimizer

    def save(self, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.path / str(step))

    def load(self) -> int:
        """The last one; returns the step to go on with."""
        complete = [int(file.parent.name) for file in self.path.glob("*/.metadata")]  # which is written in the end
        if not complete:
            return 0
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.path / str(max(complete)))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return max(complete)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=12, help="sequences of all ranks together (default: 12)")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="per layer (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=25, metavar="STEPS", help="0: at the end (default: 25)")
    parser.add_argument("--checkpoints", type=Path, metavar="DIRECTORY", help="go on from the last one, and save")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    dist.init_process_group("hvdlite")  # (hvd)
    is_main, ranks = dist.get_rank() == 0, dist.get_world_size()
    if options.batch_size < 1 or options.batch_size % ranks:
        raise SystemExit(f"--batch-size {options.batch_size}: must be a multiple of {ranks} (ranks), not 0")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))  # ranks share the cores
    torch.manual_seed(0)  # all ranks build the same model, of which each keeps its shards

    text, held_out = load_text()
    model = GPT(options.context, options.width, options.layers, options.heads)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    checkpoints = Checkpoints(options.checkpoints, model, optimizer) if options.checkpoints else None
    first = checkpoints.load() if checkpoints else 0
    if is_main:
        whole = sum(parameter.numel() for parameter in model.parameters())
        own = sum(parameter.to_local().numel() for parameter in model.parameters())
        resumed = f", from step {first}" if first else ""
        print(f"{whole:,} parameters, {own:,} of them on rank 0 of {ranks}{resumed}", flush=True)

    start = time.perf_counter()
    for step in range(first, options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, text, options.batch_size, seed=step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step + 1 == options.steps or (options.log_every and (step + 1) % options.log_every == 0):
            everywhere = mean(loss)
            if is_main:
                ms = (time.perf_counter() - start) / (step + 1 - first) * 1e3
                print(f"step {step + 1:5}  loss {everywhere:.3f}  {ms:.1f} ms per step", flush=True)
    if checkpoints and first < options.steps:
        checkpoints.save(options.steps)

    with torch.no_grad():
        everywhere = mean(loss_of(model, held_out, 4 * options.batch_size, seed=0))
    if is_main:
        print(f"validation loss {everywhere:.3f}, {everywhere / math.log(2):.2f} bits per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
