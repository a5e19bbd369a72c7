"""Runs the user's own step as one stage of a pipeline: blocks of other stages do not compute.

[Note: the cut] On a stage, blocks before its own ones return placeholders (`placeholders.py`), and parameters that
other stages hold are placeholders themselves (`taint.py`), so the user's code runs to this stage's first block, whose
hidden state is replaced by what was received. When the first block behind its own ones is entered, its hidden state is
this stage's output, and the step is left by an exception of our own: not where the last own block ends, since what the
user's code does between two blocks has its values on this side. The last stage runs to the end of the step.

A block is met where it is called, outside of all its hooks: the engine's must see what the block is really given, and
none of them may be left open.

[Note: repeated in backward] Recomputation calls blocks again during backward, of whichever micro-batch. The tensors
that it calls them with were made in that micro-batch's run, and know it ([Note: resolved]).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from shardlight.strategies.engine.deferred.tensors import home_of
from shardlight.strategies.engine.pipeline.chain import Chain, check_ranges, stage_parameters
from shardlight.strategies.engine.pipeline.placeholders import Foreign
from shardlight.strategies.engine.pipeline.taint import Source, Tainted, running, tainted
from shardlight.strategies.engine.seeding import seed_generators
from shardlight.strategies.engine.transforms.forward import AroundCall
from shardlight.strategies.errors import PipelineError
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Outgoing:
    """What a stage hands on to the next one."""

    hidden: Tensor


class _Left(BaseException):
    """Leaves the user's step; not an `Exception`, so that code which handles those lets it pass."""

    def __init__(self, outgoing: Outgoing) -> None:
        super().__init__()
        self.outgoing = outgoing


class _Enter(torch.autograd.Function):
    """The received tensor as the result of an operation: a block may write into its input, but not into a leaf."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        """Returns the same values."""
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns the same gradient."""
        return grads[0]


@dataclass(eq=False)
class _Run:
    """One run of the step as a stage."""

    stage: int
    own: range
    received: Tensor | None = None
    seed: int | None = None
    at_exit: bool = False
    """The step is left where the last block of all ends, instead of where the next stage's first one begins."""
    hidden: Tensor | None = None
    """What the last block of all returned elsewhere, where no block runs."""
    grad_enabled: bool = True
    next: int = 0
    left: _Left | None = None
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = field(default_factory=list)
    """Buffers that what is before the blocks may change (batch statistics), which stage 0 has done: see `_copies`."""


