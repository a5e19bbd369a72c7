"""What cannot work under a strategy is refused before training, by name and with what to use instead."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from shardlight.strategies.errors import StrategyError

_CALLBACKS: dict[type[pl.Callback], str] = {
    WeightAveraging: "copies the whole model, and writes to weights that may be elsewhere. Use "
    "shardlight.strategies.ShardedEMA, which averages each rank's part",
    StochasticWeightAveraging: "copies the whole model, and writes to weights that may be elsewhere. Use "
    "shardlight.strategies.ShardedEMA, an average over each rank's part, with a schedule whose rate stays constant",
}


def refuse_callbacks(trainer: pl.Trainer, strategy: str) -> None:
    """Raises: StrategyError: names all callbacks of the Trainer that cannot work."""
    faults = []
    for callback in trainer.callbacks:
        for kind, why in _CALLBACKS.items():
            if isinstance(callback, kind):
                faults.append(f"the callback {type(callback).__name__} does not work under {strategy}: it {why}.")
    if faults:
        raise StrategyError("\n".join(faults))
