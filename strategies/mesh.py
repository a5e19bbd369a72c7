"""The mesh strategy: several ways to cut a model at once, each over an axis of the ranks."""

from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.pipeline import Pipeline


class MeshStrategy(Pipeline):
    """pipeline x tensor x data ranks: stages of a model, of which matrices are cut, each part under ZeRO 0 to 3.

    Source: Narayanan et al. 2021 (arXiv 2104.04473).
    """

    plan = StatePlan("mesh", False, False, False, "window")
