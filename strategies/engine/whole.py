"""Parameters that their optimizer needs whole, while it steps: see [Note: whole parameters], owners.py."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from shardlight.strategies.engine.owners import Move, assign, element_cost, holders, orthogonal_cost, rounds
from shardlight.strategies.engine.units import UnitTable
from shardlight.strategies.errors import StrategyError
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

MARK = "needs_whole_parameters"
"""A class of optimizers that has this attribute, and it is true, gets its parameters whole; a param group's own entry
of this name decides for that group."""
COST = "whole_cost"
"""A class may have a function of this name: from a parameter's shape to what its update costs, in any unit."""
ROUND_BYTES = 16 << 20
"""What all owners together receive at a time: a rank stages at most this much to send, and its share to receive."""
NOBODY = -1
"""Owns parameters without elements."""
_KNOWN_NAMES = frozenset({"adafactor", "lamb", "lars", "muon", "shampoo", "soap"})
"""Optimizers of other libraries, by the names of their classes. Whole parameters are right for any that treats one
parameter at a time, so that nothing is lost where a name is misleading."""


@cache
def _by_class(kind: type[Optimizer]) -> bool:
    said = getattr(kind, MARK, None)
    known = issubclass(kind, Adafactor | Muon) or any(c.__name__.lower() in _KNOWN_NAMES for c in kind.mro())
    return known if said is None else bool(said)


