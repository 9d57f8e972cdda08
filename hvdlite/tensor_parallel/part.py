"""Which part of a layer's tensor each rank of a team holds."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Part(NamedTuple):
    """An equal share of a tensor along ``dim``, or of each of ``blocks`` equal blocks of it along ``dim``.

    Blocks are what a fused projection computes side by side, as queries, keys and values: every rank gets a share of
    each.
    """

    dim: int
    blocks: int = 1

    def of(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """The share of ``rank``, new.

        Raises:
            ValueError: ``size`` does not divide what is to be split.
        """
        shares = self.blocks * size
        length = whole.shape[self.dim]
        if length % shares:
            of_blocks = f" of each of {self.blocks} blocks" if self.blocks > 1 else ""
            raise ValueError(
                f"dimension {self.dim} of a tensor of shape {tuple(whole.shape)} cannot be split{of_blocks} among "
                f"{size} ranks: {shares} does not divide {length}"
            )
        before, after = whole.shape[: self.dim], whole.shape[self.dim + 1 :]
        pieces = whole.detach().reshape(*before, self.blocks, size, length // shares, *after)
        share = pieces.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)
        return share.clone(memory_format=torch.contiguous_format)

    def join(self, shares: list[torch.Tensor]) -> torch.Tensor:
        """The whole, from the shares of all ranks; the mirror of `of`."""
        pieces = [share.chunk(self.blocks, self.dim) for share in shares]
        return torch.cat([piece for block in zip(*pieces, strict=True) for piece in block], self.dim)
