"""Linear layers whose weight is split by outputs or by inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hvdlite.tensor_parallel.matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    replicated_matmul,
)
from hvdlite.tensor_parallel.part import Part
from hvdlite.tensor_parallel.regions import gather_columns, split_columns
from hvdlite.tensor_parallel.split_module import SplitModule
from hvdlite.tensor_parallel.team import Team


class _SplitLinear(SplitModule):
    """A `torch.nn.Linear` of which this rank holds ``parts``; what its two kinds have in common.

    Attributes:
        options: names of attributes that are shown beside its features.
    """

    options: tuple[str, ...]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        team: Team,
        bias: bool,
        parts: Mapping[str, Part],
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(team, parts)
        self.in_features = in_features
        self.out_features = out_features
        self.sequence_parallel = sequence_parallel
        self.register_parameter("bias", None)
        self.take_part_of(nn.Linear(in_features, out_features, bias, device, dtype))

    def extra_repr(self) -> str:
        features = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        options = ", ".join(f"{name}={getattr(self, name)}" for name in self.options)
        return f"{features}, {options}, ranks={self.team.process_set.ranks}"


class ColumnParallelLinear(_SplitLinear):
    """`torch.nn.Linear` of which each rank computes an equal share of the outputs.

    Initial weights are parts of those that `torch.nn.Linear` would have; ranks must have called `torch.manual_seed`
    with the same seed.

    Args:
        in_features: of the whole layer, as ``out_features``.
        team: who holds the other parts.
        bias: whether there is one.
        gather_output: return all outputs, (rows, ..., out_features), on every rank; else this rank's share.
        sequence_parallel: the input is this rank's rows, (rows / size, ..., in_features); else it is whole, and equal
            on every rank. Outputs are of all rows either way.
        blocks: the outputs are so many blocks, such as 3 for queries, keys and values; each rank has a share of each.
        device, dtype: of the parameters.

    Raises:
        ValueError: the outputs do not divide among the ranks.
    """

    options = ("gather_output", "sequence_parallel", "blocks")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        team: Team,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        blocks: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        parts = {"weight": Part(0, blocks), "bias": Part(0, blocks)}
        super().__init__(in_features, out_features, team, bias, parts, sequence_parallel, device, dtype)
        self.gather_output = gather_output
        self.blocks = blocks

    @classmethod
    def split(
        cls,
        linear: nn.Linear,
        team: Team,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        blocks: int = 1,
    ) -> ColumnParallelLinear:
        """This rank's part of ``linear``, which has to be equal on every rank."""
        made = cls(
            linear.in_features,
            linear.out_features,
            team,
            linear.bias is not None,
            gather_output=gather_output,
            sequence_parallel=sequence_parallel,
            blocks=blocks,
            device="meta",
        )
        made.take_part_of(linear)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        multiply = all_gather_matmul if self.sequence_parallel else replicated_matmul
        y = multiply(x, self.weight.t(), self.team, self.bias)
        return gather_columns(y, self.team, self.blocks) if self.gather_output else y


class RowParallelLinear(_SplitLinear):
    """`torch.nn.Linear` of which each rank computes with an equal share of the inputs; the ranks' products are added.

    Initial weights are as those of `ColumnParallelLinear`. The bias is whole, and added once.

    Args:
        in_features: of the whole layer, as ``out_features``.
        team: who holds the other parts.
        bias: whether there is one.
        input_is_parallel: the input is this rank's share, (rows, ..., in_features / size), as a `ColumnParallelLinear`
            returns it; else it is whole, and equal on every rank.
        sequence_parallel: return this rank's rows, (rows / size, ..., out_features); else all rows on every rank.
        device, dtype: of the parameters.

    Raises:
        ValueError: the inputs do not divide among the ranks.
    """

    options = ("input_is_parallel", "sequence_parallel")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        team: Team,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        parts = {"weight": Part(1)}
        super().__init__(in_features, out_features, team, bias, parts, sequence_parallel, device, dtype)
        self.input_is_parallel = input_is_parallel

    @classmethod
    def split(
        cls, linear: nn.Linear, team: Team, *, input_is_parallel: bool = True, sequence_parallel: bool = False
    ) -> RowParallelLinear:
        """This rank's part of ``linear``, which has to be equal on every rank."""
        made = cls(
            linear.in_features,
            linear.out_features,
            team,
            linear.bias is not None,
            input_is_parallel=input_is_parallel,
            sequence_parallel=sequence_parallel,
            device="meta",
        )
        made.take_part_of(linear)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x if self.input_is_parallel else split_columns(x, self.team)
        multiply = matmul_reduce_scatter if self.sequence_parallel else matmul_all_reduce
        return multiply(own, self.weight.t(), self.team, self.bias)
