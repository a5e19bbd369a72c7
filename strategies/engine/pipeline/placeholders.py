"""What a block that runs on another stage returns here: learnt once per kind of arguments, then made without it.

[Note: learning] The block's own forward runs once on tensors without values, its weights too: so its output has the
structure that it has on the other stage (tuples, dataclasses, None, numbers), and everything it leaves elsewhere (an
attribute, an entry in a list) is tainted like its output. From then on the same kind of arguments gives an output of
the same structure, and the block does not run. It runs every time where that would not do: where its output has values
that are no arguments, or where a hook on a module inside it collects something.
"""

import copy
import dataclasses
import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from shardlight.strategies.engine.pipeline.taint import Source, Tainted, learning
from shardlight.strategies.errors import PipelineError
from torch import Tensor, nn

_PLAIN = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device, enum.Enum)
_MOST = 256
"""So many kinds of arguments are remembered per block."""
_ENOUGH = 2
"""Of so many shapes a block is seen to return what looks like its hidden state; it is then taken to do so for all."""
_OURS = "shardlight."

Build = Callable[[list[Any], Any], Any]
"""(leaves of the arguments, run) -> an output like the one that was learnt."""


class _NotLearnableError(Exception):
    """The output has something that must be computed each time."""


class Foreign:
    """A block that does not compute here, and what it returns."""

    def __init__(self, block: nn.Module, source: Source, call: Callable[..., Any]) -> None:
        """`call`: runs the block, with its hooks."""
        self.block = block
        self.source = source
        self._call = call
        self._inside = list(block.modules())
        self._hooks = [hooks for m in self._inside for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._known: dict[Hashable, Build | None] = {}
        self._preserving: dict[Hashable, tuple[int, Build | None]] = {}
        """By kind of arguments apart from shapes: of how many shapes it is known that the output has its input's."""

    def output(self, args: tuple, kwargs: dict, run: Any) -> Any:
        """Returns what the block returns for these arguments, without values.

        Raises: PipelineError: the block cannot run without values.
        """
        leaves: list[Any] = []
        kind = (_signature(args, leaves), _signature(kwargs, leaves), self.block.training, _autocast(leaves))
        build = self._known.get(kind) or self._as_its_input(kind)
        if build is not None and not self._is_hooked():
            return build(leaves, run)
        output = self._learn(args, kwargs, leaves)
        if kind not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[kind] = self._remember(kind, output, leaves)
        return output

    def _as_its_input(self, kind: Hashable) -> Build | None:
        if kind in self._known:
            return None  # it must run each time
        seen, build = self._preserving.get(_without_shapes(kind), (0, None))
        return build if seen >= _ENOUGH else None

    def _remember(self, kind: Hashable, output: Any, leaves: list[Any]) -> Build | None:
        hidden = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor)), None)
        structure = _without_shapes(kind)
        seen, before = self._preserving.get(structure, (0, None))
        try:
            build = None if seen and before is None else _template(output, leaves, self.source, hidden)
        except _NotLearnableError:
            build = None
        self._preserving[structure] = (seen + 1, build)
        try:
            return _template(output, leaves, self.source)
        except _NotLearnableError:
            return None

    def _is_hooked(self) -> bool:
        return any(self._hooks) and not all(_is_ours(hook) for hooks in self._hooks for hook in hooks.values())

    def _learn(self, args: tuple, kwargs: dict, leaves: list[Any]) -> Any:
        hidden = next((x for x in leaves if isinstance(x, Tensor)), None)
        if hidden is not None and type(hidden) is not Tainted:
            # It has values here (an embedding that is on all stages); what the block makes of it has none.
            without = Tainted(_meta(hidden), hidden.device, self.source)
            args, kwargs = _replaced(args, hidden, without), _replaced(kwargs, hidden, without)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        try:
            with (
                torch.random.fork_rng(devices),
                torch.no_grad(),
                _eager(),
                _without_values(self._inside, self.source),
                learning(self.source),
            ):
                return self._call(*args, **kwargs)
        except PipelineError:
            raise
        except Exception as error:
            raise PipelineError(
                f"{self.source}, cannot run on tensors without values, as it does here to learn what it returns: "
                f"{type(error).__name__}: {error}"
            ) from error


