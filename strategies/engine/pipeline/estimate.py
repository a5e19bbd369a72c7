"""What the parts of a model cost, before anything has run: by the sizes of its matrices."""

from shardlight.strategies.engine.pipeline.chain import Chain
from shardlight.strategies.engine.pipeline.costs import ModelCosts, PartCosts
from torch import nn


def estimated_costs(module: nn.Module, chain: Chain) -> ModelCosts:
    """Returns what blocks, embedding and head cost relative to each other, by their matrices: 2 operations per element.

    An embedding is a lookup and costs nothing; a head that is tied to it does.
    """
    inside = {id(m) for block in chain.blocks for m in block.modules()}
    matrices = {
        id(m): sum(p.numel() for p in m.parameters(recurse=False) if p.dim() > 1)
        for m in module.modules()
        if not isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    blocks = [float(sum(matrices.get(id(m), 0) for m in block.modules())) for block in chain.blocks]
    order = [id(m) for m in module.modules()]
    first = min(order.index(id(block)) for block in chain.blocks)
    outside = [(order.index(key), numel) for key, numel in matrices.items() if key not in inside]
    before = float(sum(numel for at, numel in outside if at < first))
    after = float(sum(numel for at, numel in outside if at > first))
    if not any(blocks):
        blocks = [1.0] * len(blocks)

    def part(cost: float) -> PartCosts:
        return PartCosts(forward=cost, backward_input=cost, backward_weight=cost, activation_bytes=cost)

    return ModelCosts(blocks=tuple(map(part, blocks)), before=part(before), after=part(after))
