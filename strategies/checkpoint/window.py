"""An accumulation window in a checkpoint: what its micro-batches add up to so far, and on which ranks.

    gradient/NAME         sums over all ranks, each rank the ranges it owns
    rank/R/gradient/NAME  sums of rank R alone, or of the ranks from R on that share one set of shards
    final/NAME            means of an earlier window, which stay until they are set to None
    rank/R/buffer/NAME    a module buffer of rank R, until the end of the window makes it rank 0's

Read by as many ranks that add up alike, each gets its own back. Else each range is added up over all that was saved and
given to one rank, which owns it; losses and weights are counted once as well.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from shardlight.strategies.checkpoint.codec import decode, encode
from shardlight.strategies.checkpoint.parts import replica_share
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.weights import refuse_together
from shardlight.strategies.checkpoint.writer import RankWriter
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.slices import Slice
from shardlight.strategies.engine.window import Window
from shardlight.strategies.errors import CheckpointError, GradientError
from torch import Tensor

Ledger = Mapping[str, Any]


def add_window(engine: Engine, writer: RankWriter) -> Any:
    """Adds the gradients that a later step is to use to what this rank writes; returns their ledger as JSON data.

    None: there are none. The same on all ranks.

    Raises: CheckpointError: `p.grad` was set in a way that no step could use.
    """
    gradients, rank = engine.gradients, engine.collectives.rank
    try:
        found = gradients.unfinished()
    except GradientError as error:
        raise CheckpointError(str(error)) from None
    if found is None:
        return None
    window, shown = found
    alone = len(set(_groups(engine))) > 1
    sums = f"rank/{gradients.summed_from}/gradient/" if alone else "gradient/"
    for buffer in engine.buffers:
        final = [s for s, n in enumerate(buffer.numbers) if (window.used[n] if window.closed else n in window.carried)]
        for slot, part in buffer.final_gradients(final).items():
            share = replica_share(engine, buffer.params[slot], buffer.span(slot)[0], part)
            _add(writer, "final/", buffer, slot, *share)
        if not window.closed:
            for slot, part in buffer.unreduced().items():
                _add(writer, sums, buffer, slot, 0, part)
            for slot, part in buffer.reduced_sums().items():
                _add(writer, sums, buffer, slot, buffer.span(slot)[0], part)
    for name, value in engine.replicas.own().items():
        writer.add(f"rank/{rank}/buffer/{name}", value)
    state = {**window.state(engine.table.names), "shown": shown, "summed_from": gradients.summed_from}
    return encode(state, "window", {})


def _add(writer: RankWriter, prefix: str, buffer: FlatBuffer, slot: int, start: int, part: Tensor) -> None:
    place = buffer.layout.slots[slot]
    if part.numel():
        writer.add(prefix + place.name, part, Slice.whole(place.shape), start)


def _groups(engine: Engine) -> list[int]:
    """Returns by rank from which one on gradients are added up together before a window ends."""
    ranks = range(engine.collectives.world_size)
    size = engine.ranks.shard.world_size if engine.table.reduce == "micro_batch" else 1
    return [r - r % size for r in ranks]


def load_window(engine: Engine, reader: CheckpointReader, skip: Collection[str] = ()) -> None:
    """Goes on in the accumulation window of a checkpoint, or in none: what the engine has added up is dropped.

    Called once weights are in place. Collective.

    Args:
        skip: names of parameters and buffers that are not loaded, whose gradients begin anew.
    Raises: CheckpointError: on every rank: it does not fit the model, or something cannot be read.
    """
    engine.gradients.open_window()
    fault = ""
    if reader.content.get("window") is not None:
        if engine.ranks.model.world_size > 1:
            raise CheckpointError(
                f"{reader.path}: it was saved inside an accumulation window, whose gradients ranks that have parts of "
                "the model cannot take up. Go on from a checkpoint that was saved when the optimizer had stepped, or "
                "take its weights alone (init_from)."
            )
        try:
            with torch.no_grad():
                _Load(engine, reader, skip).restore()
        except CheckpointError as error:
            fault = str(error)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            fault = f"{reader.path}: the accumulation window that it holds does not fit this model ({error!r})."
        refuse_together(engine, fault)


class _Load:
    """What this rank takes of a saved window."""

    def __init__(self, engine: Engine, reader: CheckpointReader, skip: Collection[str]) -> None:
        self._engine = engine
        self._skip = skip
        self._reader = reader
        self._rank, self._world = engine.collectives.rank, engine.collectives.world_size
        self._ledgers: list[Ledger] = [_without(decode(ledger, {}), skip) for ledger in reader.content["window"]]
        saved, here = [int(ledger["summed_from"]) for ledger in self._ledgers], _groups(engine)
        self._same = saved == here
        """As many ranks, which add up alike."""
        self._alone = self._same and engine.table.reduce == "window" and self._world > 1
        prefixes = ["gradient/"] if len(set(saved)) == 1 else [f"rank/{r}/gradient/" for r in sorted(set(saved))]
        if self._same and len(prefixes) > 1:
            prefixes = [f"rank/{engine.gradients.summed_from}/gradient/"]
        elif not self._same and not engine.writes_pieces:
            prefixes = []
        self._prefixes: list[str] = prefixes
        """Whose sums this rank takes."""

    def restore(self) -> None:
        engine, names = self._engine, self._engine.table.names
        ledger = self._ledgers[self._rank] if self._same else _joined(self._ledgers, self._rank, self._world)
        every = {name for each in self._ledgers for name in each["arrived"]}
        if not self._same:
            ledger = {**ledger, "arrived": dict.fromkeys(sorted(every), 1)}
        elif self._alone:
            every = set(ledger["arrived"])
        # Of one rank alone the sums are the same whether they count as reduced or not.
        reduced = engine.table.reduce == "micro_batch" or ledger["closed"]
        ledger = {**ledger, "counted": ledger["arrived"] if reduced else {}}
        window = Window.restored(ledger, names)
        if reduced and not window.closed:
            window.anywhere = {n for n, name in enumerate(names) if name in every}
        engine.gradients.open_window(frozenset(window.carried))
        final = {n for n, used in enumerate(window.used) if used} | window.carried
        for buffer in engine.buffers:
            for slot, number in enumerate(buffer.numbers):
                if number in final:
                    span = buffer.span(slot) if buffer.plan.shard_optimizer else None
                    buffer.restore_final(slot, self._read(["final/"], buffer, slot, span))
            here = [s for s, n in enumerate(buffer.numbers) if names[n] in every]
            if here and not window.closed:
                self._restore_sums(buffer, here)
        if self._same:
            prefix = f"rank/{self._rank}/buffer/"
            own = [n for n in self._reader.names(prefix) if n not in self._skip]
            engine.replicas.restore({n: self._reader.read(prefix + n) for n in own})
        engine.gradients.restore(window, bool(self._ledgers[0]["shown"]))

    def _restore_sums(self, buffer: FlatBuffer, slots: Sequence[int]) -> None:
        if self._engine.table.reduce == "micro_batch":
            buffer.restore_sums({s: self._read(self._prefixes, buffer, s, buffer.span(s)) for s in slots})
            return
        for slot in slots:
            place = buffer.layout.slots[slot]
            if self._alone:
                whole = self._read(self._prefixes, buffer, slot, None)
            else:
                start, stop = buffer.span(slot)
                part = self._read(self._prefixes, buffer, slot, (start, stop))
                whole = part.new_zeros(place.stop - place.start)
                whole[start:stop] = part
            buffer.add_gradient(slot, whole.view(place.shape))

    def _read(self, prefixes: Sequence[str], buffer: FlatBuffer, slot: int, span: tuple[int, int] | None) -> Tensor:
        """Returns elements of a flattened gradient (None: all), added up over `prefixes`; zeros where there is none."""
        place = buffer.layout.slots[slot]
        start, stop = (0, place.stop - place.start) if span is None else span
        found: list[Tensor] = []
        for name in (prefix + place.name for prefix in prefixes):
            if start < stop and self._reader.has(name):
                there = self._reader.shape(name)
                if there != place.shape:
                    raise CheckpointError(
                        f"{self._reader.path}: '{name}' is {there} there and {place.shape} in the model."
                    )
                found.append(self._reader.read(name, start, stop).to(buffer.device))
        if len(found) < 2:
            return found[0] if found else torch.zeros(stop - start, dtype=buffer.dtype, device=buffer.device)
        total = found[0].to(torch.promote_types(found[0].dtype, buffer.home_dtype), copy=True)
        for part in found[1:]:
            total += part
        return total


def _without(ledger: Ledger, skip: Collection[str]) -> Ledger:
    by_name = {key: {n: count for n, count in ledger[key].items() if n not in skip} for key in ("arrived", "counted")}
    return {**ledger, **by_name, **{key: [n for n in ledger[key] if n not in skip] for key in ("carried", "used")}}


def _joined(ledgers: Sequence[Ledger], rank: int, world: int) -> dict[str, Any]:
    """Returns a ledger for `rank` of `world`; all of them together hold what all saved ranks held, once."""
    mine = ledgers[rank::world]
    return {
        **ledgers[0],
        "weighted": next((each["weighted"] for each in ledgers if each["weighted"] is not None), None),
        "losses": [loss for each in mine for loss in each["losses"]],
        "weight_sum": sum(float(each["weight_sum"]) for each in mine),
        "micro_batches": max(int(each["micro_batches"]) for each in ledgers),
        "carried": sorted({name for each in ledgers for name in each["carried"]}),
    }
