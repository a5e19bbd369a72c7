"""A model and its optimizers as the shapes that an estimate is made from. Nothing is allocated."""

from collections.abc import Sequence

import torch
from shardlight.strategies.engine.deferred.tensors import home_of
from shardlight.strategies.engine.dtypes import DtypePolicy, master_dtype
from shardlight.strategies.engine.estimate import BufferShape, ParameterShape, UnitShape
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.partition import find_units, set_shared_apart, set_small_apart
from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.engine.state_widths import moments_of
from shardlight.strategies.engine.transforms.compile import unwrap_compiled
from shardlight.strategies.engine.units import kinds_of
from torch import nn
from torch.optim import Optimizer


def shapes_of(
    model: nn.Module,
    plan: StatePlan,
    optimizers: Sequence[Optimizer],
    *,
    unit_classes: Sequence[str] = (),
    dtypes: DtypePolicy,
    keep_small: int = 0,
    moments: torch.dtype | None = None,
    part: ModelPart = WHOLE_MODEL,
) -> tuple[UnitShape, ...]:
    """Returns the units that an engine with these arguments would make.

    Args:
        model: with full parameters, or built without memory.
        optimizers: of its parameters.
        moments: what the moments of fp32 parameters are kept in; None: their own dtype.
        part: which part of the whole model it is.
    """
    wrap_again = unwrap_compiled(model)
    try:
        compute = dtypes.under(plan).compute_dtypes(model)
        specs = find_units(model, unit_classes, part.blocks)
        specs = set_small_apart(specs, keep_small) if keep_small else specs
        specs = set_shared_apart(specs, part.shared, model) if part.shared else specs
        kept = _Kept(optimizers, moments)
        units = []
        for spec in specs:
            buffers = []
            for (own, narrow, trainable), params in kinds_of(spec, compute).items():
                home = master_dtype(own, narrow)
                shapes = (
                    ParameterShape(numel=p.numel(), trainable=trainable, moments=kept.of(p, home) if trainable else {})
                    for _, p in params
                )
                buffers.append(
                    BufferShape(
                        parameters=tuple(shapes),
                        home_width=home.itemsize,
                        width=(narrow or own).itemsize,
                        whole=spec.whole,
                    )
                )
            shared_by = len(spec.stages or (0,))
            units.append(UnitShape(name=spec.name, buffers=tuple(buffers), keep=spec.keep, stages=shared_by))
        return tuple(units)
    finally:
        wrap_again()


class _Kept:
    """What optimizers keep of parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], moments: torch.dtype | None) -> None:
        self._groups = {
            id(p): (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._moments = moments
        self._known: dict[tuple[int, int, int, torch.dtype], dict[str, int]] = {}

    def of(self, parameter: nn.Parameter, home: torch.dtype) -> dict[str, int]:
        """Returns bytes per element by name; nothing where nothing is known."""
        if id(parameter) not in self._groups:
            return {}
        optimizer, number = self._groups[id(parameter)]
        place = id(optimizer), number, parameter.dim(), home
        if place not in self._known:
            group = optimizer.param_groups[number]
            found = moments_of(optimizer, group, parameter.dim(), home, home_of(parameter)) or {}
            if self._moments is not None and home == torch.float32:
                found = {name: min(width, self._moments.itemsize) for name, width in found.items()}
            self._known[place] = found
        return self._known[place]
