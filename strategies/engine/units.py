"""All units of a model and where each parameter lies: what the parts of the engine share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.flat_weights import BufferDtypes
from shardlight.strategies.engine.groups import Ranks
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.partition import UnitSpec, find_units, set_shared_apart, set_small_apart
from shardlight.strategies.engine.plan import Reduce, StatePlan
from shardlight.strategies.engine.released import Owner
from shardlight.strategies.engine.tiers import Tiers
from shardlight.strategies.engine.unit import Unit
from torch import nn

Kind = tuple[torch.dtype, torch.dtype | None, bool]
"""Of the parameters of one buffer: their dtype, that of their 16-bit copies, and whether they are trainable."""


def kinds_of(spec: UnitSpec, compute: Mapping[nn.Parameter, torch.dtype]) -> dict[Kind, list[tuple[str, nn.Parameter]]]:
    """Returns what each buffer of a unit has, in order.

    Args:
        compute: see DtypePolicy.compute_dtypes.
    """
    kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in spec.params:
        kind = (parameter.dtype, compute.get(parameter), parameter.requires_grad)
        kinds.setdefault(kind, []).append((name, parameter))
    return kinds


class UnitTable:
    """The units, buffers and parameters of one model, in one order that is the same on every rank."""

    def __init__(
        self,
        model: nn.Module,
        plan: StatePlan,
        reduce: Reduce,
        unit_classes: Sequence[str],
        ranks: Ranks,
        owner: Owner,
        dtypes: DtypePolicy,
        keep_small: int = 0,
        tiers: Tiers | None = None,
        part: ModelPart = WHOLE_MODEL,
    ) -> None:
        self.tiers = tiers
        self.plan = plan
        self._dtypes = dtypes
        self._part = part
        self._compute = dtypes.compute_dtypes(model)
        self.reduce: Reduce = reduce
        self.ranks = ranks
        self.collectives = ranks.world
        specs = find_units(model, unit_classes, part.blocks)
        specs = set_small_apart(specs, keep_small) if keep_small else specs
        self.specs: list[UnitSpec] = set_shared_apart(specs, part.shared, model) if part.shared else specs
        self.units: list[Unit] = [self._make_unit(i, spec, owner) for i, spec in enumerate(self.specs)]
        self.buffers: list[FlatBuffer] = [b for u in self.units for b in u.buffers]
        self.parameters: list[nn.Parameter] = [p for b in self.buffers for p in b.params]
        self.names: list[str] = [s.name for b in self.buffers for s in b.layout.slots]
        self.number: dict[nn.Parameter, int] = {p: i for i, p in enumerate(self.parameters)}
        self.number_of_id: dict[int, int] = {id(p): i for i, p in enumerate(self.parameters)}
        """The same without a tensor's own hash, which is a Python function."""
        self.places: list[tuple[Unit, FlatBuffer, int]] = [
            (u, b, slot) for u in self.units for b in u.buffers for slot in range(len(b.params))
        ]
        """By number; see `place`."""
        first = 0
        for buffer in self.buffers:
            buffer.numbers = range(first, first + len(buffer.params))
            first += len(buffer.params)
        self.place: dict[nn.Parameter, tuple[Unit, FlatBuffer, int]] = {
            p: (u, b, slot) for u in self.units for b in u.buffers for slot, p in enumerate(b.params)
        }

    def _make_unit(self, index: int, spec: UnitSpec, owner: Owner) -> Unit:
        # The other stages' masters could be asked for at any time, and ranks of different stages agree on nothing then.
        joint = spec.stages is not None
        kinds = kinds_of(spec, {} if joint and self._dtypes.mixed else self._compute)
        reduce: Reduce = "window" if joint else self.reduce
        ranks = self.ranks if spec.stages is None else self.ranks.joint[spec.stages]
        buffers = []
        plan = replace(self.plan, shard_parameters=self.plan.shard_parameters and not spec.whole)
        for (_, compute, _), params in kinds.items():
            dtypes = BufferDtypes(
                compute=compute, mixed=self._dtypes.mixed, reduce=self._dtypes.reduce, guarded=self._dtypes.guarded
            )
            tiers = None if joint else self.tiers
            # What others account for comes first, so that norms can leave it out by chunks.
            params.sort(key=lambda named: self._part.accounts_for(named[0]))
            buffers.append(FlatBuffer(spec.name, params, plan, reduce, ranks, owner, dtypes, tiers, self._part))
        unit = Unit(index, spec.name, spec.keep, buffers)
        unit.stages = spec.stages
        unit.several = len(spec.roots) > 1
        if unit.sharded:
            # At once: a model that was built deferred is never whole on any rank.
            unit.release()
        return unit

    def refresh(self) -> None:
        """Takes note of which parameters are trainable now."""
        for unit in self.units:
            unit.refresh()
