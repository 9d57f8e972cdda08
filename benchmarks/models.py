"""The models that steps are timed with; their sizes are such that one core takes tens of milliseconds for a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, a rank's batch for it, and the loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    channels = [3, 32, 64, 128, 128, 256, 256, 512]
    for i in range(len(channels) - 1):
        layers += [nn.Conv2d(channels[i], channels[i + 1], 3, padding=1), nn.GroupNorm(8, channels[i + 1]), nn.ReLU()]
        if i % 2 == 1:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


def _images() -> Batch:
    return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 256, layers: int = 4, context: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context) tokens to (batch, vocabulary, context) logits."""
        logits: torch.Tensor = self.head(self.blocks(self.token(tokens) + self.position))
        return logits.transpose(1, 2)


def _tokens() -> Batch:
    return torch.randint(1000, (4, 64)), torch.randint(1000, (4, 64))


def _many_tiny() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(200)))


def _few_huge() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))


def _vectors(rows: int, width: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(rows, width), torch.randn(rows, width))


MODELS = (
    Task("convolutional", _convolutional, _images, cross_entropy),
    Task("transformer", _Transformer, _tokens, cross_entropy),
    Task("400 tiny parameters", _many_tiny, _vectors(32, 32), mse_loss),
    Task("three 4096^2 layers", _few_huge, _vectors(16, 4096), mse_loss),
)
