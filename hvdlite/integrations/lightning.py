"""hvdlite for ``lightning.pytorch``::

trainer = lightning.pytorch.Trainer(strategy=HvdliteStrategy(), accelerator="cpu")

started with hvdliterun. For the package ``pytorch_lightning`` see `hvdlite.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry

from hvdlite.integrations.lightning_strategy import Environment, Strategy

__all__ = ["HvdliteEnvironment", "HvdliteStrategy"]


class HvdliteEnvironment(Environment, ClusterEnvironment):
    __doc__ = Environment.__doc__


class HvdliteStrategy(Strategy, ParallelStrategy):
    __doc__ = Strategy.__doc__
    environment = HvdliteEnvironment


if HvdliteStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(HvdliteStrategy.strategy_name, HvdliteStrategy, "ranks of hvdlite, averaged gradients")
