"""hvdlite for ``pytorch_lightning``::

trainer = pytorch_lightning.Trainer(strategy=HvdliteStrategy(), accelerator="cpu")

started with hvdliterun. For the package ``lightning`` see `hvdlite.integrations.lightning`.
"""

from __future__ import annotations

from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry

from hvdlite.integrations.lightning_strategy import Environment, Strategy

__all__ = ["HvdliteEnvironment", "HvdliteStrategy"]


class HvdliteEnvironment(Environment, ClusterEnvironment):
    __doc__ = Environment.__doc__


class HvdliteStrategy(Strategy, ParallelStrategy):
    __doc__ = Strategy.__doc__
    environment = HvdliteEnvironment


if HvdliteStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(HvdliteStrategy.strategy_name, HvdliteStrategy, "ranks of hvdlite, averaged gradients")
