"""Lightning's precision plugins under sharding: clipping over shards, master weights, and an agreed loss scale."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.window import StepResult
from shardlight.strategies.errors import CheckpointError, StrategyError
from shardlight.strategies.options import without_effect
from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from shardlight.strategies.base import ShardedStrategy

_AVAILABLE: dict[type[Precision], tuple[str, ...]] = {
    Precision: ("32-true",),
    DoublePrecision: ("64-true",),
    MixedPrecision: ("bf16-mixed", "16-mixed"),
    HalfPrecision: ("bf16-true",),
}
_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": torch.bfloat16}
_MAX_SCALE = 2.0**24


@dataclass
class LossScale:
    """A factor on the loss that keeps small gradients from becoming zero in fp16; equal on all ranks.

    A step with an inf or NaN gradient on any rank halves it; `growth_steps` good steps in a row double it (0: it never
    grows, nor shrinks).

    Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.2 (arXiv 1710.03740).
    """

    scale: float = 65536.0
    growth_steps: int = 2000
    good_steps: int = 0
    """Steps without an inf or NaN since the scale changed."""

    def update(self, result: StepResult) -> bool:
        """Takes note of a step; returns whether the scale was lowered, so that the next try may well succeed."""
        if not self.growth_steps or result is StepResult.NO_WEIGHT:
            return False
        if result is StepResult.NOT_FINITE:
            lowered = self.scale > 1.0
            self.scale, self.good_steps = max(1.0, self.scale / 2), 0
            return lowered
        self.good_steps += 1
        if self.good_steps >= self.growth_steps:
            self.scale, self.good_steps = min(_MAX_SCALE, self.scale * 2), 0
        return False


class ShardedPrecision(Precision):
    """Mixin put before the class of the plugin that the Trainer chose."""

    _strategy: "ShardedStrategy"
    loss_scale: LossScale | None = None
    """With fp16 only."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scales all gradients of the optimizer so that their global L2 norm is at most `clip_val`."""
        self._strategy.clip_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamps every element of the optimizer's gradients to [-clip_val, clip_val]."""
        self._strategy.engine.clip_value(optimizer, clip_val)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clips with fused optimizers too: gradients are unscaled before, whatever the optimizer could do itself."""
        Precision.clip_gradients(self, *args, **kwargs)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Under `bf16-true` with master weights: buffers only, since the engine keeps the parameters."""
        if not isinstance(self, HalfPrecision) or not self._strategy.options.master:
            return super().convert_module(module)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[name] = buffer.to(_DTYPES[self.precision])
        return module

    def dtype_policy(self) -> DtypePolicy:
        """Returns in which dtypes the engine keeps, computes and reduces."""
        options = self._strategy.options
        mixed = isinstance(self, MixedPrecision)
        half = isinstance(self, HalfPrecision) and options.master
        return DtypePolicy(
            compute=_DTYPES[self.precision] if mixed or half else None,
            mixed=mixed,
            reduce=None if options.reduce_dtype is None else getattr(torch, options.reduce_dtype),
            keep_fp32=options.keep_fp32,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scale, which a checkpoint keeps."""
        return {} if self.loss_scale is None else asdict(self.loss_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a saved loss scale up again. Raises: CheckpointError: the state is not one."""
        if self.loss_scale is not None and state_dict:
            if set(state_dict) != set(asdict(self.loss_scale)):
                raise CheckpointError(f"the state of the loss scale has the keys {sorted(state_dict)}.")
            self.loss_scale = LossScale(**{**state_dict, "growth_steps": self.loss_scale.growth_steps})


class MixedFP16(MixedPrecision):
    """fp16 under autocast with a dynamic loss scale, on any device: `Trainer(plugins=MixedFP16(), ...)`.

    `Trainer(precision="16-mixed")` is the same on CUDA, but on CPU Lightning makes bf16 of it before a strategy can see
    what was asked for. In a config file `trainer.precision: 16-mixed` is this plugin.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__("16-mixed", device, scaler=None)
        self.scaler = None


def sharded_precision(plugin: Precision, strategy: "ShardedStrategy") -> Precision:
    """Gives the Trainer's plugin the above.

    Raises: StrategyError: a precision that the sharding engine does not have.
    """
    kind = MixedPrecision if isinstance(plugin, MixedFP16) else type(plugin)
    if not isinstance(plugin, ShardedPrecision):
        if plugin.precision not in _AVAILABLE.get(kind, ()):
            names = ", ".join(repr(p) for precisions in _AVAILABLE.values() for p in precisions)
            raise StrategyError(
                f"trainer.precision={plugin.precision!r} is not available under {strategy.plan.name}: use one of "
                f"{names}."
            )
        plugin.__class__ = type(f"Sharded{kind.__name__}", (ShardedPrecision, kind), {})
    plugin._strategy = strategy
    if plugin.precision == "16-mixed":
        options = strategy.options
        plugin.scaler = None  # type: ignore[attr-defined]
        plugin.loss_scale = LossScale(options.loss_scale, options.loss_scale_growth_steps)  # type: ignore[attr-defined]
    for fault in without_effect(strategy.options, str(plugin.precision)).values():
        raise StrategyError(f"strategy {strategy.plan.name}: {fault}")
    return plugin
