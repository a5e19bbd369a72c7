"""What a run takes of memory and disk, told from shapes before anything is allocated: pure arithmetic, no tensors.

[Note: what is certain] An estimate has two figures a line: what the line takes, and how much of that a run takes for
certain. A run is refused by the second alone. Activations, and what the user's own code keeps, are in neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardlight.strategies.engine.layout import FlatLayout
from shardlight.strategies.engine.offload import Offload, Tier
from shardlight.strategies.engine.plan import Reduce, StatePlan

BLOCK_BYTES = 4096
"""What ranges of a swap file are whole multiples of."""
SHARD_MULTIPLE = 1024
"""As ops/sums.py's CHUNK."""
MOVED_FROM_BYTES, CHUNK_BYTES = 4 << 20, 2 << 20
"""Gathered buffers from this size on have whole pages of this size, as in backing.py."""
RING_BYTES = 8 << 20
"""What a rank exchanges with the others of its host through, as ops/host_collectives.py has it."""

Where = Literal["device", "host", "disk"]
KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """What an estimate has to know of one parameter.

    Attributes:
        moments: bytes per element of each tensor that its optimizer keeps and that is laid out like it, by name.
    """

    numel: int
    trainable: bool = True
    moments: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class BufferShape:
    """Parameters of one kind of a unit, in order.

    Attributes:
        home_width: bytes of an element of the authoritative weights, and of a gradient's sum.
        width: of an element of what a model computes with.
        whole: its parameters stay on every rank, whatever becomes of the others.
    """

    parameters: tuple[ParameterShape, ...]
    home_width: int = 4
    width: int = 4
    whole: bool = False

    @property
    def mastered(self) -> bool:
        """Whether the authoritative weights have another dtype than what a model computes with."""
        return self.home_width != self.width

    @property
    def trainable(self) -> bool:
        """Whether there are gradients; of one buffer either all parameters have one or none."""
        return any(p.trainable for p in self.parameters)

    def layout(self, ranks: int) -> FlatLayout:
        """Returns where its parameters lie."""
        return FlatLayout.pack([("", (p.numel,)) for p in self.parameters], ranks, SHARD_MULTIPLE)


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """Buffers that are gathered together; `keep`: from their first use to the end of forward.

    `stages`: how many stages of a pipeline have them, over whose ranks together they are sharded.
    """

    name: str
    buffers: tuple[BufferShape, ...]
    keep: bool = False
    stages: int = 1


@dataclass(frozen=True, kw_only=True)
class Line:
    """One kind of memory.

    Attributes:
        nbytes: on the rank that has most.
        certain: of these; see [Note: what is certain].
    """

    what: str
    where: Where
    nbytes: int
    certain: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What each rank takes."""

    lines: tuple[Line, ...]

    def nbytes(self, where: Where) -> int:
        """Bytes on a tier."""
        return sum(line.nbytes for line in self.lines if line.where == where)

    def certain(self, where: Where) -> int:
        """Bytes on a tier that are taken for certain."""
        return sum(line.certain for line in self.lines if line.where == where)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How state is laid out.

    Attributes:
        ranks: that state is sharded over.
        world_size: all of them.
        memory: what the device's memory is called: `host` without a GPU, where both are one.
    """

    plan: StatePlan
    ranks: int
    world_size: int
    reduce: Reduce
    offload: Offload | None = None
    memory: Literal["device", "host"] = "host"
    keep_gathered: Literal["no", "backward", "window", "auto"] = "no"

    def tier(self, kind: str) -> Where:
        """Returns where a kind of state is."""
        wanted: Tier = "device" if self.offload is None else getattr(self.offload, kind)
        return self.memory if wanted == "device" else wanted

    @property
    def streams(self) -> bool:
        """Whether the optimizer's step is streamed."""
        return self.offload is not None and self.offload.uses_disk


