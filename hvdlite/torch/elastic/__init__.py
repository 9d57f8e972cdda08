"""hvd.elastic: training that goes back to its last commit when a collective fails, and goes on."""

from __future__ import annotations

from hvdlite.torch.elastic.run import run
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