def needs_whole(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the optimizer has to see the parameters of one of its groups in one piece."""
    return bool(group.get(MARK, _by_class(type(optimizer))))


def cost_of(optimizer: Optimizer) -> Callable[[Sequence[int]], float]:
    """Returns what tells from a parameter's shape how much work the optimizer has with it."""
    muon = isinstance(optimizer, Muon) or type(optimizer).__name__.lower() == "muon"
    return getattr(type(optimizer), COST, orthogonal_cost if muon else element_cost)


class Owned:
    """Who owns which of one optimizer's parameters, and this rank's own as what the optimizer gets.

    A parameter keeps its owner for life; those of groups that are added later are shared out as they are met.
    """

    def __init__(self, optimizer: Optimizer, table: UnitTable) -> None:
        ranks = table.ranks.shard
        self._table = table
        self._rank: int = ranks.rank
        self._cost = cost_of(optimizer)
        self._name = type(optimizer).__name__
        self._loads: list[float] = [0] * ranks.world_size
        self.owners: dict[int, int] = {}
        """By number of a parameter, the rank in the shard group."""
        self.parts: dict[int, nn.Parameter | None] = {}
        """By id of a parameter: what this rank's optimizer gets; None where another rank owns it."""
        self.by_number: dict[int, nn.Parameter] = {}
        """This rank's parts. Between steps they are NaNs of their shape, which have no memory."""
        self.planned: tuple[tuple[int, ...], tuple[list[list[Move]], list[list[Move]]]] = (), ([], [])
        """For which parameters the rounds of moves were last made, and these rounds."""

    def add(self, numbers: frozenset[int]) -> None:
        """Shares out parameters that have no owner yet; equal on all ranks."""
        parameters, new = self._table.parameters, sorted(numbers - self.owners.keys())
        for number in new:
            if self._table.places[number][0].stages is not None:
                raise StrategyError(
                    f"{self._name} needs '{self._table.names[number]}' whole, which is on several stages (tied, or "
                    "named in everywhere). Give it to another optimizer group, untie it, or set zero to 0."
                )
        for number in [n for n in new if not parameters[n].numel()]:
            # There is nothing to update, and torch.optim.Adafactor fails on it.
            self.owners[number], self.parts[id(parameters[number])] = NOBODY, None
        new = [n for n in new if n not in self.owners]
        if not new:
            return
        slots = [(b.layout, slot) for _, b, slot in map(self._table.places.__getitem__, new)]
        held = [[0] * len(self._loads) for _ in new]
        for row, (layout, slot) in zip(held, slots, strict=True):
            for rank, start, stop in holders(layout, slot):
                row[rank] = stop - start
        costs = [self._cost(layout.slots[slot].shape) for layout, slot in slots]
        for number, cost, owner in zip(new, costs, assign(costs, held, self._loads), strict=True):
            self._loads[owner] += cost
            self.owners[number] = owner
            part = None
            if owner == self._rank:
                part = self.by_number[number] = nn.Parameter(self._nothing(number))
            self.parts[id(parameters[number])] = part

    def _nothing(self, number: int) -> Tensor:
        _, buffer, slot = self._table.places[number]
        nan = torch.full((), float("nan"), dtype=buffer.home_dtype, device=buffer.device)
        return nan.expand(buffer.layout.slots[slot].shape)

    def put_away(self) -> None:
        """Lets go of the values."""
        for number, part in self.by_number.items():
            part.grad = None
            part.data = self._nothing(number)


class WholeParameters:
    """Brings what optimizers need whole to the owners for a step, and the results back to the shards."""

    def __init__(self, table: UnitTable) -> None:
        self._table = table
        self._ranks = table.ranks.shard
        self._owned: WeakKeyDictionary[Optimizer, Owned] = WeakKeyDictionary()

    def of(self, optimizer: Optimizer | None) -> Owned | None:
        """Returns who owns what of the optimizer's parameters, as its groups are now; None where nothing is."""
        if optimizer is None or not self._table.plan.shard_optimizer:
            return None
        owned = self._owned.get(optimizer)
        if owned is None:
            if not any(needs_whole(optimizer, group) for group in optimizer.param_groups):
                return None
            owned = self._owned[optimizer] = Owned(optimizer, self._table)
        groups = [g["params"] for g in optimizer.param_groups if needs_whole(optimizer, g)]
        numbers = map(self._table.number_of_id.get, map(id, chain.from_iterable(groups)))
        owned.add(frozenset(numbers) - {None})
        return owned

    def put_away(self, optimizer: Optimizer) -> None:
        """Lets go of the whole values that the optimizer's parts have had while it stepped."""
        if optimizer in self._owned:
            self._owned[optimizer].put_away()

    def collect(self, owned: Owned, numbers: Sequence[int]) -> None:
        """Gives the owners' parts their values and final gradients. Collective.

        Args:
            numbers: of the parameters, which have an owner and a gradient; equal on all ranks.
        """
        gradients: dict[int, Tensor] = {}
        for number in numbers:
            if owned.owners[number] == self._ranks.rank:
                owned.by_number[number].data, gradients[number] = self._open(number)

        def here(move: Move) -> Tensor:
            whole = gradients[move.number] if move.what == "gradient" else owned.by_number[move.number].data
            return whole.view(-1)[move.start : move.stop]

        for moves in self._plan(owned, numbers)[0]:
            self._send(moves, self._held, here, "whole parameters to their owners")
        for number, gradient in gradients.items():
            owned.by_number[number].grad = gradient

    def spread(self, owned: Owned, numbers: Sequence[int]) -> None:
        """Writes the owners' new values into the shards. Collective. Args: numbers: as they were collected."""
        for number in numbers:
            if owned.owners[number] == self._ranks.rank:
                _, buffer, slot = self._table.places[number]
                mine, piece = buffer.piece_of_shard(slot, buffer.shard), buffer.pieces.get(slot)
                if mine is not None and piece is not None:
                    new = owned.by_number[number].data.view(-1)[piece.start : piece.stop]
                    if new.data_ptr() != mine.data_ptr():
                        mine.copy_(new)

        def here(move: Move) -> Tensor:
            return owned.by_number[move.number].data.view(-1)[move.start : move.stop]

        for moves in self._plan(owned, numbers)[1]:
            self._send(moves, here, self._held, "whole parameters back to their shards", back=True)

    def _open(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns a parameter's authoritative values and gradient in its shape, filled where this rank has them."""
        _, buffer, slot = self._table.places[number]
        place, piece = buffer.layout.slots[slot], buffer.pieces.get(slot)
        shard, grad = buffer.piece_of_shard(slot, buffer.shard), buffer.gradient_pieces().get(slot)
        if piece is not None and piece.stop - piece.start == place.stop - place.start:
            assert shard is not None and grad is not None
            return shard.view(place.shape), grad.view(place.shape)
        gradient = torch.empty(place.shape, dtype=buffer.home_dtype, device=buffer.device)
        weight = buffer.slice(slot, buffer.full) if self._has_all(number) else torch.empty_like(gradient)
        if piece is not None:
            assert shard is not None and grad is not None
            gradient.view(-1)[piece.start : piece.stop] = grad
            if not self._has_all(number):
                weight.view(-1)[piece.start : piece.stop] = shard
        return weight, gradient

    def _held(self, move: Move) -> Tensor:
        """Returns the elements of a move in this rank's shard."""
        _, buffer, slot = self._table.places[move.number]
        pieces = buffer.gradient_pieces()
        part = pieces[slot] if move.what == "gradient" else buffer.piece_of_shard(slot, buffer.shard)
        assert part is not None
        first = buffer.pieces[slot].start
        return part[move.start - first : move.stop - first]

    def _has_all(self, number: int) -> bool:
        """Whether every rank has all of the parameter's authoritative values, so that they need not be sent."""
        buffer = self._table.places[number][1]
        return not buffer.mastered and not buffer.plan.shard_parameters

    def _plan(self, owned: Owned, numbers: Sequence[int]) -> tuple[list[list[Move]], list[list[Move]]]:
        """Returns the rounds to the owners, and those back; the same as last time where the parameters are."""
        key = tuple(numbers)
        if owned.planned[0] != key:
            there, back = [], []
            for number in numbers:
                _, buffer, slot = self._table.places[number]
                owner, width = owned.owners[number], buffer.home_dtype.itemsize
                away = [part for part in holders(buffer.layout, slot) if part[0] != owner]
                there += [Move(number, "gradient", owner, *part, width) for part in away]
                weights = [Move(number, "weight", owner, *part, width) for part in away]
                back += weights
                if not self._has_all(number):
                    there += weights
            limit = max(16, ROUND_BYTES // self._ranks.world_size // 16 * 16)
            owned.planned = key, (rounds(there, limit), rounds(back, limit))
        return owned.planned[1]

    def _send(
        self,
        moves: list[Move],
        read: Callable[[Move], Tensor],
        write: Callable[[Move], Tensor],
        caller: str,
        back: bool = False,
    ) -> None:
        """Sends one round: what `read` gives on the one end of a move gets into `write` on the other."""
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks.world_size)]
        received: list[list[Tensor]] = [[] for _ in range(self._ranks.world_size)]
        for move in moves:
            source, target = (move.owner, move.holder) if back else (move.holder, move.owner)
            if source == self._ranks.rank:
                sent[target].append(read(move).view(torch.uint8))
            if target == self._ranks.rank:
                received[source].append(write(move).view(torch.uint8))
        pages, staged = self._ranks.pages, []

        def flat(parts: list[Tensor]) -> Tensor:
            if len(parts) < 2:
                return parts[0] if parts else torch.empty(0, dtype=torch.uint8, device=pages.device)
            staged.append(pages.take(sum(p.numel() for p in parts), torch.uint8))
            return staged[-1]

        out, into = [*map(flat, sent)], [*map(flat, received)]
        for parts, whole in zip(sent, out, strict=True):
            if len(parts) > 1:
                torch.cat(parts, out=whole)
        self._ranks.all_to_all(into, out, caller)
        for parts, whole in zip(received, into, strict=True):
            if len(parts) > 1:
                for part, arrived in zip(parts, whole.split([p.numel() for p in parts]), strict=True):
                    part.copy_(arrived)
        for whole in staged:
            pages.give(whole)