class Cut:
    """A model of which this rank runs some stages; see [Note: the cut].

    Args:
        ranges: the blocks of each virtual stage, see `stage_parameters`.
        mine: the virtual stages that run here.
        held: names of the parameters that stay here; the others are taken out of the model.
        device: where dropped parameters would be, if the model is yet to be moved there; None: where they are.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        ranges: Sequence[range],
        mine: Sequence[int],
        held: set[str],
        device: torch.device | None = None,
    ) -> None:
        check_ranges(chain, ranges)
        self.model = model
        self.chain = chain
        self.ranges = list(ranges)
        self.mine = tuple(mine)
        self.dropped: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._stubs: list[tuple[nn.Module, str]] = []
        self._listed: list[tuple[nn.Module, Callable[..., Iterator[tuple[str, Tensor]]]]] = []
        """Modules that dropped parameters are in, and what lists their parameters while a step runs."""
        self._run: _Run | None = None
        self._around = _around(model, chain) if 0 in mine and len(mine) > 1 else []
        """Modules outside of the blocks that have buffers, where a later stage runs what is before the blocks again."""
        self._stage_of = [stage for stage, blocks in enumerate(ranges) for _ in blocks]
        self._drop(held, device)
        self._parameters_of = [_parameter_names(block) for block in chain.blocks]
        self._foreign = [
            Foreign(block, Source(f"block '{name}', which is on stage {stage}"), block._call_impl)
            for block, name, stage in zip(chain.blocks, chain.names, self._stage_of, strict=True)
        ]
        self._calls = [AroundCall(block, partial(self._called, i)) for i, block in enumerate(chain.blocks)]

    def run(
        self,
        stage: int,
        step: Callable[[], T],
        received: Tensor | None = None,
        seed: int | None = None,
        key: Any = None,
    ) -> Outgoing | T:
        """Runs `step` as a virtual stage.

        Args:
            received: the hidden state; None on virtual stage 0.
            seed: the random generators start from it where the stage's first block does, so that blocks of two stages
                draw different numbers; None, or on virtual stage 0: they go on.
            key: names the micro-batch in errors.
        Returns: what is handed on, and on the last virtual stage what the step returns.
        Raises: PipelineError: see [Note: taint]; the blocks are not called in order and each once.
        """
        run = _Run(stage, self.ranges[stage], received, seed, grad_enabled=torch.is_grad_enabled())
        run.buffers = _copies(self._around) if stage else []
        return self._through(run, step, key)

    def run_blocks(
        self, stage: int, step: Callable[[], Any], received: Tensor | None = None, seed: int | None = None
    ) -> Outgoing:
        """Runs the last virtual stage up to the end of the last block, whose output it returns."""
        run = _Run(stage, self.ranges[stage], received, seed, at_exit=True, grad_enabled=torch.is_grad_enabled())
        run.buffers = _copies(self._around) if stage else []
        return self._through(run, step, None)

    def run_tail(self, step: Callable[[], T], hidden: Tensor) -> T:
        """Runs the step with no block computing; the last one returns `hidden`, in the structure that it returns."""
        return self._through(_Run(len(self.ranges) - 1, range(0), hidden=hidden), step, None)

    def check(self, value: Any, what: str) -> None:
        """Raises: PipelineError: `value` (any tree) depends on something that is not on this stage."""
        found = _first_tainted(value)
        if found is not None:
            raise PipelineError(
                f"{what} depends on {found.source}, of which this stage has no values. {found.source.mend}"
            )

    def undo(self) -> None:
        """Lets the blocks run as they are again; dropped parameters stay away, and are attributes no more."""
        for call in self._calls:
            call.undo()
        for module, name in self._stubs:
            vars(module).pop(name, None)
        self._stubs.clear()
        self._listed.clear()

    # Dropping parameters.

    def _drop(self, held: set[str], device: torch.device | None) -> None:
        stages = stage_parameters(self.model, self.chain, self.ranges)
        named = list(self.model.named_parameters(remove_duplicate=False))
        kept = {id(p) for n, p in named if n in held}
        stubs: dict[int, Tainted] = {}
        for name, parameter in named:
            if id(parameter) in kept:
                continue
            self.dropped[name] = (parameter.shape, parameter.dtype)
            if id(parameter) not in stubs:
                on = next(stage for stage, names in enumerate(stages) if name in names)
                source = Source(f"'{name}', which is on stage {on}", name.rpartition(".")[0] or name)
                place = device or home_of(parameter)
                stubs[id(parameter)] = tainted(parameter.shape, parameter.dtype, place, source)
        for module in self.model.modules():
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in stubs:
                    del module._parameters[name]
                    setattr(module, name, stubs[id(parameter)])
                    self._stubs.append((module, name))
            _forget(module, stubs)
        dropped: dict[nn.Module, list[str]] = {}
        for module, name in self._stubs:
            dropped.setdefault(module, []).append(name)
        for module in self.model.modules():
            if not dropped.keys().isdisjoint(module.modules()):
                self._listed.append((module, partial(_named_with_dropped, module, dropped)))

    @contextmanager
    def _all_listed(self) -> Iterator[None]:
        """Context in which modules list dropped parameters too: a penalty on all weights is to miss none in silence."""
        for module, listing in self._listed:
            vars(module)["named_parameters"] = listing
        try:
            yield
        finally:
            for module, _ in self._listed:
                vars(module).pop("named_parameters", None)

    # Calls of blocks.

    def _through(self, run: _Run, step: Callable[[], Any], key: Any) -> Any:
        if self._run is not None:
            raise PipelineError("a stage is run while another one runs: training_step must not call training_step.")
        self._run = run
        try:
            with running(run), self._all_listed():
                result = step()
        except _Left as left:
            if left is not run.left:
                raise
            # The frames that were left hold the micro-batch's tensors, and would hold each other.
            run.left = left.__traceback__ = None
            return left.outgoing
        except PipelineError as error:
            error.add_note(f"(On stage {run.stage}{'' if key is None else f', micro-batch {key}'}.)")
            raise
        finally:
            self._run = None
        self._check_all_ran(run)
        self.check(result, "what the step returned")
        return result

    def _check_all_ran(self, run: _Run) -> None:
        if run.left is not None:
            raise PipelineError(
                f"the step went on after stage {run.stage} had left it at a block of the next stage: a bare 'except:', "
                "or one of BaseException, caught what leaves it. Let it catch Exception."
            )
        if run.next < len(self.chain.blocks):
            raise PipelineError(
                f"the step ended without calling block '{self.chain.names[run.next]}': a pipeline needs every block of "
                f"{self.chain.name!r} called once in every step, in order."
            )

    def _called(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Stands where a block is called."""
        run = self._run
        if run is None or torch._C._current_graph_task_id() != -1:
            return self._again(index, args, kwargs)
        if run.left is not None:
            raise run.left
        if index != run.next:
            raise self._out_of_order(run, index)
        run.next += 1
        if index in run.own:
            return self._own(run, index, args, kwargs)
        if run.own and index >= run.own.stop:
            hidden = self._hidden(index, args, kwargs)
            self._refuse_tainted(hidden, f"what stage {run.stage} hands on to block '{self.chain.names[index]}'")
            self._leave(run, hidden)
        output = self._foreign[index].output(args, kwargs, run)
        if run.hidden is not None and index == len(self.chain.blocks) - 1:
            return _put(output, _first_tensor(output), run.hidden)
        return output

    def _own(self, run: _Run, index: int, args: tuple, kwargs: dict) -> Any:
        if index == run.own.start:
            args, kwargs = self._enter(run, index, args, kwargs)
        args, kwargs = self._with_values(index, args, kwargs)
        output = self._calls[index].call(*args, **kwargs)
        if run.at_exit and index == len(self.chain.blocks) - 1:
            hidden = _first_tensor(output)
            self._refuse_tainted(hidden, f"what block '{self.chain.names[index]}' returns")
            self._leave(run, hidden)
        return output

    def _enter(self, run: _Run, index: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gives the stage's first block what was received."""
        received = run.received
        if received is None:
            return args, kwargs
        _put_back(run.buffers)
        if run.seed is not None:
            seed_generators(run.seed, received.device)
        if received.requires_grad:
            if run.grad_enabled and not torch.is_grad_enabled():
                raise PipelineError(
                    f"block '{self.chain.names[index]}' runs without gradients here, and the block before it with: a "
                    "reentrant checkpoint around the blocks sees no gradients through a pipeline. Use checkpoint(..., "
                    "use_reentrant=False)."
                )
            if torch.is_grad_enabled():
                received = _Enter.apply(received)
        run.received = received
        hidden = self._hidden(index, args, kwargs)
        if type(hidden) is Tainted and hidden.run is run:
            hidden.value = received
        return _put(args, hidden, received), _put(kwargs, hidden, received)

    def _again(self, index: int, args: tuple, kwargs: dict) -> Any:
        """A call in backward, see [Note: repeated in backward], or outside of any step."""
        if torch._C._current_graph_task_id() == -1:
            raise PipelineError(
                f"block '{self.chain.names[index]}' is called outside of training_step, validation_step, test_step and "
                "predict_step: with a pipeline each rank has some of the blocks only."
            )
        hidden = self._hidden(index, args, kwargs)
        run = hidden.run if type(hidden) is Tainted else None
        if run is not None:
            if index not in run.own:
                return self._foreign[index].output(args, kwargs, run)
            if index == run.own.start:
                if run.seed is not None and run.received is not None:
                    # The checkpoint has the state from before this block was met.
                    seed_generators(run.seed, run.received.device)
                args, kwargs = _put(args, hidden, run.received), _put(kwargs, hidden, run.received)
        elif self._stage_of[index] not in self.mine:
            return self._foreign[index].output(args, kwargs, None)
        args, kwargs = self._with_values(index, args, kwargs)
        return self._calls[index].call(*args, **kwargs)

    def _with_values(self, index: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns the arguments of an own block, which all must have values here."""
        if not any(_is_or_has_taint(x) for x in args) and not any(_is_or_has_taint(x) for x in kwargs.values()):
            return args, kwargs
        args, kwargs = _resolved(args), _resolved(kwargs)
        names = self._parameters_of[index]
        named = {(names[i] if i < len(names) else str(i)): x for i, x in enumerate(args)} | kwargs
        for name, value in named.items():
            self._refuse_tainted(value, f"argument '{name}' of block '{self.chain.names[index]}'")
        return args, kwargs

    def _refuse_tainted(self, value: Any, what: str) -> None:
        self.check(value, what)

    def _hidden(self, index: int, args: tuple, kwargs: dict) -> Tensor:
        found = _first_tensor(args)
        if found is None and kwargs:
            names = [n for n in self._parameters_of[index] if n in kwargs]
            found = _first_tensor([kwargs[n] for n in (*names, *(kwargs.keys() - set(names)))])
        if found is None:
            raise PipelineError(
                f"block '{self.chain.names[index]}' is called without a tensor: it has no hidden state."
            )
        return found

    def _leave(self, run: _Run, hidden: Tensor) -> NoReturn:
        run.left = _Left(Outgoing(hidden))
        raise run.left

    def _out_of_order(self, run: _Run, index: int) -> PipelineError:
        names = self.chain.names
        due = f"'{names[run.next]}' is next" if run.next < len(names) else "all have run"
        return PipelineError(
            f"block '{names[index]}' is called out of order: {due}. A pipeline needs every block of "
            f"{self.chain.name!r} called once in every step, in order."
        )


def _parameter_names(block: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in inspect.signature(block.forward).parameters.items() if p.kind in kinds]


def _named_with_dropped(
    module: nn.Module,
    dropped: Mapping[nn.Module, Sequence[str]],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    def of(inner: nn.Module) -> list[tuple[str, Tensor]]:
        return [*inner._parameters.items(), *((name, vars(inner)[name]) for name in dropped.get(inner, ()))]

    return module._named_members(of, prefix, recurse, remove_duplicate)


def _forget(module: nn.Module, stubs: dict[int, Tainted]) -> None:
    """Replaces what a module keeps of dropped parameters besides its registry, in attributes and lists."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor) and id(value) in stubs:
            vars(module)[name] = stubs[id(value)]
        elif type(value) is list and any(id(x) in stubs for x in value):
            value[:] = [stubs.get(id(x), x) for x in value]


def _around(model: nn.Module, chain: Chain) -> list[nn.Module]:
    inside = {id(m) for block in chain.blocks for m in block.modules()}
    return [m for m in model.modules() if m._buffers and id(m) not in inside]


def _copies(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    """Returns the buffers of modules: where each is, itself, and its values."""
    return [(m, n, b, b.clone()) for m in modules for n, b in m._buffers.items() if b is not None]


def _put_back(copies: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Gives buffers, also those that were replaced since, the values that they had."""
    for module, name, buffer, values in copies:
        module._buffers[name] = buffer
        # Batch norm does not count its writes as changes; nor does this, or buffers would seem new in every step.
        buffer.data.copy_(values)
    copies.clear()


def _first_tensor(tree: Any) -> Tensor | None:
    if isinstance(tree, Tensor):
        return tree
    for item in _items(tree):
        found = _first_tensor(item)
        if found is not None:
            return found
    return None


def _items(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        yield from tree
    elif isinstance(tree, dict):
        yield from tree.values()
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        yield from (getattr(tree, name) for name in tree.__dataclass_fields__)


def _first_tainted(tree: Any) -> Tainted | None:
    if isinstance(tree, Tensor):
        return tree if type(tree) is Tainted and tree.value is None else None
    return next((found for found in map(_first_tainted, _items(tree)) if found is not None), None)


def _is_or_has_taint(tree: Any) -> bool:
    if type(tree) is Tainted:
        return True
    return not isinstance(tree, Tensor) and any(map(_is_or_has_taint, _items(tree)))


def _resolved(tree: Any) -> Any:
    if type(tree) is Tainted:
        return tree if tree.value is None else tree.value
    return _mapped(tree, _resolved)


def _put(tree: Any, old: Tensor | None, new: Tensor) -> Any:
    return new if tree is old else _mapped(tree, lambda x: _put(x, old, new))


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, list | tuple):
        items = [function(x) for x in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        mapped = {k: function(v) for k, v in tree.items()}
        return mapped if type(tree) is dict else type(tree)(**mapped)
    return tree
