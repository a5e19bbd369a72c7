"""The options of every strategy of the ZeRO table: their one list, with what their values may be."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from shardlight.strategies.engine.plan import Reduce
from shardlight.strategies.errors import StrategyError


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every strategy of the ZeRO table."""

    reduce: Reduce | None = None
    """When gradients are reduced: `micro_batch` (less memory) or `window` (fewer bytes sent; keeps the full gradients
    over the window). Unset: `window` for single, ddp and zero1, `micro_batch` for zero2 and zero3."""

    units: tuple[str, ...] = ()
    """Class names of modules that are gathered and reduced as one unit each. Empty: the blocks of the model's repeated
    block lists."""

    recompute: Literal["no", "blocks"] = "no"
    """Whether the units' blocks keep only their inputs and run again in backward: less memory for activations, one more
    forward."""

    max_not_finite_steps: int = 10
    """Steps in a row that may be skipped because a gradient is inf or NaN; then training ends with an error."""

    timeout_s: float = 600.0
    """Seconds after which a collective, or the arrival of all ranks at the start, fails instead of waiting on."""


def make_options(kind: type[EngineOptions], strategy: str, given: dict[str, Any]) -> EngineOptions:
    """Makes the options of a strategy from keyword arguments.

    Raises: TypeError: an unknown keyword; StrategyError: an option's value is impossible.
    """
    options = kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})
    choices = {"reduce": (None, *get_args(Reduce)), "recompute": ("no", "blocks")}
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            names = " or ".join(repr(a) for a in allowed if a is not None)
            raise StrategyError(f"{name}={value!r} is not an option of {strategy}: use {names}.")
    if options.max_not_finite_steps < 1:
        raise StrategyError(f"max_not_finite_steps={options.max_not_finite_steps!r} must be at least 1.")
    if not options.timeout_s > 0:
        raise StrategyError(f"timeout_s={options.timeout_s!r} must be above 0 seconds.")
    for field in fields(options):
        if str(field.type).startswith("tuple") and isinstance(getattr(options, field.name), str):
            raise StrategyError(f"{field.name}={getattr(options, field.name)!r} must be a list of names.")
    return options
