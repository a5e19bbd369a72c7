"""This package's strategies without Lightning: the engine's own interface in a bare loop."""

import functools
import math
from typing import Any

import torch.distributed as dist
from shardlight.framework.bench.contenders import loop
from shardlight.framework.bench.contenders.gpt import fixed_gpt, loss_of, optimizer_of
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS, StatePlan
from torch import Tensor
from torch.optim import Optimizer


def count_so_far(engine: Engine) -> dict[str, float]:
    """Returns the bytes that this rank has sent in collectives of the engine, and their number."""
    collectives = engine.collectives
    return {"sent_bytes": collectives.bytes_sent, "engine_collectives": collectives.calls.total()}


def state_of(engine: Engine, optimizer: Optimizer) -> dict[str, float]:
    """Returns the live bytes of model state, and what the ZeRO table says of them and of the bytes sent per step."""
    plan, world_size = engine.plan, engine.collectives.world_size
    numel = sum(math.prod(p.shape) for p in engine.table.parameters)
    elements = plan.wire_elements(numel, world_size, 1, engine.table.reduce)
    table = {"table_state_bytes": plan.state_bytes(numel, world_size), "table_sent_bytes": 4 * elements}
    return {"state_bytes": engine.state_bytes([optimizer]), **table}


class OurStrategy:
    """A model under the engine.

    Args:
        size: of the model.
        plan: the row of the ZeRO table.
    """

    def __init__(self, size: Size, plan: StatePlan) -> None:
        self.model = fixed_gpt(size)
        self.optimizer = optimizer_of(self.model)
        self.engine = Engine(self.model, plan, dist.group.WORLD)
        self.engine.take_optimizer(self.optimizer)

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes an optimizer step; returns the rows' mean loss."""
        with self.engine.forward():
            loss = loss_of(self.model, tokens_BT, labels_BT)
        self.engine.backward(loss)
        self.engine.step(self.optimizer)
        return loss.item()

    def counters(self) -> dict[str, float]:
        """See count_so_far."""
        return count_so_far(self.engine)

    def gauges(self) -> dict[str, float]:
        """See state_of."""
        return state_of(self.engine, self.optimizer)


BUILDERS: loop.Builders = {
    f"shardlight-{name}": functools.partial(OurStrategy, plan=PLANS[name])
    for name in ("ddp", "zero1", "zero2", "zero3")
}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run."""
    loop.run(job, turns, BUILDERS)
