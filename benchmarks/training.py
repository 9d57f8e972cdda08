"""A model that is trained in one of several ways: hvdlite's, its peers', and without communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from models import Task
from peers import PIECE_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

LR = 1e-3


class Way(ABC):
    """A copy of ``task``'s model and how it is trained.

    Attributes:
        is_reduced: whether ranks train one model.
    """

    label: str
    is_reduced = True
    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task, comm: MPI.Comm) -> None:
        torch.manual_seed(0)
        self.model = task.build()
        torch.manual_seed(1 + comm.rank)
        self._inputs, self._targets = task.batch()
        self._loss = task.loss
        self._comm = comm
        self._forward = self.prepare()

    @abstractmethod
    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Make ``optimizer``; return what maps inputs to outputs."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self._forward(self._inputs), self._targets).backward()
        self.reduce()
        self.optimizer.step()

    def reduce(self) -> None:
        """What the user does between backward() and step()."""

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LR)


class Alone(Way):
    label = "no communication"
    is_reduced = False

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.optimizer = self.sgd()
        return self.model


class Hvdlite(Way):
    label = "hvdlite"

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.optimizer = hvd.DistributedOptimizer(self.sgd(), named_parameters=self.model.named_parameters())
        return self.model


class Ddp(Way):
    label = "DDP"
    views = False

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        self.optimizer = self.sgd()
        return DistributedDataParallel(self.model, gradient_as_bucket_view=self.views)


class DdpViews(Ddp):
    label = "DDP, views"
    views = True


class Mpi(Way):
    """As one writes it by hand: an Allreduce per parameter after backward."""

    label = "MPI"

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from mpi4py import MPI

        self.optimizer = self.sgd()
        self._in_place = MPI.IN_PLACE
        return self.model

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            self.average(parameter.grad)

    def average(self, gradient: torch.Tensor) -> None:
        self._comm.Allreduce(self._in_place, gradient.numpy())
        gradient /= self._comm.size


class MpiPieces(Mpi):
    """The same in pieces that fit into the cache, each divided while it is still there."""

    label = "MPI, pieces"

    def average(self, gradient: torch.Tensor) -> None:
        whole = gradient.numpy().reshape(-1)
        step = PIECE_BYTES // whole.itemsize
        for start in range(0, whole.size, step):
            piece = whole[start : start + step]
            self._comm.Allreduce(self._in_place, piece)
            piece /= self._comm.size


class MpiFlat(Mpi):
    """One Allreduce of all gradients, in a buffer that they are copied to, and stay in until the next step."""

    label = "MPI, one buffer"

    def prepare(self) -> Callable[[torch.Tensor], torch.Tensor]:
        forward = super().prepare()
        self._flat = torch.empty(sum(parameter.numel() for parameter in self.model.parameters()))
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        parts = zip(self._flat.split(sizes), self.model.parameters(), strict=True)
        self._places = [part.view_as(parameter) for part, parameter in parts]
        return forward

    def reduce(self) -> None:
        parameters = list(self.model.parameters())
        torch.cat([parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None], out=self._flat)
        self.average(self._flat)
        for parameter, place in zip(parameters, self._places, strict=True):
            parameter.grad = place


DDPS: tuple[type[Way], ...] = (Ddp, DdpViews)
SIMPLE: tuple[type[Way], ...] = (Mpi, MpiPieces, MpiFlat)
