"""A small transformer, unsplit and split, and how tests of tensor parallelism look at gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

import hvdlite.tensor_parallel as tp

WORDS, WIDTH, HEADS, CONTEXT = 24, 24, 12, 12
"""12 divides by 1, 2, 3 and 4 ranks."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}


def close(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert actual is not None
    assert expected is not None
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def integers(*shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """From -2 to 2: products of a few dozen are exact, and differ from place to place."""
    generator = torch.Generator().manual_seed(salt)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


class Block(nn.Module):
    """Attention with a fused projection, and a feed-forward, of (positions, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.qkv(self.norm1(x))))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        positions, batch, _ = qkv.shape
        queries, keys, values = (
            part.reshape(positions, batch, -1, WIDTH // HEADS).permute(1, 2, 0, 3) for part in qkv.chunk(3, -1)
        )
        heads = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return heads.permute(2, 0, 1, 3).reshape(positions, batch, -1)


class Transformer(nn.Module):
    """(positions, batch) words to a loss; `split` makes it tensor-parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.team: tp.Team | None = None

    def split(self, team: tp.Team, sequence_parallel: bool) -> Transformer:
        column = partial(tp.ColumnParallelLinear.split, sequence_parallel=sequence_parallel)
        row = partial(tp.RowParallelLinear.split, sequence_parallel=sequence_parallel)
        plan = {
            "embedding": partial(tp.VocabularyParallelEmbedding.split, sequence_parallel=sequence_parallel),
            "blocks.*.qkv": partial(column, blocks=3),
            "blocks.*.out": row,
            "*.up": column,
            "*.down": row,
            "head": column,
        }
        tp.parallelize(self, plan, team)
        if sequence_parallel:
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    tp.sum_gradients(module, team)
        self.team = team
        return self

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if self.team is None:
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return tp.vocabulary_parallel_cross_entropy(logits, targets, self.team)


def batch(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, 2) words and targets of one column of a grid."""
    words = torch.randint(WORDS, (CONTEXT + 1, 2), generator=torch.Generator().manual_seed(1000 * place + step))
    return words[:-1], words[1:]