def _eager() -> AbstractContextManager[None]:
    """A compiled block cannot be traced with tensors without values; importing what compiles takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _without_values(modules: list[nn.Module], source: Source) -> Iterator[None]:
    """Parameters and buffers are tainted inside, and no hook of the engine runs."""
    stand_ins: dict[int, Tainted] = {}

    def stand_in(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or type(tensor) is Tainted:
            return tensor
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = Tainted(_meta(tensor), tensor.device, source)
        return stand_ins[id(tensor)]

    before = []
    try:
        for module in modules:
            own = vars(module)
            names = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
            before.append((own, {name: own[name] for name in names}))
            for name in names[:2]:
                own[name] = {k: stand_in(v) for k, v in own[name].items()}
            for name in names[2:]:
                own[name] = OrderedDict((k, v) for k, v in own[name].items() if not _is_ours(v))
        yield
    finally:
        for own, kept in before:
            own.update(kept)


def _is_ours(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_OURS)


def _meta(tensor: Tensor) -> Tensor:
    # Without asking the tensor anything that would gather it: its parameter may be released.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _replaced(tree: Any, old: Tensor, new: Tensor) -> Any:
    if tree is old:
        return new
    if isinstance(tree, list | tuple):
        return _of(type(tree), [_replaced(x, old, new) for x in tree])
    return {k: _replaced(v, old, new) for k, v in tree.items()} if type(tree) is dict else tree


def _of(kind: type, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _signature(tree: Any, leaves: list[Any]) -> Hashable:
    """Returns what an output's structure can depend on; appends the leaves, in order."""
    if type(tree) is Tainted:
        leaves.append(tree)
        return (tree.meta.shape, tree.meta.dtype, tree.place)
    if isinstance(tree, Tensor):
        leaves.append(tree)
        with torch._C.DisableTorchFunctionSubclass():
            return (tree.shape, tree.dtype, tree.device)
    if isinstance(tree, list | tuple):
        return (type(tree), *[_signature(x, leaves) for x in tree]) if tree else None
    if type(tree) is dict:
        return (dict, *[(k, _signature(v, leaves)) for k, v in tree.items()]) if tree else None
    leaves.append(tree)
    return (type(tree), tree) if isinstance(tree, _PLAIN) else type(tree)


def _autocast(leaves: list[Any]) -> Hashable:
    like = next((x for x in leaves if isinstance(x, Tensor)), None)
    kind = "cpu" if like is None else like.place.type if type(like) is Tainted else like.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


def _without_shapes(kind: Any) -> Hashable:
    if isinstance(kind, torch.Size):
        return len(kind)
    return tuple([_without_shapes(x) for x in kind]) if isinstance(kind, tuple) else kind


def _template(output: Any, leaves: list[Any], source: Source, hidden: int | None = None) -> Build:
    """Returns a function that makes outputs like this one.

    Args:
        hidden: the leaf that tensors of the output look like, of whatever shape it is; None: they look as they do here.
    Raises: _NotLearnableError.
    """
    if isinstance(output, Tainted):
        meta, device = output.meta, output.device
        position = next((i for i, x in enumerate(leaves) if x is output), None)
        if position is not None:
            return lambda leaves, run: leaves[position]
        if hidden is None:
            return lambda leaves, run: Tainted(meta, device, source, run)
        if (meta.shape, meta.dtype) != (leaves[hidden].shape, leaves[hidden].dtype):
            raise _NotLearnableError
        return lambda leaves, run: Tainted(_meta(leaves[hidden]), device, source, run)
    if isinstance(output, list | tuple):
        parts = [_template(x, leaves, source, hidden) for x in output]
        kind = type(output)
        return lambda leaves, run: _of(kind, [part(leaves, run) for part in parts])
    if isinstance(output, Mapping):
        kind = type(output)
        fields = {k: _template(v, leaves, source, hidden) for k, v in output.items()}
        if kind is dict:
            return lambda leaves, run: {k: build(leaves, run) for k, build in fields.items()}
        return lambda leaves, run: kind(**{k: build(leaves, run) for k, build in fields.items()})
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {
            f.name: _template(getattr(output, f.name), leaves, source, hidden) for f in dataclasses.fields(output)
        }
        like = _filled(output, dict.fromkeys(fields))
        return lambda leaves, run: _filled(like, {k: build(leaves, run) for k, build in fields.items()})
    if output is None or isinstance(output, bool | int | str):
        return lambda leaves, run: output
    argument = next((i for i, x in enumerate(leaves) if x is output), None)
    if argument is not None:
        return lambda leaves, run: leaves[argument]
    raise _NotLearnableError


def _filled(like: Any, fields: dict[str, Any]) -> Any:
    made = copy.copy(like)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
