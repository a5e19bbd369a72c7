"""Sharding strategies for Lightning's Trainer; importing this registers their names (`Trainer(strategy="zero3")`)."""

from lightning.pytorch.strategies import StrategyRegistry
from shardlight.strategies.base import ShardedStrategy
from shardlight.strategies.checkpoint.weights import LoadReport, load_weights
from shardlight.strategies.ema import ShardedEMA
from shardlight.strategies.engine.deferred.tensors import deferred_init, materialise
from shardlight.strategies.options import EngineOptions
from shardlight.strategies.precision import MixedFP16
from shardlight.strategies.zero import DDP, Single, ZeRO1, ZeRO2, ZeRO3

STRATEGIES: dict[str, type[ShardedStrategy]] = {s.plan.name: s for s in (Single, DDP, ZeRO1, ZeRO2, ZeRO3)}

for _name, _strategy in STRATEGIES.items():
    StrategyRegistry.register(_name, _strategy, description=(_strategy.__doc__ or "").strip(), override=True)

__all__ = [
    "DDP",
    "STRATEGIES",
    "EngineOptions",
    "LoadReport",
    "MixedFP16",
    "ShardedEMA",
    "ShardedStrategy",
    "Single",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "deferred_init",
    "load_weights",
    "materialise",
]
