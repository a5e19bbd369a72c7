"""Learning-rate schedules stand still while steps are skipped."""

from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from shardlight.strategies.base import ShardedStrategy

_strategies: "WeakKeyDictionary[LRScheduler, ReferenceType[ShardedStrategy]]" = WeakKeyDictionary()
"""Beside the schedulers, not in them: what is in a scheduler is in its state dict."""


class HeldSchedule(LRScheduler):
    """Mixin before a scheduler's own class: its step counts only when its optimizer made one."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps, unless the strategy skipped the last optimizer step."""
        strategy = _strategies[self]()
        if strategy is None or not strategy.skipped(self.optimizer):
            super().step(*args, **kwargs)


def hold_when_skipped(scheduler: LRScheduler, strategy: "ShardedStrategy") -> None:
    """Lets a scheduler that steps after each optimizer step stand still with the optimizer."""
    if not isinstance(scheduler, HeldSchedule):
        own = type(scheduler)
        scheduler.__class__ = type(f"Held{own.__name__}", (HeldSchedule, own), {})
    _strategies[scheduler] = ref(strategy)
