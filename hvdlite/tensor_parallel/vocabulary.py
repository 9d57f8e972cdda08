"""What is split by the words of a vocabulary: the embedding, and the cross-entropy of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hvdlite.tensor_parallel.carrier import Carrier, Rows
from hvdlite.tensor_parallel.moves import objection
from hvdlite.tensor_parallel.part import Part
from hvdlite.tensor_parallel.regions import reduce_shares
from hvdlite.tensor_parallel.split_module import SplitModule
from hvdlite.tensor_parallel.team import Team
from hvdlite.torch.eager import eager


class VocabularyParallelEmbedding(SplitModule):
    """`torch.nn.Embedding` of which each rank holds an equal share of the rows.

    Initial weights are parts of those that `torch.nn.Embedding` would have, see `ColumnParallelLinear`.

    Args:
        num_embeddings: of the whole layer.
        embedding_dim: of each row.
        team: who holds the other parts.
        sequence_parallel: return this rank's rows of the result; else the whole on every rank.
        device, dtype: of the parameter.

    Raises:
        ValueError: the rows do not divide among the ranks; add rows that no word uses.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        team: Team,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(team, {"weight": Part(0)})
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.sequence_parallel = sequence_parallel
        self.weight: nn.Parameter
        self.take_part_of(nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype))

    @classmethod
    def split(
        cls, embedding: nn.Embedding, team: Team, *, sequence_parallel: bool = False
    ) -> VocabularyParallelEmbedding:
        """This rank's part of ``embedding``, which has to be equal on every rank.

        Raises:
            ValueError: it has an option that this layer lacks.
        """
        if (
            embedding.padding_idx is not None
            or embedding.max_norm is not None
            or embedding.scale_grad_by_freq
            or embedding.sparse
        ):
            raise ValueError(
                f"{embedding} cannot be split: padding_idx, max_norm, scale_grad_by_freq and sparse are not supported"
            )
        made = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            team,
            sequence_parallel=sequence_parallel,
            device="meta",
        )
        made.take_part_of(embedding)
        return made

    @eager
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Look up ``words``, (rows, ...) integers, equal on every rank.

        Returns:
            (rows, ..., embedding_dim), or this rank's rows of it.

        Raises:
            UsageError: a word is not of the vocabulary, or the rows do not divide among the ranks; on every rank.
            MismatchError, CollectiveError: as `all_gather_matmul`.
        """
        team = self.team
        why = _not_words("embedding", words, self.num_embeddings)
        if not why and self.sequence_parallel and words.shape[0] % team.size:
            why = f"embedding: the {words.shape[0]} rows of words do not divide among {team.size} ranks"
        if why:
            team.meeting.refuse(why)
        place, is_elsewhere = _places(words, len(self.weight), team.rank)
        own = functional.embedding(place, self.weight).masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return reduce_shares(own, self.team, scatters=self.sequence_parallel)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, sequence_parallel={self.sequence_parallel}, "
            f"ranks={self.team.process_set.ranks}"
        )


@eager
def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, team: Team, *, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits of which each rank has an equal share of the words; differentiable.

    Ranks exchange three numbers per row.

    Args:
        logits: (..., words / size), of the same shape and dtype on every rank.
        targets: (...) integers, equal on every rank.
        ignore_index: a target that does not count.
        reduction: "mean", "sum" or "none".

    Returns:
        The loss, equal on every rank, in fp32 where the logits are of 16 bits: a number, or (...) for "none".

    Raises:
        ValueError: ``reduction`` is none of these.
        UsageError: shapes do not fit, or a target is not of the vocabulary; on every rank.
        MismatchError: the targets differ between ranks, among others; on every rank.
        CollectiveError: as `all_gather_matmul`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; pass 'mean', 'sum' or 'none'")
    name = "cross_entropy"
    why = objection(name, logits)
    if not why and logits.shape[:-1] != targets.shape:
        shapes = f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}"
        why = f"{name}: {shapes}; pass (..., words) and (...)"
    is_counted = targets != ignore_index
    why = why or _not_words(name, targets[is_counted], logits.shape[-1] * team.size)
    if why:
        team.meeting.refuse(why)
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), team.carrier_for(logits)
    )
    losses = losses.view(targets.shape).masked_fill(~is_counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / is_counted.sum()


class _CrossEntropy(torch.autograd.Function):
    """(rows, words of this rank), (rows,) to (rows,). Of a target that no rank has, the loss means nothing."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, carrier: Carrier) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        place, is_elsewhere = _places(targets, logits.shape[1], carrier.rank)
        highest = wide.amax(1)
        # Where all of this rank's logits are -inf, so is the highest, and nothing has to be taken off.
        total = (wide - highest.masked_fill(highest.isinf(), 0).unsqueeze(1)).exp().sum(1)
        at_target = wide.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(is_elsewhere, 0)
        own = torch.stack([highest, total, at_target])
        detail = f"with targets that add up to {targets.sum().item()}"
        everybody = carrier.gather(Rows.of("cross_entropy", detail, own), own).view(carrier.size, *own.shape)
        highests, totals, at_targets = everybody.unbind(1)
        shift = highests.amax(0)
        total = (totals * (highests - shift).exp()).sum(0)
        ctx.save_for_backward((wide - shift.unsqueeze(1)).exp() / total.unsqueeze(1), place, is_elsewhere)
        ctx.dtype = logits.dtype
        return total.log() + shift - at_targets.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, place, is_elsewhere = ctx.saved_tensors
        for_logits = softmax * grad.unsqueeze(1)
        at_target = grad.masked_fill(is_elsewhere, 0)
        for_logits.scatter_add_(1, place.unsqueeze(1), -at_target.unsqueeze(1))
        return for_logits.to(ctx.dtype), None, None


def _places(words: torch.Tensor, share: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where ``words`` are in this rank's share of the vocabulary, and which are not: those have place 0."""
    place = words.long() - rank * share
    is_elsewhere = (place < 0) | (place >= share)
    return place.masked_fill(is_elsewhere, 0), is_elsewhere


def _not_words(name: str, words: torch.Tensor, count: int) -> str | None:
    """Why ``words`` are no numbers of a vocabulary of ``count`` words; None if they are."""
    if words.dtype not in (torch.int32, torch.int64):
        return f"{name}: words have dtype {words.dtype}; pass int64"
    if words.numel() and not 0 <= int(words.min()) <= int(words.max()) < count:
        return f"{name}: words from {int(words.min())} to {int(words.max())} are not of a vocabulary of {count}"
    return None
