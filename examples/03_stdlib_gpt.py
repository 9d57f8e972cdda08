"""A small GPT that learns to write Python from the source of Python's own standard library, byte by byte.

    python -m hvdlite run -np 2 03_stdlib_gpt.py
    python -m hvdlite run -np 2 03_stdlib_gpt.py --checkpoint gpt.pt    # again: goes on where it stopped
    python -m hvdlite run -np 2 03_stdlib_gpt.py --timeline trace.json

It shows what a larger training needs: gradient clipping, a learning rate that warms up, checkpoints that only rank 0
writes and reads, and a timeline. The defaults take about a minute on two cores.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

VOCABULARY = 256  # bytes


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The top-level modules of the standard library as bytes: (training, validation), the latter the last twentieth."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    cut = len(text) * 19 // 20
    return text[:cut], text[cut:]


def sample_batch(text: torch.Tensor, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, context) bytes, and those that follow each; the same for the same ``seed``."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=torch.Generator().manual_seed(seed))
    window = text[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context) bytes to (batch, context, VOCABULARY) logits of the next ones."""
        return self.head(self.blocks(self.token(tokens) + self.position, mask=self.mask, is_causal=True))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Only rank 0 calls this. A run that is killed meanwhile leaves the checkpoint before."""
    partial = path.with_name(path.name + ".partial")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    os.replace(partial, path)


def resume(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Rank 0 reads the checkpoint, if there is one; everybody gets what rank 0 has. Returns the step to go on with."""
    step = 0
    if hvd.rank() == 0 and path is not None and path.exists():
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
        print(f"resuming {path} at step {step}")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.broadcast_object(step, root_rank=0)


def train_step(model: GPT, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor], clip: float) -> torch.Tensor:
    """One step; returns the loss of this rank's batch."""
    optimizer.zero_grad()
    loss = model.loss(*batch)
    loss.backward()
    # Clipping needs the gradients of all ranks, so it comes after synchronize(), which step() then skips.
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        optimizer.step()
    return loss.detach()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="per layer (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=30, help="steps (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=25, metavar="STEPS", help="0: at both ends (default: 25)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="resume from FILE if it exists, and save to it")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--timeline", metavar="FILE", help="for: python -m hvdlite timeline report FILE")
    options = parser.parse_args()
    if options.batch_size < 1:
        parser.error(f"--batch-size {options.batch_size}: must be 1 or more")
    return options


def main() -> None:
    options = parse_options()
    hvd.init()
    is_main = hvd.rank() == 0
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))  # ranks share the cores
    torch.manual_seed(0)

    text, held_out = load_text()
    model = GPT(options.context, options.width, options.layers, options.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first = resume(options.checkpoint, model, optimizer)
    if is_main:
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"{millions:.2f} M parameters, {len(text) / 1e6:.1f} MB of text, {hvd.size()} rank(s)", flush=True)
    if options.timeline:
        hvd.start_timeline(options.timeline)

    tokens_per_step = options.batch_size * options.context * hvd.size()
    logged, start = first, time.perf_counter()
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        # Every rank and step has bytes of its own, and a resumed run those that it would have had.
        seed = step * hvd.size() + hvd.rank()
        batch = sample_batch(text, options.batch_size, options.context, seed)
        loss = train_step(model, optimizer, batch, options.clip)

        done = step + 1
        if done in (first + 1, options.steps) or (options.log_every and done % options.log_every == 0):
            loss = hvd.allreduce(loss, name="loss")
            if is_main:
                speed = (done - logged) * tokens_per_step / (time.perf_counter() - start)
                rate = learning_rate(step, options)
                print(f"step {done:5}  loss {loss.item():.3f}  lr {rate:.5f}  {speed:,.0f} tokens/s", flush=True)
            logged, start = done, time.perf_counter()
        if is_main and options.checkpoint and (done % options.save_every == 0 or done == options.steps):
            save(options.checkpoint, done, model, optimizer)

    if options.timeline:
        hvd.stop_timeline()
    with torch.no_grad():
        loss = model.loss(*sample_batch(held_out, 32, options.context, hvd.rank()))
    loss = hvd.allreduce(loss, name="validation")
    if is_main:
        bits = loss.item() / math.log(2)
        print(f"validation loss {loss.item():.3f}, {bits:.2f} bits per byte, after {max(first, options.steps)} steps")


if __name__ == "__main__":
    main()