class _Sums:
    """Lines by what and where, in the order in which they came."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, Where], list[int]] = {}

    def add(self, what: str, where: Where, nbytes: int, certain: int | None = None) -> None:
        line = self.found.setdefault((what, where), [0, 0])
        line[0] += nbytes
        line[1] += nbytes if certain is None else certain

    def estimate(self) -> Estimate:
        lines = (Line(what=w, where=t, nbytes=n, certain=c) for (w, t), (n, c) in self.found.items())
        return Estimate(lines=tuple(line for line in lines if line.nbytes))


def estimate(units: Sequence[UnitShape], setting: Setting) -> Estimate:
    """Returns what the first rank takes, which has at least as much as any other.

    Example: 4 parameters of 1024 elements in fp32 with two moments under ddp: 16 KiB each of weights and gradients,
    32 KiB of optimizer state.
    """
    sums = _Sums()
    for unit in units:
        for buffer in unit.buffers:
            _state(buffer, replace(setting, ranks=setting.ranks * unit.stages), sums)
    _gathered(units, setting, sums)
    _reduced(units, setting, sums)
    if setting.streams:
        _staged(units, setting, sums)
    if setting.world_size > 1 and setting.memory == "host":
        sums.add("exchange between ranks", "host", RING_BYTES, 0)
    return sums.estimate()


def _sharded(buffer: BufferShape, setting: Setting) -> bool:
    return setting.plan.shard_parameters and not buffer.whole


def _on(tier: Where, nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES if tier == "disk" else nbytes


def _keeps_full_gradients(buffer: BufferShape, setting: Setting) -> bool:
    plan = setting.plan
    over_window = not plan.shard_gradients or setting.reduce == "window"
    return over_window and not (buffer.mastered and plan.shard_optimizer)


def _state(buffer: BufferShape, setting: Setting, sums: _Sums) -> None:
    plan, layout = setting.plan, buffer.layout(setting.ranks)
    shard = layout.shard_numel
    if _sharded(buffer, setting):
        tier = setting.tier("parameters")
        sums.add("weights", tier, _on(tier, shard * buffer.home_width))
    else:
        sums.add("weights", setting.memory, layout.numel * buffer.width)
        if buffer.mastered:
            tier = setting.tier("optimizer") if plan.shard_optimizer else setting.memory
            numel = shard if plan.shard_optimizer else layout.numel
            sums.add("fp32 masters", tier, _on(tier, numel * buffer.home_width))
    if not buffer.trainable:
        return
    if _keeps_full_gradients(buffer, setting):
        sums.add("gradients", setting.memory, layout.numel * buffer.home_width)
    elif plan.shard_gradients or plan.shard_optimizer:
        tier = setting.tier("gradients")
        sums.add("gradients", tier, _on(tier, shard * buffer.home_width))
    else:
        sums.add("gradients", setting.memory, layout.numel * buffer.home_width)
    _moments(buffer, layout, setting, sums)


def _moments(buffer: BufferShape, layout: FlatLayout, setting: Setting, sums: _Sums) -> None:
    tier = setting.tier("optimizer")
    if setting.streams:
        # One tensor for each name over the whole shard, on disk or not.
        mine = [buffer.parameters[piece.slot] for piece in layout.pieces(0)]
        named = {name: width for p in mine for name, width in p.moments.items()}
        equal = layout.used // setting.ranks  # a rank that has nothing but padding keeps nothing
        for width in named.values():
            nbytes = _on(tier, layout.shard_numel * width)
            sums.add("optimizer state", tier, nbytes, min(nbytes, equal * width))
        return
    if not setting.plan.shard_optimizer:
        sums.add("optimizer state", tier, sum(p.numel * sum(p.moments.values()) for p in buffer.parameters))
        return
    # Of whole parameters an owner has as many elements on average.
    most = sum((p.stop - p.start) * sum(buffer.parameters[p.slot].moments.values()) for p in layout.pieces(0))
    equal = sum(p.numel * sum(p.moments.values()) for p in buffer.parameters) // setting.ranks
    sums.add("optimizer state", tier, most, min(most, equal))


def _gathered(units: Sequence[UnitShape], setting: Setting, sums: _Sums) -> None:
    """This unit and the next one, which is gathered meanwhile, beside those that stay over the forward."""
    sizes = [sum(_pages(b, setting) for b in unit.buffers if _sharded(b, setting)) for unit in units]
    if not any(sizes):
        return
    if setting.keep_gathered in ("backward", "window"):
        sums.add("gathered units", setting.memory, sum(sizes), max(sizes))
        return
    kept = sum(size for unit, size in zip(units, sizes, strict=True) if unit.keep)
    passing = [size for unit, size in zip(units, sizes, strict=True) if not unit.keep] or [0]
    two = max(a + b for a, b in zip(passing, [*passing[1:], 0], strict=True))
    sums.add("gathered units", setting.memory, kept + two, max(sizes))


def _pages(buffer: BufferShape, setting: Setting) -> int:
    nbytes = buffer.layout(setting.ranks).numel * buffer.width
    moved = setting.memory == "host" and nbytes >= MOVED_FROM_BYTES
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES if moved else nbytes


def _reduced(units: Sequence[UnitShape], setting: Setting, sums: _Sums) -> None:
    """Full gradients on their way into sums: of one unit, and of the one before, whose reduction is under way.

    Beside them are those that autograd has just made, of the largest parameter and another.
    """
    sizes: list[int] = []
    over_window = fresh = 0
    for unit in units:
        own = 0
        for buffer in unit.buffers:
            if not buffer.trainable or (_keeps_full_gradients(buffer, setting) and setting.reduce == "window"):
                continue
            nbytes = buffer.layout(setting.ranks).numel * buffer.width
            fresh = max([fresh, *(p.numel * buffer.width for p in buffer.parameters)])
            if setting.reduce == "window":
                over_window += nbytes
            else:
                own += nbytes
        sizes.append(own)
    two = max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)
    sums.add("gradients of a unit", setting.memory, two + over_window + 2 * fresh, 0)


def _staged(units: Sequence[UnitShape], setting: Setting, sums: _Sums) -> None:
    """Buffers that state on disk comes through: the largest of what gathers, reductions and a step have at a time."""
    offload = setting.offload
    assert offload is not None
    most = moments = largest = 0
    for unit in units:
        for buffer in unit.buffers:
            shard = buffer.layout(setting.ranks).shard_numel * buffer.home_width
            largest, at_once = max(largest, shard), 0
            if _sharded(buffer, setting) and setting.tier("parameters") == "disk":
                at_once += 2
            if buffer.trainable and setting.tier("gradients") == "disk":
                at_once += 2
            most = max(most, at_once * shard)
            moments = max([moments, *(len(p.moments) for p in buffer.parameters)])
    length = max(1, offload.staging_bytes // 4 // BLOCK_BYTES) * BLOCK_BYTES * 4
    step = offload.staging_count * (4 + moments) * min(length, largest)
    sums.add("staging buffers", "host", max(most, step), 0)
