"""A tiny regression problem: of the jobs that the tests launch, and of the tests, which solve it without hvdlite."""

from __future__ import annotations

import torch

ROWS = 24


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def network(seed: int = 0, *, batch_norm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    norm = [torch.nn.BatchNorm1d(4)] if batch_norm else []
    return torch.nn.Sequential(torch.nn.Linear(3, 4), *norm, torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def flat(model: torch.nn.Module) -> list[float]:
    """All parameters and float buffers."""
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()
