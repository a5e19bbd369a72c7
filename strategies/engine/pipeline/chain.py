"""Which blocks of a model are cut into stages, and which parameters each stage holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shardlight.strategies.engine.partition import block_lists
from shardlight.strategies.errors import PipelineError
from torch import nn

COMPARABLE = 0.25
"""Two lists of blocks are of comparable size where the smaller one has this share of the larger one's elements."""


@dataclass(frozen=True, eq=False)
class Chain:
    """The list of like blocks that is cut."""

    name: str
    blocks: list[nn.Module]
    names: list[str]
    """Full names of the blocks."""

    def index_of(self, parameter: str) -> int | None:
        """Returns the index of the block that a parameter's name is in; None: it is outside of the blocks."""
        return next((i for i, name in enumerate(self.names) if parameter.startswith(f"{name}.")), None)


def find_chain(model: nn.Module, name: str | None = None) -> Chain:
    """Returns the one list of like blocks that a pipeline cuts.

    Args:
        name: of the list (`strategy.blocks`); None: the largest.
    Raises: PipelineError: there is none, several are of comparable size, or none has this name.
    """
    lists = block_lists(model)
    if not lists:
        raise PipelineError(
            "the model has no list of like blocks (a ModuleList or Sequential with two or more children of one class) "
            "that a pipeline could cut into stages. Put its layers into one, or use zero3."
        )
    sizes = {n: sum(p.numel() for _, block in blocks for p in block.parameters()) for n, blocks in lists.items()}
    order = sorted(lists, key=lambda n: -sizes[n])
    if name is None:
        alike = [n for n in order if sizes[n] >= COMPARABLE * sizes[order[0]]]
        if len(alike) > 1:
            listed = ", ".join(f"{n!r} ({len(lists[n])} blocks)" for n in alike)
            raise PipelineError(
                f"the model has {len(alike)} lists of blocks of comparable size: {listed}. A "
                "pipeline cuts one and keeps the rest on the first and the last stage. Name it: "
                f"strategy.blocks: {order[0]}"
            )
        name = order[0]
    if name not in lists:
        close = get_close_matches(name, order, n=1)
        raise PipelineError(
            f"strategy.blocks: {name!r} is no list of like blocks. "
            + (f"Did you mean {close[0]!r}?" if close else f"The model has {', '.join(map(repr, order))}.")
        )
    blocks = lists[name]
    return Chain(name, [block for _, block in blocks], [n for n, _ in blocks])


def stage_parameters(
    model: nn.Module, chain: Chain, ranges: Sequence[range], everywhere: Sequence[str] = ()
) -> list[set[str]]:
    """Returns the names of the parameters that each virtual stage holds.

    A stage holds its blocks; the first one also what is registered before the chain, the last one what is behind it. A
    tied parameter is, under all its names, on every stage that holds one of them.

    Args:
        ranges: the blocks of each virtual stage, by index: in order, without a gap.
        everywhere: names of modules and parameters that are on all stages.
    Raises: PipelineError: a range does not fit, or a name in `everywhere` is not in the model.
    """
    check_ranges(chain, ranges)
    _check_names(model, everywhere)
    stages: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}
    behind = False
    for name, parameter in model.named_parameters(remove_duplicate=False):
        index = chain.index_of(name)
        behind = behind or index is not None
        if any(name == n or name.startswith(f"{n}.") for n in everywhere):
            on = set(range(len(ranges)))
        elif index is not None:
            on = {next(stage for stage, blocks in enumerate(ranges) if index in blocks)}
        else:
            on = {len(ranges) - 1 if behind else 0}
        stages.setdefault(id(parameter), set()).update(on)
        names.setdefault(id(parameter), []).append(name)
    return [{n for key, on in stages.items() if stage in on for n in names[key]} for stage in range(len(ranges))]


def check_ranges(chain: Chain, ranges: Sequence[range]) -> None:
    """Raises: PipelineError: the ranges are not the chain's blocks, in order and each once."""
    count = len(chain.blocks)
    if [i for blocks in ranges for i in blocks] != list(range(count)) or not all(ranges):
        raise PipelineError(
            f"stages with {[len(r) for r in ranges]} blocks do not fit the {count} blocks of {chain.name!r}: every "
            f"stage has at least one, and together they have {count}."
        )


def _check_names(model: nn.Module, everywhere: Sequence[str]) -> None:
    known = [n for n, _ in model.named_modules() if n]
    known += [n for n, _ in model.named_parameters(remove_duplicate=False)]
    for name in everywhere:
        if name not in known:
            close = get_close_matches(name, known, n=1) or [n for n in known if n.split(".")[-1] == name][:1]
            raise PipelineError(
                f"strategy.everywhere: the model has no module or parameter {name!r}."
                + (f" Did you mean {close[0]!r}?" if close else "")
            )
