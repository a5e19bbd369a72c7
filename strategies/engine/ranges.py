"""Named ranges in the traces of torch.profiler: what the engine does, by phase and unit.

[Note: ranges] `compute blocks.0`, `gather blocks.0 (start)`, `gather blocks.0 (wait)`, `reduce ...`, `step` and such
show in every trace that torch.profiler takes, whoever started it. Opening one takes microseconds, so each place asks
first whether a profile is being taken, by `profiler._is_profiler_enabled`: reading a module's attribute is no call.
Ranges of transfers are opened in collectives.py, those of computing by the hooks here, which exist only while a
profile is taken.
"""

from collections.abc import Iterable
from typing import Any

import torch
from shardlight.strategies.engine.partition import UnitSpec
from torch import Tensor, nn
from torch.autograd import profiler
from torch.utils._pytree import tree_leaves

COMPUTING = ("compute", "compute backward", "recompute")
TRANSFERS = ("gather", "reduce", "publish", "gradients of", "agree on")
"""What the names of ranges begin with; the rest is the unit's name."""
SHARED = "shared memory:"
"""What the name of a collective through shared memory begins with, where it is started."""
STEP = "step"
_WHY_NOT_COMPILED = "shardlight names this unit in the trace that is being taken, which is not compiled"


def begin(name: str) -> profiler.record_function:
    """Opens a range on this thread; `end` closes it."""
    opened = profiler.record_function(name)
    opened.__enter__()
    return opened


def end(opened: profiler.record_function) -> None:
    """Closes a range."""
    opened.__exit__(None, None, None)


def hook_computing(specs: Iterable[UnitSpec]) -> list[Any]:
    """Has the forward and backward of every unit's modules open ranges; returns the hooks' handles."""
    return [handle for spec in specs for root in spec.roots for handle in _hook(root, spec.name)]


def _hook(root: nn.Module, unit: str) -> list[Any]:
    running: list[_Call] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(_Call(unit, (args, kwargs)))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop().computed(output)

    before, after = (torch.compiler.disable(hook, reason=_WHY_NOT_COMPILED) for hook in (before, after))
    return [
        # Behind the hook that gathers, and before the one that releases.
        root.register_forward_pre_hook(before, with_kwargs=True),
        root.register_forward_hook(after, prepend=True, always_call=True),
    ]


class _Call:
    """One forward of a unit's module, and its backward: from the gradient of its output to that of its inputs.

    Where no input has a gradient nothing tells the end of a backward, and it gets no range.
    """

    def __init__(self, unit: str, inputs: Any) -> None:
        self._unit = unit
        self._awaited = 0
        """Inputs whose gradient has not arrived."""
        self._backward: profiler.record_function | None = None
        self._recomputes = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled():
            for tensor in _that_get_gradients(inputs):
                tensor.register_hook(self._input_arrived)
                self._awaited += 1
        self._forward = begin(f"{'re' * self._recomputes}compute {unit}")

    def computed(self, output: Any) -> None:
        """Called when the forward is over, also by an exception."""
        end(self._forward)
        if self._awaited and torch.is_grad_enabled():
            for tensor in _that_get_gradients(output):
                if tensor.grad_fn is not None:
                    # Not a hook of the tensor: that would run before the one that ends the range of who got it.
                    tensor.grad_fn.register_prehook(self._output_arrived)

    def _output_arrived(self, gradients: Any) -> None:
        if self._backward is None and self._awaited:
            self._backward = begin(f"compute backward {self._unit}")

    def _input_arrived(self, gradient: Tensor) -> None:
        self._awaited -= 1
        if not self._awaited and self._backward is not None:
            end(self._backward)
            self._backward = None


def _that_get_gradients(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]
