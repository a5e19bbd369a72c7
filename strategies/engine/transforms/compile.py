"""torch.compile of blocks, and compiled modules that the user made, under names of the bare module."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from shardlight.strategies.engine.transforms.forward import AroundCall, Forward, replace_forward
from shardlight.strategies.errors import StrategyError
from torch import nn
from torch._dynamo import OptimizedModule, trace_rules


def compile_blocks(
    modules: Sequence[nn.Module], prepare: Callable[[nn.Module], None] | None = None, backend: str = "inductor"
) -> Callable[[], None]:
    """Compiles the forward of each module; like modules share one compilation.

    Args:
        prepare: called with the module before each compiled forward: brings weights that are elsewhere.
        backend: of torch.compile.
    Returns: a function that undoes it.
    Raises: StrategyError: there is no such backend, or it needs a C++ compiler and there is none.
    """
    _check_backend(modules, backend)
    shared: dict[Hashable, Forward] = {}

    def make(module: nn.Module, forward: Forward) -> Forward:
        key = (forward, _build(module))
        if key not in shared:
            shared[key] = _compiled(forward, type(module).__name__, backend)
        compiled = shared[key]

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if prepare is not None:
                prepare(module)
            return compiled(module, *args, **kwargs)

        return run

    undos = [replace_forward(module, partial(make, module)) for module in modules]

    def undo() -> None:
        for step in undos:
            step()

    return undo


def is_compiled(model: nn.Module) -> bool:
    """Whether the user compiled the model or a part of it, by torch.compile or `Module.compile`."""
    return getattr(model, "_compiler_ctx", None) is not None or any(
        isinstance(m, OptimizedModule) or _compiled_call(m) is not None for m in model.modules()
    )


def _compiled_call(module: nn.Module) -> Any:
    call = module._compiled_call_impl
    return call.before if isinstance(call, AroundCall) else call


def unwrap_compiled(model: nn.Module) -> Callable[[], None]:
    """Puts each module that the user wrapped by torch.compile in the wrapper's place, with a compiled forward.

    So names have no `_orig_mod` in them, and the engine's hooks run outside of what is compiled.

    Returns: a function that undoes it.
    Raises: StrategyError: a hook is on a wrapper.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, OptimizedModule)
    ]
    undos = [_unwrap(wrapper) for wrapper in {id(w): w for _, _, w in places}.values()]
    for parent, name, wrapper in places:
        parent._modules[name] = wrapper._orig_mod

    def undo() -> None:
        for step in undos:
            step()
        for parent, name, wrapper in places:
            parent._modules[name] = wrapper

    return undo


def _unwrap(wrapper: OptimizedModule) -> Callable[[], None]:
    inner: nn.Module = wrapper._orig_mod
    if wrapper._forward_hooks or wrapper._forward_pre_hooks or wrapper._backward_hooks or wrapper._backward_pre_hooks:
        raise StrategyError(
            f"a hook is registered on torch.compile's wrapper of {type(inner).__name__}: register it before compiling, "
            "on the module itself."
        )
    restore = replace_forward(inner, wrapper.dynamo_ctx)
    vars(inner)["_orig_mod"] = inner  # for code that knows of the wrapper

    def undo() -> None:
        restore()
        del vars(inner)["_orig_mod"]

    return undo


@cache
def keep_engine_out() -> None:
    """Tells torch.compile to leave our own code alone: hooks and saved-tensor hooks also run inside compiled regions.

    Compiled code ends where it meets ours, and goes on behind it.
    """
    for package in ("shardlight.strategies", "shardlight.ops"):
        trace_rules.add(package)


def _compiled(forward: Forward, name: str, backend: str) -> Forward:
    """Compiles a function of its own.

    Dynamo keeps what it compiled with the code object, so code of its own has its own limit of recompilations, also
    behind a graph break.
    """
    if isinstance(forward, FunctionType) and not trace_rules.check(forward):
        own = FunctionType(
            forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        return torch.compile(own, backend=backend)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    # What is in this file is not compiled, see `keep_engine_out`: neither would be what PyTorch's own files hold.
    run.__code__ = run.__code__.replace(co_name=f"{name}_forward", co_filename=f"<{name}, compiled as a block>")
    return torch.compile(run, backend=backend)


def _build(module: nn.Module) -> Hashable:
    """What two modules must have in common to share a compilation: constants and parameters' kinds."""
    parts: list[Hashable] = []
    for name, inner in module.named_modules():
        constants = [
            (k, v)
            for k, v in vars(inner).items()
            if k != "training" and isinstance(v, int | float | str | bool | type(None))
        ]
        kinds = [(n, p.shape, p.dtype, p.requires_grad) for n, p in inner.named_parameters(recurse=False)]
        parts.append((name, type(inner), tuple(constants), tuple(kinds)))
    return tuple(parts)


def _check_backend(modules: Sequence[nn.Module], backend: str) -> None:
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise StrategyError(
            f"compile_backend={backend!r} is not a backend of torch.compile: use one of "
            f"{', '.join(torch.compiler.list_backends())}."
        )
    device = next((p.device.type for m in modules for p in m.parameters()), "cpu")
    if backend == "inductor" and device == "cpu":
        try:
            import_module("torch._inductor.cpp_builder").get_cpp_compiler()  # not at the top: it takes seconds
        except RuntimeError as error:
            raise StrategyError(
                f"compile_backend='inductor' compiles C++ for the CPU: {error}. Install g++ (or name a compiler in the "
                "variable CXX), or set compile to 'no'."
            ) from None
