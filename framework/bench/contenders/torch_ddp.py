"""PyTorch in one process, the reference, and its DistributedDataParallel (Li et al. 2020, arXiv 2006.15704)."""

from typing import Any

from shardlight.framework.bench.contenders import loop
from shardlight.framework.bench.contenders.gpt import fixed_gpt, loss_of, optimizer_of
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class PlainLoop:
    """The loop of any module that needs nothing but `backward` and `step`.

    Args:
        model: the module, wrapped already.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = optimizer_of(model)

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes an optimizer step; returns the rows' mean loss."""
        loss = loss_of(self.model, tokens_BT, labels_BT)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def counters(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Nothing."""
        return {}


def single(size: Size) -> PlainLoop:
    """Makes the reference."""
    return PlainLoop(fixed_gpt(size))


def ddp(size: Size) -> PlainLoop:
    """Makes the contender, with the defaults of DistributedDataParallel."""
    return PlainLoop(DistributedDataParallel(fixed_gpt(size)))


BUILDERS: loop.Builders = {"single": single, "ddp": ddp}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run."""
    loop.run(job, turns, BUILDERS)
