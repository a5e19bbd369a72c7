"""Final gradients on this rank: their norm, clipping, and whether they are finite; alike on all ranks."""

from collections.abc import Collection, Iterator
from math import isfinite

import torch
from shardlight.ops.sums import all_true, real_view
from shardlight.strategies.engine import norms
from shardlight.strategies.engine.agreement import Agreement
from shardlight.strategies.engine.disk_tensor import in_memory
from shardlight.strategies.engine.gradients import Gradients
from shardlight.strategies.engine.optimizer import LocalParameters
from shardlight.strategies.engine.sharded_gradient import ShardedGradient
from shardlight.strategies.engine.units import UnitTable
from shardlight.strategies.engine.window import Window
from torch import Tensor
from torch.optim import Optimizer


class FinalGradients:
    """What can be asked of, and done to, the gradients of a closed window."""

    def __init__(self, table: UnitTable, local: LocalParameters, gradients: Gradients, agreement: Agreement) -> None:
        self._table = table
        self._local = local
        self._gradients = gradients
        self._agreement = agreement

    @property
    def _window(self) -> Window:
        return self._gradients.window

    def norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of all final gradients (of the optimizer's parameters), 0-dim fp64, equal on all ranks.

        The norm is taken once as long as the gradients stay as they are: logging it and clipping by it costs one.
        """
        changed = self._gradients.adopt()
        wanted = None if optimizer is None else self._local.numbers_of(optimizer)
        used = tuple(u and (wanted is None or n in wanted) for n, u in enumerate(self._window.used))
        key = (norm_type, used, self._gradients.versions())
        if changed:
            # On every rank: one whose shard is not concerned sees no new version.
            self._window.norms.clear()
        if key not in self._window.norms:
            if self._table.plan.shard_optimizer:
                self._agreement.meet("gradient norm")
            with torch.no_grad():
                self._window.norms[key] = norms.global_norm(self._table.buffers, used, norm_type, self._table.ranks)
        return self._window.norms[key]

    def clip(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`; returns the norm before. Collective."""
        self._gradients.close_window()
        total = self.norm(optimizer, norm_type)
        found = float(total)
        factor = max_norm / (found + 1e-6)
        if not factor >= 1.0:
            with torch.no_grad():
                self._clip(optimizer, factor)
            self._window.norms.clear()  # on every rank: one that owns none of these gradients sees no new version
        if isfinite(found):
            self._window.finite = self._local.numbers_of(optimizer), self._gradients.versions()
        return total

    def _clip(self, optimizer: Optimizer, factor: float) -> None:
        numbers = self._local.numbers_of(optimizer)
        later = set()
        if self._table.plan.shard_optimizer:
            for buffer in self._table.buffers:
                mine = [n for n in buffer.numbers if self._window.used[n]]
                if numbers.issuperset(mine) and buffer.clip(factor):
                    later.update(mine)
        for gradient in self._local_gradients(optimizer, later):
            gradient.mul_(factor)

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamps every element of the gradients to [-limit, limit]."""
        self._gradients.close_window()
        self._gradients.adopt()
        with torch.no_grad():
            for gradient in self._local_gradients(optimizer):
                gradient.clamp_(-limit, limit)
        self._window.norms.clear()

    def _local_gradients(self, optimizer: Optimizer, without: Collection[int] = ()) -> Iterator[Tensor]:
        """Yields the optimizer's final gradients on this rank, and full ones that hooks hold.

        Args:
            without: numbers of parameters whose part is left out.
        """
        numbers = self._local.numbers_of(optimizer)
        for number in sorted(numbers):
            if self._window.used[number]:
                parameter = self._table.parameters[number]
                gradient = None if number in without else self._local.gradient(number)
                if gradient is not None:
                    yield gradient
                if self._table.plan.shard_optimizer:
                    with torch._C.DisableTorchFunctionSubclass():
                        full = parameter.grad
                    if full is not None and not isinstance(full, ShardedGradient):
                        # A hook holds the full gradient, which is taken in again before the step.
                        yield full

    def not_finite(self, numbers: frozenset[int]) -> list[str]:
        """Returns the names of parameters whose final gradient is inf or NaN on some rank; the same list on all."""
        used, known = self._window.used, self._window.finite
        finite = known is not None and numbers <= known[0] and known[1] == self._gradients.versions()
        if not finite:
            held = [b for b in self._table.buffers if any(used[b.numbers.start : b.numbers.stop])]
            for buffer in held:
                buffer.settle()
            flats = [b.grad if self._table.plan.shard_optimizer else b.full_grad for b in held]
            ends = [torch.stack(real_view(in_memory(f)).aminmax()) for f in flats if f is not None and f.numel()]
            finite = all_true([torch.isfinite(e).all() for e in ends])
        self._agreement.meet("finite gradients")
        ranks = self._table.ranks.everyone
        row = torch.tensor([int(finite)], dtype=torch.int64, device=ranks.device)
        if ranks.gather_small(row, "finite gradients").all():
            return []
        mine = []
        for number in sorted(numbers):
            gradient = self._local.gradient(number)
            if self._window.used[number] and gradient is not None and not torch.isfinite(gradient).all():
                mine.append(self._table.names[number])
        everyone = ranks.gather_objects(mine, "finite gradients")
        return list(dict.fromkeys(name for names in everyone for name in names))
