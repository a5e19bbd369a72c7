"""Cuts a module as its plan says: parameters become this rank's parts, layers exchange what they have to."""

from collections.abc import Callable
from typing import Any

import torch
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.transforms.compile import is_compiled
from shardlight.strategies.engine.transforms.forward import AroundCall, replace_forward
from shardlight.strategies.engine.transforms.tensor import elementwise, loss, products, reductions, views
from shardlight.strategies.engine.transforms.tensor.cut_parameter import forward_running, mark_cut
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.layers import whole_input
from shardlight.strategies.engine.transforms.tensor.plan import TensorPlan
from shardlight.strategies.errors import TensorError
from torch import nn

_TABLES = (elementwise, views, reductions, products, loss)
"""What fills the table of operations on parts."""


def apply(module: nn.Module, plan: TensorPlan, group: TensorGroup | Collectives) -> Callable[[], None]:
    """Cuts `module` for this rank; names and classes of its modules and parameters stay as they are.

    Parameters stay the same objects, with this rank's part as their data; so optimizers and ties that are there keep
    them. On meta they stay there.

    Args:
        module: the one that the plan was made of, or one that is like it; with whole parameters.
        group: of `plan.size` ranks.
    Returns: a function that gives the layers their own forward back; parameters stay cut.
    Raises: TensorError: the group has another size, the module other shapes, or it is compiled.
    """
    group = group if isinstance(group, TensorGroup) else TensorGroup(group)
    if group.size != plan.size:
        raise TensorError(f"tensor: the plan is for {plan.size} ranks, and the group has {group.size}.")
    if is_compiled(module):
        raise TensorError(
            "tensor: the model, or a part of it, is compiled by torch.compile, which does not see through tensors of "
            "which each rank has a part. Leave it out."
        )
    modules = dict(module.named_modules())
    done: set[int] = set()
    slices = plan.slices(group.rank)
    with torch.no_grad():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name not in plan.cuts or id(parameter) in done:
                continue
            shape, dim, split = plan.cuts[name]
            if tuple(parameter.shape) != shape:
                raise TensorError(f"tensor: '{name}' is {tuple(parameter.shape)}, and was {shape} in the plan.")
            done.add(id(parameter))
            parameter.data = slices[name].of(parameter.data)
            parameter.grad = None
            mark_cut(parameter, dim, split, group)
    undos: list[Callable[[], None]] = []
    for name, layer in plan.layers.items():
        if layer.own_forward:
            continue
        undos.append(replace_forward(modules[name], layer.forward(group, along_sequence=plan.norms == "sharded")))
    undos += [replace_forward(modules[name], whole_input) for name in plan.blocks]
    undos += [_no_fast_path(inner) for inner in modules.values() if isinstance(inner, nn.TransformerEncoderLayer)]
    undos += [_no_nested(inner) for inner in modules.values() if isinstance(inner, nn.TransformerEncoder)]

    undos += [_noted(inner) for inner in (module, *module.children())]

    def undo() -> None:
        for step in reversed(undos):
            step()

    return undo


def _noted(module: nn.Module) -> Callable[[], None]:
    """Notes when a forward runs, with gradients or without; see [Note: cut parameters]."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with forward_running():
            return around.call(*args, **kwargs)

    around = AroundCall(module, run)
    return around.undo


def _no_fast_path(module: nn.TransformerEncoderLayer) -> Callable[[], None]:
    """Keeps an encoder layer from using its parameters past its modules, as it would in evaluation."""
    before = module.activation_relu_or_gelu
    module.activation_relu_or_gelu = 0

    def undo() -> None:
        module.activation_relu_or_gelu = before

    return undo


def _no_nested(module: nn.TransformerEncoder) -> Callable[[], None]:
    before = module.use_nested_tensor
    module.use_nested_tensor = False

    def undo() -> None:
        module.use_nested_tensor = before

    return undo
