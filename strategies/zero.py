"""The strategies of the ZeRO table as Lightning strategies: each is its row.

Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054).
"""

from shardlight.strategies.base import ShardedStrategy
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.layer_order import LayerOrder
from shardlight.strategies.mesh import MeshStrategy
from shardlight.strategies.pipeline import Pipeline
from shardlight.strategies.tensor import TensorParallel


class Single(ShardedStrategy):
    """One process; the reference that every other strategy equals."""

    plan = PLANS["single"]


class DDP(ShardedStrategy):
    """Every rank keeps everything; gradients are averaged over ranks."""

    plan = PLANS["ddp"]


class ZeRO1(ShardedStrategy):
    """Optimizer state is sharded over the ranks."""

    plan = PLANS["zero1"]


class ZeRO2(ShardedStrategy):
    """Optimizer state and gradients are sharded over the ranks."""

    plan = PLANS["zero2"]


class ZeRO3(LayerOrder):
    """Parameters, gradients and optimizer state are sharded; a unit's weights are gathered when it is used."""

    plan = PLANS["zero3"]


class Infinity(LayerOrder):
    """zero3 with state on disk: what does not fit into memory trains all the same, with the same numbers.

    Source: Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857).
    """

    plan = PLANS["infinity"]


STRATEGIES: dict[str, type[ShardedStrategy]] = {
    s.plan.name: s for s in (Single, DDP, ZeRO1, ZeRO2, ZeRO3, Infinity, Pipeline, TensorParallel, MeshStrategy)
}
"""By the name in a config file, and in `Trainer(strategy=...)`."""
