"""Lightning's precision plugins, with clipping that knows about shards."""

from typing import TYPE_CHECKING

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from shardlight.strategies.errors import StrategyError
from torch.optim import Optimizer

if TYPE_CHECKING:
    from shardlight.strategies.base import ShardedStrategy

_AVAILABLE: dict[type[Precision], str] = {
    Precision: "32-true",
    DoublePrecision: "64-true",
    MixedPrecision: "bf16-mixed",
    HalfPrecision: "bf16-true",
}


class ShardedPrecision(Precision):
    """Mixin put before the class of the plugin that the Trainer chose: clips over all shards, not over this rank's."""

    _strategy: "ShardedStrategy"

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scales all gradients of the optimizer so that their global L2 norm is at most `clip_val`."""
        self._strategy.clip_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamps every element of the optimizer's gradients to [-clip_val, clip_val]."""
        self._strategy.engine.clip_value(optimizer, clip_val)


def sharded_precision(plugin: Precision, strategy: "ShardedStrategy") -> Precision:
    """Gives the Trainer's plugin the clipping above.

    Raises: StrategyError: a precision that the sharding engine does not have.
    """
    kind = type(plugin)
    if not isinstance(plugin, ShardedPrecision):
        if kind not in _AVAILABLE or plugin.precision not in _AVAILABLE.values():
            raise StrategyError(
                f"trainer.precision={plugin.precision!r} is not available under {strategy.plan.name}: use one of "
                f"{', '.join(repr(p) for p in _AVAILABLE.values())}."
            )
        plugin.__class__ = type(f"Sharded{kind.__name__}", (ShardedPrecision, kind), {})
    plugin._strategy = strategy
    return plugin
