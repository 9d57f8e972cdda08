"""The models that steps are timed with: two whose step takes one core 0.9 s, and four with a tenth of it or less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, relu, scaled_dot_product_attention

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, a rank's batch for it, and the loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2015, arXiv:1512.03385); strides in the 3x3 one."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            *_normed(channels, width, 1),
            nn.ReLU(),
            *_normed(width, width, 3, stride),
            nn.ReLU(),
            *_normed(width, 4 * width, 1),
        )
        changes = stride > 1 or channels != 4 * width
        self.shortcut = nn.Sequential(*_normed(channels, 4 * width, 1, stride)) if changes else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) to (batch, 4 width, height / stride, width / stride)."""
        return relu(self.way(images) + self.shortcut(images))


def _normed(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    # Without running means, which DistributedDataParallel would broadcast before every step.
    return nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(
        width, track_running_stats=False
    )


def _resnet50() -> nn.Module:
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            layers.append(_Bottleneck(channels, width, 2 if i == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) to the same."""
        query, key, value = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class _Gpt(nn.Module):
    """Decoder only; the head is the embedding of the tokens."""

    def __init__(self, vocabulary: int = 4096, width: int = 512, layers: int = 8, context: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(_GptBlock(width, 8) for _ in range(layers)), nn.LayerNorm(width))
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context) tokens to (batch, vocabulary, context) logits."""
        return (self.blocks(self.token(tokens) + self.position) @ self.token.weight.T).transpose(1, 2)


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    channels = [3, 32, 64, 128, 128, 256, 256, 512]
    for i in range(len(channels) - 1):
        layers += [nn.Conv2d(channels[i], channels[i + 1], 3, padding=1), nn.GroupNorm(8, channels[i + 1]), nn.ReLU()]
        if i % 2 == 1:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


def _images(count: int, side: int, classes: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(count, 3, side, side), torch.randint(classes, (count,)))


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


def _tokens(rows: int, context: int, vocabulary: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(vocabulary, (rows, context)), torch.randint(vocabulary, (rows, context)))


def _many_tiny() -> nn.Module:
    """Orthogonal: in so long a chain gradients fade to denormals, which take a processor several times as long."""
    layers = [nn.Linear(32, 32) for _ in range(200)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def _few_huge() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))


def _vectors(rows: int, width: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(rows, width), torch.randn(rows, width))


LONG = (
    Task("ResNet-50", _resnet50, _images(3, 224, 1000), cross_entropy),
    Task("small GPT", _Gpt, _tokens(5, 128, 4096), cross_entropy),
)
SHORT = (
    Task("convolutional", _convolutional, _images(8, 32, 10), cross_entropy),
    Task("transformer", _Transformer, _tokens(4, 64, 1000), cross_entropy),
    Task("400 tiny parameters", _many_tiny, _vectors(32, 32), mse_loss),
    Task("three 4096^2 layers", _few_huge, _vectors(16, 4096), mse_loss),
)
