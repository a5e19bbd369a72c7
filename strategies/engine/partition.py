"""Cuts a model into units: the parameters that are gathered and reduced together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardlight.strategies.errors import StrategyError
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

OWN_UNIT_NUMEL = 1 << 16
"""A module outside the blocks with at least this many parameters of its own (embedding, head) is a unit of its own."""


MIN_UNIT_NUMEL = 1 << 15
"""Blocks that follow each other share a unit until it has this many parameters: moving fewer (128 KiB in fp32) takes as
long as asking for them."""


@dataclass
class UnitSpec:
    """One unit: its parameters and the modules whose forward uses them.

    `keep`: the unit stays gathered from its first use to the end of forward, since several modules share it; of other
    units the last root is run last.
    """

    name: str
    roots: list[nn.Module] = field(default_factory=list)
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    keep: bool = False
    block: bool = False
    """One of the model's blocks, and not one of the modules around them."""
    whole: bool = False
    """Its parameters stay on every rank, whatever becomes of the others."""
    stages: tuple[int, ...] | None = None
    """The stages of a pipeline that share its parameters; None: this stage alone has them."""


def find_units(
    model: nn.Module, class_names: Sequence[str] = (), blocks: Sequence[tuple[str, nn.Module]] | None = None
) -> list[UnitSpec]:
    """Returns the units of `model` in the order of its parameters; every floating or complex parameter is in one.

    By default each block of every outermost list of like modules (ModuleList or Sequential with two or more children of
    one class) is a unit, or a few small ones that follow each other are; so is each large module outside of them; the
    small rest forms one. Integer and bool
    parameters belong to no unit: they stay as they are on every rank.

    Args:
        class_names: names of module classes; each outermost module of such a class is a unit instead of the blocks.
        blocks: the model's blocks with their names, where they are known; None: they are looked for.
    Raises: StrategyError: a class name matches no module, or a parameter has no shape yet (lazy modules).
    """
    found = _repeated_blocks(model) if blocks is None else list(blocks)
    blocks = _named_blocks(model, class_names) if class_names else found
    taken: set[int] = set()
    units: list[UnitSpec] = []
    for name, block in blocks:
        unit = UnitSpec(name, [block], block=True)
        for inner, parameter in block.named_parameters():
            _take(unit, f"{name}.{inner}" if name else inner, parameter, taken)
        if class_names or not units or not _join(units[-1], unit):
            units.append(unit)
    units += _rest(model, taken)
    order = {id(p): i for i, p in enumerate(model.parameters())}
    units = [u for u in units if u.params]
    return sorted(units, key=lambda u: min(order[id(p)] for _, p in u.params))


def set_small_apart(units: list[UnitSpec], most: int) -> list[UnitSpec]:
    """Returns the units without their parameters of up to `most` elements, and one more that has all of these.

    One for the whole model: its gradients are reduced, and its new weights published, in one collective. A unit stays,
    if only in name, when nothing is left in it. The choice depends on shapes alone, so every rank makes the same.
    """
    small = UnitSpec("small parameters", whole=True)
    rest = []
    for unit in units:
        small.params += [(n, p) for n, p in unit.params if p.numel() <= most]
        rest.append(replace(unit, params=[(n, p) for n, p in unit.params if p.numel() > most]))
    return [*rest, small] if small.params else units


def set_shared_apart(units: list[UnitSpec], stages: Mapping[str, tuple[int, ...]], model: nn.Module) -> list[UnitSpec]:
    """Returns the units without the parameters that other stages have too, and one more for each set of stages.

    The stages that share parameters know them by one name and in one order, whichever of their blocks these are in.

    Args:
        stages: by name of a parameter, one of those that it has, the stages that share it.
        model: in which all names of such a parameter are those of the whole model.
    """
    known = {id(p) for unit in units for _, p in unit.params}
    shared = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if n in stages and id(p) in known]
    apart: dict[tuple[int, ...], UnitSpec] = {}
    for name, parameter in shared:
        own = UnitSpec(f"parameters of stages {', '.join(map(str, stages[name]))}", whole=True, stages=stages[name])
        apart.setdefault(stages[name], own).params.append((name, parameter))
    moved = {id(p) for _, p in shared}
    rest = [replace(unit, params=[(n, p) for n, p in unit.params if id(p) not in moved]) for unit in units]
    return [*rest, *(apart[key] for key in sorted(apart))] if apart else units


def _take(unit: UnitSpec, name: str, parameter: nn.Parameter, taken: set[int]) -> None:
    if isinstance(parameter, UninitializedTensorMixin):
        raise StrategyError(
            f"parameter '{name}' of a lazy module has no shape yet: run one batch through the model in `setup` or "
            "`configure_model` before training, or give the layer its input size."
        )
    if id(parameter) in taken or not (parameter.is_floating_point() or parameter.is_complex()):
        return
    taken.add(id(parameter))
    unit.params.append((name, parameter))


def _join(unit: UnitSpec, following: UnitSpec) -> bool:
    """Takes a block into the unit before it, if that is small and of the same list; returns whether it did."""
    (first, last), name = _ends(unit.name), following.name
    numel = sum(p.numel() for _, p in unit.params)
    if numel >= MIN_UNIT_NUMEL or last.rpartition(".")[0] != name.rpartition(".")[0]:
        return False
    unit.name = f"{first} to {name}"
    unit.roots += following.roots
    unit.params += following.params
    return True


def _ends(name: str) -> tuple[str, str]:
    first, _, last = name.partition(" to ")
    return first, last or first


def _named_blocks(model: nn.Module, class_names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found = [(n, m) for n, m in model.named_modules() if type(m).__name__ in class_names]
    missing = set(class_names) - {type(m).__name__ for _, m in found}
    if missing:
        present = sorted({type(m).__name__ for m in model.modules()})
        raise StrategyError(f"strategy.units: no module is of class {sorted(missing)}. The model has {present}.")
    return _outermost(found)


def block_lists(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Returns every outermost list of like modules, by its name: those of its children that have parameters."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = [(f"{name}.{n}" if name else n, m) for n, m in module.named_children() if _has_params(m)]
            if len(children) > 1 and len({type(m) for _, m in children}) == 1:
                found[name] = children
    outermost = {id(m) for _, m in _outermost([child for children in found.values() for child in children])}
    lists = {name: [(n, m) for n, m in children if id(m) in outermost] for name, children in found.items()}
    return {name: children for name, children in lists.items() if children}


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [block for blocks in block_lists(model).values() for block in blocks]


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inside: set[int] = set()
    kept = []
    for name, module in found:
        if id(module) not in inside:
            kept.append((name, module))
            inside.update(id(m) for m in module.modules())
    return kept


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _rest(model: nn.Module, taken: set[int]) -> list[UnitSpec]:
    units: list[UnitSpec] = []
    small = UnitSpec("rest", keep=True)
    for name, module in model.named_modules():
        own = [
            (f"{name}.{n}" if name else n, p) for n, p in module.named_parameters(recurse=False) if id(p) not in taken
        ]
        if not own:
            continue
        large = sum(p.numel() for _, p in own if not isinstance(p, UninitializedTensorMixin)) >= OWN_UNIT_NUMEL
        unit = UnitSpec(name or "rest") if large else small
        for full_name, parameter in own:
            _take(unit, full_name, parameter, taken)
        if large:
            units.append(unit)
    units.append(small)
    for unit in units:
        members = {id(p) for _, p in unit.params}
        unit.roots = [m for m in model.modules() if any(id(p) in members for p in m.parameters(recurse=False))]
        unit.keep = unit.keep or len(unit.roots) > 1
    return units
