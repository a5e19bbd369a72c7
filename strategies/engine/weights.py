"""When a unit's weights are gathered and released: around its modules' forward, and when autograd asks for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from shardlight.strategies.engine.agreement import Agreement
from shardlight.strategies.engine.choices import KeepGathered
from shardlight.strategies.engine.interleave import Interleaver
from shardlight.strategies.engine.kept_units import keep_what_fits
from shardlight.strategies.engine.needs import Need
from shardlight.strategies.engine.partition import UnitSpec
from shardlight.strategies.engine.ranges import hook_computing
from shardlight.strategies.engine.read_ahead import ReadAhead
from shardlight.strategies.engine.released import ReleasedParameter
from shardlight.strategies.engine.unit import LOST, SavedCast, SavedWeight, Unit
from shardlight.strategies.engine.units import UnitTable
from shardlight.strategies.errors import GradientError, StrategyError
from torch import Tensor, nn
from torch.autograd import profiler

T = TypeVar("T")
_WHY_NOT_COMPILED = (
    "shardlight gathers sharded weights here, which is not compiled: leave fullgraph out, or compile the blocks alone "
    "(strategy option compile: blocks)"
)


_CAST_TO = (torch.bfloat16, torch.float16)


class Weights:
    """Gathers and releases the units of a table. Where parameters are replicated there is nothing to do."""

    def __init__(self, model: nn.Module, table: UnitTable, agreement: Agreement, keep: KeepGathered = "no") -> None:
        self.model = model
        self.table = table
        self._agreement = agreement
        self._keep: KeepGathered | Literal["chosen"] = keep
        for unit in table.units:
            unit.keep_gathered = "no" if keep == "auto" else keep
        self.running = 0
        """How many `forward` contexts are open; weights can be gathered on use while > 0."""
        self._in_pass = ""
        self._with_gradients = False
        """What the outermost `forward` context is for, and whether gradients were enabled."""
        self.turning: Unit | None = None
        """What forward holds or uses last and backward needs first: it stays in between."""
        self.interleaver: Interleaver | None = None
        """Whose micro-batches run now."""
        self._read_ahead = ReadAhead(table.units) if table.tiers is not None else None
        self._last: Unit | None = None
        self._makes_graph = False
        """Whether the forward of a unit that ran last was to have a backward."""
        self._turned = False
        """Whether this backward has shown what it needs first."""
        self.handles: list[Any] = []
        self._guards = any(b.guarded for u in table.units for b in u.buffers)
        self._wide: set[Unit] = set()
        """Units whose parameters show their authoritative weights because someone used them."""
        self._unit_of_storage: dict[int, Unit] = {}
        self._note_storages()
        for buffer in table.buffers:
            buffer.renewed = self._note_storages
        for unit, spec in zip(table.units, table.specs, strict=True):
            if unit.sharded:
                self._hook_forward(unit, spec)

    def _note_storages(self) -> None:
        self._unit_of_storage = {b.full.untyped_storage()._cdata: u for u in self.table.units for b in u.buffers}

    def _hook_forward(self, unit: Unit, spec: UnitSpec) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.running:
                return
            unit.depth += 1
            self.gather(unit)
            if not _in_backward():
                self._use(unit)
            saving = self.saving()
            saving.__enter__()
            unit.saving.append(saving)
            if _in_backward():
                unit.recomputed = True
            else:
                unit.refresh()  # toggle_optimizer may have come since the step began
            if unit.frozen and torch.is_grad_enabled():
                # The last gradient of its own does not tell when a unit with frozen weights is over: its inputs' does.
                # In backward too: a reentrant recomputation has inputs of its own.
                for tensor in _tensors([args, kwargs]):
                    if tensor.requires_grad:
                        tensor.register_hook(unit.input_arrived)
                        unit.awaiting += 1

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not unit.saving:
                return
            unit.saving.pop().__exit__(None, None, None)
            unit.depth -= 1
            # In backward this is a recomputation: the unit is needed until its gradients have arrived.
            last = module is spec.roots[-1] and not unit.keep
            if self.running and last and not _in_backward() and not self._stays(unit):
                unit.release()
                # Autocast would keep its copies of fp32 weights to the end of the step.
                torch.clear_autocast_cache()

        # Where the user compiles around units, compiled code ends here: see [Note: compiled around units].
        before, after = (torch.compiler.disable(hook, reason=_WHY_NOT_COMPILED) for hook in (before, after))
        for root in spec.roots:
            self.handles.append(root.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            # Always: a recomputation ends its forward with an exception once it has what it needs.
            self.handles.append(root.register_forward_hook(after, always_call=True))

    def _stays(self, unit: Unit) -> bool:
        """Whether a unit is kept beyond this use of it, for a backward or the next micro-batch."""
        if not self._with_gradients:
            return False
        if self._in_pass == "backward":
            return unit.keep_gathered == "window"
        turning = unit is self.turning and self._makes_graph and (unit.keep or unit is self._last)
        return turning or unit.keep_gathered != "no"

    def _use(self, unit: Unit) -> None:
        """Notes that a unit's forward runs."""
        self._makes_graph = torch.is_grad_enabled()
        before, self._last = self._last, unit
        if before is not unit and before is not None and before is self.turning and not before.keep:
            # It was not the last, this time.
            self.turning = None
            before.release()

    def choose_kept(self) -> None:
        """Chooses which units stay gathered after forward, at the start of the first backward. Collective."""
        if self._keep == "auto":
            self._keep = "chosen"
            if self.table.plan.shard_parameters and self.table.collectives.world_size > 1:
                self._agreement.meet("memory that is left")
                keep_what_fits([u for u in self.table.units if u.sharded], self.table.collectives)

    def on_use(self, parameter: nn.Parameter, operation: str) -> None:
        """Called when a released parameter's values are used; see [Note: released parameters].

        Raises: StrategyError: no step is running.
        """
        unit, buffer, slot = self.table.place[parameter]
        if not self.running:
            raise StrategyError(
                f"'{buffer.layout.slots[slot].name}' is sharded ({self.table.plan.name}) and its values were used "
                f"outside a training or evaluation step, by '{operation}': do this under "
                "`with strategy.gathered(module):`, on every rank."
            )
        if _in_backward() and not self._ours_on_top():
            unit.careful = True
        self.gather(unit)

    def on_copy_use(self, parameter: nn.Parameter) -> None:
        """Called when more than the 16-bit copy of a parameter's weights is wanted; see [Note: copies]."""
        unit, _, _ = self.table.place[parameter]
        self._agreement.need(Need.GATHER_HOME.of(unit.index), f"weights of {unit.name}")
        self._wide.add(unit)

    def end_copy_uses(self) -> None:
        """Where parameters are replicated: they hold copies again, and what was written to them is kept."""
        with torch.no_grad():
            for unit in [u for u in self._wide if not u.pinned]:
                self._wide.discard(unit)
                if not unit.sharded:
                    unit.write_back()

    def equal(self, first: Tensor, second: Tensor) -> bool:
        """Whether two tensors, of which at least one is a released parameter, have the same shape and values.

        Lightning's finetuning callbacks look for a parameter among others like this, between steps. Collective, unless
        it is one parameter or the shapes differ.
        """
        if first is second or first.shape != second.shape:
            return first is second
        if self.running:
            for tensor in (first, second):
                if tensor in self.table.place:
                    self.gather(self.table.place[tensor][0])
            return torch.equal(first, second)
        with self._holding({id(first), id(second)}):
            return torch.equal(first, second)

    def gather_module(self, module: nn.Module) -> None:
        """Gathers every unit that holds a parameter of `module`: compiled code cannot do it on use."""
        for name, parameter in module.named_parameters():
            if isinstance(parameter, ReleasedParameter):
                self.on_use(parameter, name)

    def gather(self, unit: Unit) -> None:
        """Returns with the unit gathered on this rank; see [Note: agreement]."""
        if self.interleaver is not None:
            self.interleaver.use(unit)
        if not unit.gathered:
            if self._in_pass == "backward" and not self._turned:
                self._turned = True
                self.turning = unit if unit.keep or unit is self._last else None
            with torch.no_grad():
                self._agreement.need(Need.GATHER.of(unit.index), f"gather {unit.name}")

    def gathering(self, unit: Unit) -> None:
        """Called when a unit's gather has been started: what follows may be read from disk."""
        if self._read_ahead is not None:
            self._read_ahead.gathering(self._in_pass, unit)

    def _pack(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if self._guards and isinstance(tensor, nn.Parameter):
            # The parameter itself may hold its master weights by the time of backward, and these a copy.
            with torch._C.DisableTorchFunctionSubclass():
                tensor = tensor.detach()
        if kind is Tensor or issubclass(kind, nn.Parameter):
            unit = (
                self._unit_of_storage.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
            )
            if unit is not None:
                return SavedWeight(unit, tensor)
            if tensor.dtype in _CAST_TO:
                return self._cast_weight(tensor) or (tensor, tensor._version)
            return tensor, tensor._version
        return tensor, None

    def _cast_weight(self, tensor: Tensor) -> "SavedCast | None":
        base = tensor if tensor._base is None else tensor._base
        node = base.grad_fn
        if node is None or type(node).__name__ != "ToCopyBackward0":
            return None
        parameter = getattr(node.next_functions[0][0], "variable", None)
        if parameter is None or parameter not in self.table.place:
            return None
        return SavedCast(parameter, self.table.place[parameter][0], tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:
            tensor, version = packed
        elif type(packed) is SavedWeight:
            tensor, version = packed.tensor, packed.version
            self.gather(packed.unit)
        else:
            self.gather(packed.unit)
            return packed.again()
        # With hooks autograd leaves this check to us.
        if version is not None and tensor._version != version:
            raise GradientError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after forward "
                f"(version {tensor._version}, expected {version}). Run backward before the step, or clone it first."
            )
        return tensor

    def _ours_on_top(self) -> bool:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is None or getattr(top[0], "__self__", None) is self or isinstance(top[0], _PackBoth)

    def saving(self) -> AbstractContextManager[Any]:
        """Context inside which autograd saves weights our way, whatever else saves tensors around it.

        [Note: recomputation] Only the innermost pair of saved-tensor hooks is used. Non-reentrant checkpointing brings
        its own and keeps what a recomputation saves by itself, a frozen weight as the very parameter: released by then,
        it would be a NaN. So a unit's forward puts a pair inside that keeps weights, and hands on everything else.
        """
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None or not (self.table.plan.shard_parameters or self._guards) or self._ours_on_top():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(_PackBoth(self._pack, top[0]), UnpackBoth(self._unpack, top[1]))

    @contextmanager
    def forward(self, kind: str = "forward") -> Iterator[None]:
        """Around every use of the model: weights are gathered as they are used, and released at the end.

        Args:
            kind: what goes over the model, for [Note: recorded order].
        """
        hooks = self._hooks()
        shown: list[Any] = []
        if not self.running:
            if profiler._is_profiler_enabled:
                shown = hook_computing(self.table.specs)
            self.end_copy_uses()
            self.table.refresh()
            self._in_pass, self._with_gradients = kind, torch.is_grad_enabled()
            self._turned = self.turning is not None and self.turning.gathered
            if kind != "backward":
                self._last = None
            self._agreement.begin_pass(f"{kind} with gradients" if self._with_gradients else kind)
        self.running += 1
        failed = True
        try:
            with hooks:
                yield
            failed = False
        finally:
            self.running -= 1
            for handle in shown:
                handle.remove()
            self._release_all(force=not failed)

    def _hooks(self) -> AbstractContextManager[Any]:
        save = (self.table.plan.shard_parameters or self._guards) and torch.is_grad_enabled()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if save else nullcontext()

    def run_in_turns(self, interleaver: Interleaver, works: Sequence[Callable[[], T]]) -> list[T]:
        """Runs one pass of each micro-batch, inside `forward`; see [Note: layer order]. Returns what they return."""

        def inside(work: Callable[[], T]) -> T:
            with self._hooks():
                return work()

        self.interleaver = interleaver
        try:
            return interleaver.run([partial(inside, work) for work in works])
        finally:
            self.interleaver = None
            for unit in self.table.units:
                unit.awaited = 0

    def _release_all(self, force: bool) -> None:
        if not self.table.plan.shard_parameters:
            return
        for unit in self.table.units:
            if self.running == 0:
                unit.depth = 0
                unit.saving.clear()
            if not (force and self._stays(unit)):
                unit.release(force and self.running == 0)

    def drop(self) -> None:
        """Releases units that are kept after their use, without a look at them: they hold weights of before."""
        self._forget_read()
        for unit in self.table.units:
            if unit.sharded:
                unit.drop()

    def _forget_read(self) -> None:
        if self._read_ahead is not None:
            self._read_ahead.forget()

    def release_for_step(self) -> None:
        """Before an optimizer changes the shards: nobody may go on with weights from before.

        Raises: StrategyError: weights are held by `gathered`, by a view, or were changed.
        """
        for unit in self.table.units:
            if unit.pinned and any(b.wide is not None or self.table.plan.shard_parameters for b in unit.buffers):
                raise StrategyError("an optimizer step inside `with strategy.gathered(...)`: leave the context first.")
            if self.table.plan.shard_parameters:
                unit.release(force=True)
        self._forget_read()
        self._answer_doubts()

    def _answer_doubts(self) -> None:
        doubtful = [b for unit in self.table.units for b in unit.buffers if b.doubt is not None]
        if not doubtful:
            return
        answers = torch.stack([b.doubt for b in doubtful if b.doubt is not None]).tolist()
        for buffer in doubtful:
            buffer.doubt = None
        for buffer, changed in zip(doubtful, answers, strict=True):
            if changed:
                raise StrategyError(LOST.format(name=buffer.name))

    @contextmanager
    def gathered(self, module: nn.Module | None = None) -> Iterator[None]:
        """Full weights of `module` (default: the whole model) on every rank, inside the context. Collective.

        Changes made to them inside, the same on every rank, are kept.
        """
        with self._holding({id(p) for p in (module or self.model).parameters()}):
            yield

    @contextmanager
    def _holding(self, wanted: set[int]) -> Iterator[None]:
        self._agreement.meet("gathered")
        units = [u for u in self.table.units if any(id(p) in wanted for b in u.buffers for p in b.params)]
        with torch.no_grad():
            for unit, everywhere in zip(units, self._gathered_everywhere(units), strict=True):
                unit.pinned += 1
                unit.show_home(everywhere)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._forget_read()
            with torch.no_grad():
                for unit in units:
                    unit.pinned -= 1
                    if not unit.pinned:
                        unit.write_back()
                        if self.table.plan.shard_parameters:
                            unit.release(force=self.running == 0 and not failed)

    def _gathered_everywhere(self, units: list[Unit]) -> list[bool]:
        # Inside a step a unit that this rank uses may be released on others. Collective.
        if not units or not self.table.plan.shard_parameters:
            return [True] * len(units)
        collectives = self.table.collectives
        row = torch.tensor([u.gathered for u in units], dtype=torch.int64, device=collectives.device)
        return [bool(n) for n in collectives.gather_small(row, "gathered").amin(dim=0).tolist()]


class _PackBoth:
    """Keeps weights by our hook, and everything else by the one around it."""

    def __init__(self, ours: Callable[[Tensor], Any], outer: Callable[[Tensor], Any]) -> None:
        self._ours = ours
        self._outer = outer

    def __call__(self, tensor: Tensor) -> Any:
        packed = self._ours(tensor)
        return packed if isinstance(packed, SavedWeight | SavedCast) else (self._outer(tensor),)


class UnpackBoth:
    """The other half of `_PackBoth`."""

    def __init__(self, ours: Callable[[Any], Tensor], outer: Callable[[Any], Tensor]) -> None:
        self._ours = ours
        self.outer = outer
        """The hook around ours, whose tensors it gets but for weights."""

    def __call__(self, packed: Any) -> Tensor:
        """Returns what was packed."""
        return self._ours(packed) if isinstance(packed, SavedWeight | SavedCast) else self.outer(packed[0])


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(args: Any) -> Iterator[Tensor]:
    stack = [args]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
