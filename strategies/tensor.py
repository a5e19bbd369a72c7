"""The tensor strategy: a model's matrices are cut over the ranks of a group; no model is rewritten."""

from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.model_parallel import ModelParallel


class TensorParallel(ModelParallel):
    """Attention by heads, MLPs by width, embeddings and heads by words: each rank computes a part of every layer.

    Source: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053).
    """

    plan = StatePlan("tensor", False, False, False, "window")
