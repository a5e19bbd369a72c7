"""The layers of a model that are cut: what their forward does instead of their own.

A layer keeps its class, its attributes and the names of its parameters; of some parameters it has a part. They are used
inside its forward only, as the engine expects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from shardlight.strategies.engine.transforms.forward import Forward
from shardlight.strategies.engine.transforms.tensor.attention import multihead_forward
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup, shared
from shardlight.strategies.engine.transforms.tensor.products import column, entering, look_up, row
from shardlight.strategies.engine.transforms.tensor.sharded import Sharded, as_held, full, layer_running, sharded
from shardlight.strategies.engine.transforms.tensor.split import Split
from torch import Tensor, nn
from torch.nn import functional as F

How = Literal["column", "row", "vocab", "head", "shared heads", "attention"]
"""column: rows of a (out, in) weight, its outputs are divided. row: columns of it, its inputs are divided. vocab: rows
of an embedding. head: a column-parallel layer whose outputs are words. shared heads: outputs are divided, while every
rank has all of the weight, since several use the same heads of keys. attention: an nn.MultiheadAttention."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer that is cut."""

    name: str
    """The module's, as in `named_modules`."""
    how: How
    split: Split
    """Of its outputs (column, head, shared heads), inputs (row, attention: of out_proj) or words (vocab)."""
    transposed: bool = False
    """Whether its weight is (in, out)."""
    own_forward: bool = False
    """Whether its forward stays: see [Note: cut parameters]."""
    why: str = ""

    def cut(self, module: nn.Module) -> dict[str, tuple[int, Split]]:
        """Returns, by own name of each parameter that is cut, the dimension and how."""
        if self.how == "shared heads":
            return {}
        if self.how == "vocab":
            return {"weight": (0, self.split)}
        if self.how == "row":
            return {"weight": (0 if self.transposed else 1, self.split)}
        if self.how == "attention":
            fused = Split.fused([self.split] * 3)
            cuts = {"in_proj_weight": (0, fused), "in_proj_bias": (0, fused), "out_proj.weight": (1, self.split)}
            cuts |= {f"{n}_proj_weight": (0, self.split) for n in "qkv"}
            known = dict(module.named_parameters(remove_duplicate=False))
            return {name: cut for name, cut in cuts.items() if name in known}
        cuts = {"weight": (1 if self.transposed else 0, self.split), "bias": (0, self.split)}
        return {name: cut for name, cut in cuts.items() if getattr(module, name, None) is not None}

    def forward(self, group: TensorGroup, along_sequence: bool) -> Callable[[Forward], Forward]:
        """Returns what makes the forward of this layer; see `replace_forward`.

        Args:
            along_sequence: what is added up is divided along the sequence.
        """
        split, transposed = self.split, self.transposed

        def run_column(module: Any, input: Tensor) -> Tensor:
            weight = module.weight.t() if transposed else module.weight
            return column(input, weight, module.bias, split, group)

        def run_row(module: Any, input: Tensor) -> Tensor:
            weight = module.weight.t() if transposed else module.weight
            return row(input, weight, module.bias, split, group, along_sequence)

        def run_shared_heads(module: Any, input: Tensor) -> Tensor:
            weight = shared(as_held(module.weight), group)
            bias = None if module.bias is None else shared(as_held(module.bias), group)
            weight = weight.t() if transposed else weight
            own = split.ranges[group.rank]
            rows = [(weight[a:b], None if bias is None else bias[a:b]) for a, b in own]
            x = entering(input, group)
            parts = [F.linear(x, w, b) for w, b in rows]
            local = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            return sharded(local, local.dim() - 1, split, group)

        def run_vocab(module: Any, input: Tensor) -> Tensor:
            return look_up(input, module.weight, split, group, module.padding_idx, along_sequence)

        if self.how == "attention":
            return lambda forward: _running(multihead_forward(split, group, along_sequence))
        run = {
            "column": run_column,
            "head": run_column,
            "row": run_row,
            "vocab": run_vocab,
            "shared heads": run_shared_heads,
        }[self.how]
        return lambda forward: _running(run)


def _running(run: Forward) -> Forward:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with layer_running():
            return run(module, *args, **kwargs)

    return forward


def whole_input(forward: Forward) -> Forward:
    """Makes a forward whose arguments are whole: of a module that is not made of layers that we know."""

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = tuple(full(a) if type(a) is Sharded else a for a in args)
        kwargs = {k: full(a) if type(a) is Sharded else a for k, a in kwargs.items()}
        return forward(module, *args, **kwargs)

    return run
