"""Sharding strategies for Lightning's Trainer; importing this registers their names (`Trainer(strategy="zero3")`).

Names are imported when first used (PEP 562): the engine is used without Lightning too, which takes a second to import.
"""

from typing import TYPE_CHECKING

from shardlight.strategies.lazy_names import serve
from shardlight.strategies.registration import register_once_lightning_is_there

if TYPE_CHECKING:
    from shardlight.strategies.base import ShardedStrategy
    from shardlight.strategies.checkpoint.modules import load_module, read_state_dict
    from shardlight.strategies.checkpoint.weights import LoadReport, load_weights
    from shardlight.strategies.ema import ShardedEMA
    from shardlight.strategies.engine.deferred.tensors import deferred_init, materialise
    from shardlight.strategies.engine.offload import Offload
    from shardlight.strategies.mesh import MeshStrategy
    from shardlight.strategies.options import EngineOptions
    from shardlight.strategies.pipeline import Pipeline
    from shardlight.strategies.precision import MixedFP16
    from shardlight.strategies.tensor import TensorParallel
    from shardlight.strategies.zero import DDP, STRATEGIES, Infinity, Single, ZeRO1, ZeRO2, ZeRO3

__all__ = [
    "DDP",
    "STRATEGIES",
    "EngineOptions",
    "Infinity",
    "LoadReport",
    "MeshStrategy",
    "MixedFP16",
    "Offload",
    "Pipeline",
    "ShardedEMA",
    "ShardedStrategy",
    "Single",
    "TensorParallel",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "deferred_init",
    "load_module",
    "load_weights",
    "materialise",
    "read_state_dict",
]

_HOMES = {
    "DDP": "zero",
    "STRATEGIES": "zero",
    "EngineOptions": "options",
    "Infinity": "zero",
    "LoadReport": "checkpoint.weights",
    "MeshStrategy": "mesh",
    "MixedFP16": "precision",
    "Offload": "engine.offload",
    "Pipeline": "pipeline",
    "ShardedEMA": "ema",
    "ShardedStrategy": "base",
    "Single": "zero",
    "TensorParallel": "tensor",
    "ZeRO1": "zero",
    "ZeRO2": "zero",
    "ZeRO3": "zero",
    "deferred_init": "engine.deferred.tensors",
    "load_module": "checkpoint.modules",
    "load_weights": "checkpoint.weights",
    "materialise": "engine.deferred.tensors",
    "read_state_dict": "checkpoint.modules",
}


__getattr__ = serve(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__


register_once_lightning_is_there()
