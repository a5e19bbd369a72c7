"""The engine: cuts a model into units, and moves their weights and gradients as the model runs.

Usable without Lightning:

    engine = Engine(model, PLANS["zero3"], group=dist.group.WORLD)
    engine.take_optimizer(optimizer)             # the user's own, made on the full parameters
    with engine.forward():
        loss = model(x).mean()
    engine.backward(loss)                        # repeat per micro-batch
    engine.close_window()                        # gradients are final
    engine.clip(optimizer, max_norm=1.0)
    engine.step(optimizer)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlight.strategies.engine import norms
from shardlight.strategies.engine.agreement import Agreement
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.optimizer import LocalParameters, shard_optimizer
from shardlight.strategies.engine.partition import UnitSpec, find_units
from shardlight.strategies.engine.plan import Reduce, StatePlan
from shardlight.strategies.engine.released import ReleasedParameter, mark_gathered
from shardlight.strategies.engine.replicas import Replicas
from shardlight.strategies.engine.unit import SavedWeight, Unit
from shardlight.strategies.engine.window import Window
from shardlight.strategies.errors import GradientError, StrategyError

_GATHER, _REDUCE = 0, 1


class Engine:
    """Owns the sharded state of one model.

    Args:
        model: on its device, with full parameters; equal structure on all ranks. Rank 0's weights and buffers win.
        plan: the row of the ZeRO table.
        group: process group of the data-parallel ranks; None: one process.
        reduce: overrides the plan's default.
        unit_classes: see find_units.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StatePlan,
        group: dist.ProcessGroup | None = None,
        reduce: Reduce | None = None,
        unit_classes: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.plan = plan
        self.reduce: Reduce = reduce or plan.reduce
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.collectives = Collectives(group, device)
        self.agreement = Agreement(self.collectives, self._serve)
        self.window = Window()
        self.running = 0
        """How many `forward` and `backward` contexts are open; weights can be gathered on use while > 0."""
        with torch.no_grad():
            specs = find_units(model, unit_classes)
            self.units: list[Unit] = [self._make_unit(i, spec) for i, spec in enumerate(specs)]
            self.replicas = Replicas(model, self.collectives)
        self.buffers: list[FlatBuffer] = [b for u in self.units for b in u.buffers]
        self.parameters: list[nn.Parameter] = [p for b in self.buffers for p in b.params]
        self.names: list[str] = [s.name for b in self.buffers for s in b.layout.slots]
        self.number: dict[nn.Parameter, int] = {p: i for i, p in enumerate(self.parameters)}
        self._place: dict[nn.Parameter, tuple[Unit, FlatBuffer, int]] = {
            p: (u, b, slot) for u in self.units for b in u.buffers for slot, p in enumerate(b.params)
        }
        self._unit_of_storage: dict[int, Unit] = {
            b.full.untyped_storage()._cdata: u for u in self.units for b in u.buffers
        }
        self._handles: list[Any] = []
        self.local_parameters = LocalParameters(self._place, plan)
        self._hook_gradients()
        if plan.shard_parameters:
            for unit, spec in zip(self.units, specs, strict=True):
                self._hook_forward(unit, spec)
                unit.release()

    def _make_unit(self, index: int, spec: UnitSpec) -> Unit:
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in spec.params:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append((name, parameter))
        buffers = [
            FlatBuffer(spec.name, params, self.plan, self.reduce, self.collectives, self) for params in kinds.values()
        ]
        return Unit(index, spec.name, spec.keep, buffers)

    # --- weights: when a unit is gathered and released

    def _hook_forward(self, unit: Unit, spec: UnitSpec) -> None:
        def before(module: nn.Module, args: Any) -> None:
            if not self.running:
                return
            unit.depth += 1
            self._gather(unit)
            if torch.is_grad_enabled() and not _in_backward() and not unit.expected:
                for tensor in _tensors(args):
                    if tensor.requires_grad:
                        # No gradient of its own tells when a frozen unit's backward is over: its inputs' does.
                        tensor.register_hook(lambda _: unit.release())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            unit.depth = max(0, unit.depth - 1)
            # In backward this is a recomputation: the unit is needed until its gradients have arrived.
            if self.running and not unit.keep and not _in_backward():
                unit.release()

        for root in spec.roots:
            self._handles.append(root.register_forward_pre_hook(before, prepend=True))
            self._handles.append(root.register_forward_hook(after))

    def on_use(self, parameter: nn.Parameter, operation: str) -> None:
        """Called when a released parameter's values are used; see [Note: released parameters].

        Raises: StrategyError: no step is running.
        """
        unit, buffer, slot = self._place[parameter]
        if not self.running:
            raise StrategyError(
                f"'{buffer.layout.slots[slot].name}' is sharded ({self.plan.name}) and its values were used outside a "
                f"training or evaluation step, by '{operation}': do this under `with strategy.gathered(module):`, on "
                "every rank."
            )
        self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        if not unit.gathered:
            self.agreement.need(2 * unit.index + _GATHER, f"gather {unit.name}")

    def _serve(self, code: int) -> None:
        unit = self.units[code // 2]
        with torch.no_grad():
            if code % 2 == _GATHER:
                unit.gather()
            else:
                self._reduce(unit)

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is Tensor or isinstance(tensor, nn.Parameter):
            unit = (
                self._unit_of_storage.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
            )
            return (tensor, tensor._version) if unit is None else SavedWeight(unit, tensor)
        return tensor, None

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, SavedWeight):
            tensor, version = packed.tensor, packed.version
            self._gather(packed.unit)
        else:
            tensor, version = packed
        # With hooks autograd leaves this check to us.
        if version is not None and tensor._version != version:
            raise GradientError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after forward "
                f"(version {tensor._version}, expected {version}). Run backward before the step, or clone it first."
            )
        return tensor

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around every use of the model: weights are gathered as they are used, and released at the end."""
        save = self.plan.shard_parameters and torch.is_grad_enabled()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if save else nullcontext()
        if not self.running:
            for unit in self.units:
                unit.refresh()
        self.running += 1
        failed = True
        try:
            with hooks:
                yield
            failed = False
        finally:
            self.running -= 1
            self._release_all(force=not failed)

    def _release_all(self, force: bool) -> None:
        if not self.plan.shard_parameters:
            return
        for unit in self.units:
            if self.running == 0:
                unit.depth = 0
            unit.release(force and self.running == 0)

    @contextmanager
    def gathered(self, module: nn.Module | None = None) -> Iterator[None]:
        """Full weights of `module` (default: the whole model) on every rank, inside the context. Collective.

        Changes made to them inside, the same on every rank, are kept.
        """
        self.agreement.meet("gathered")
        wanted = {id(p) for p in (module or self.model).parameters()}
        units = [u for u in self.units if any(id(p) in wanted for b in u.buffers for p in b.params)]
        with torch.no_grad():
            for unit in units:
                unit.pinned += 1
                if not unit.gathered:
                    unit.gather()
        try:
            yield
        finally:
            with torch.no_grad():
                for unit in units:
                    unit.pinned -= 1
                    if self.plan.shard_parameters:
                        unit.write_back()
                        unit.release(force=self.running == 0)

    # --- gradients

    def _hook_gradients(self) -> None:
        for unit in self.units:
            for buffer in unit.buffers:
                for slot, parameter in enumerate(buffer.params):
                    frozen = not parameter.requires_grad
                    # Also frozen ones: they may be set free later, and a hook needs requires_grad when it is made.
                    parameter.requires_grad_(True)
                    hook = self._gradient_hook(unit, buffer, slot)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                    parameter.requires_grad_(not frozen)

    def _gradient_hook(self, unit: Unit, buffer: FlatBuffer, slot: int) -> Callable[[Tensor], None]:
        number = self.number[buffer.params[slot]]
        name = buffer.layout.slots[slot].name

        def arrived(parameter: Tensor) -> None:
            gradient = parameter.grad
            parameter.grad = None
            if gradient is None:
                return
            self.window.arrive(number, name)
            with torch.no_grad():
                buffer.add_gradient(slot, gradient)
            unit.fired.add(parameter)
            if len(unit.fired) >= unit.expected:
                unit.fired.clear()
                if self.reduce == "micro_batch":
                    self.agreement.need(2 * unit.index + _REDUCE, f"reduce {unit.name}")
                if self.plan.shard_parameters:
                    unit.release()

        return arrived

    def _reduce(self, unit: Unit) -> None:
        # Ranks for which the unit is not complete take part with zeros: sums are linear, theirs follow.
        complete = not unit.fired
        for buffer in unit.buffers:
            if buffer.trainable():
                if complete:
                    self._count(buffer)
                buffer.reduce(complete)

    def _count(self, buffer: FlatBuffer) -> None:
        for slot in buffer.touched:
            number = self.number[buffer.params[slot]]
            self.window.counted[number] = self.window.arrived[number]

    def backward(
        self, loss: Tensor, weight: float | None = None, factor: float | None = 1.0, run: Callable | None = None
    ) -> None:
        """Runs backward for one micro-batch.

        Args:
            loss: 0-dim, the local mean, divided by `factor` already.
            weight: weight behind the mean (number of tokens); None: every micro-batch counts the same.
            factor: None: the window's gradient is the sum over micro-batches, not their mean.
            run: called with the loss to backpropagate; default: its `backward` method.
        Raises: GradientError: see Window.
        """
        if self.window.stepped:
            self.open_window()
        self.window.add_loss(loss.detach() * (factor or 1.0), weight, factor)
        with self.running_backward():
            scaled = loss if weight is None else loss * weight
            (run or Tensor.backward)(scaled)

    @contextmanager
    def running_backward(self) -> Iterator[None]:
        """Around a backward: afterwards every gradient that arrived is reduced or kept, and no unit is gathered."""
        for unit in self.units:
            unit.refresh()
        with self.forward():
            yield
            self._end_backward()

    def _end_backward(self) -> None:
        for unit in self.units:
            unit.fired.clear()
        for unit in reversed(self.units):
            if self.reduce == "micro_batch" and any(b.touched for b in unit.buffers):
                self.agreement.need(2 * unit.index + _REDUCE, f"reduce {unit.name}")
        if self.reduce == "micro_batch" or self.plan.shard_parameters:
            self.agreement.meet("end of backward")

    def open_window(self) -> None:
        """Starts a new accumulation window; gradients of the last are dropped."""
        self.window = Window()
        for unit in self.units:
            unit.fired.clear()
        for buffer in self.buffers:
            buffer.clear_gradients()
        for parameter in self.parameters:
            parameter.grad = None

    def close_window(self) -> None:
        """Makes the gradients of the window final: reduced over ranks, and means. Collective; does nothing twice.

        Raises: GradientError: a contribution was lost.
        """
        if self.window.closed:
            return
        self.agreement.meet("end of the accumulation window")
        row = self.window.row(len(self.parameters), float(self.replicas.changed())).to(self.collectives.device)
        buffers_changed = self.window.close(self.collectives.gather_small(row, "end of the accumulation window").cpu())
        scale = self.window.factor / self.window.total_weight if self.window.total_weight else 0.0
        with torch.no_grad():
            first = 0
            for buffer in self.buffers:
                used = any(self.window.used[first : first + len(buffer.params)])
                first += len(buffer.params)
                if not used:
                    continue
                if self.reduce == "window":
                    self._count(buffer)
                    buffer.reduce(True)
                buffer.finish(scale)
            self.window.check_complete(self.names)
            self._show_gradients()
            if buffers_changed:
                self.replicas.synchronise()

    def _show_gradients(self) -> None:
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                raise GradientError(
                    f"'{self.names[number]}'.grad was set outside of backward: the gradients of {self.plan.name} come "
                    "from `backward` alone; change them in on_before_optimizer_step."
                )
        if not self.plan.shard_optimizer:
            for _, buffer, slot, parameter in self._used():
                s = buffer.layout.slots[slot]
                assert buffer.full_grad is not None
                parameter.grad = buffer.full_grad[s.start : s.stop].view(s.shape)

    def _used(self) -> Iterable[tuple[Unit, FlatBuffer, int, nn.Parameter]]:
        for number, parameter in enumerate(self.parameters):
            if self.window.used[number]:
                yield *self._place[parameter], parameter

    def show_full_gradients(self) -> None:
        """Gives every parameter its full mean gradient as `grad`, where parameters are replicated. Collective."""
        if self.plan.shard_parameters or not self.plan.shard_optimizer or self.plan.shard_gradients:
            return
        with torch.no_grad():
            for buffer in self.buffers:
                if buffer.reduced:
                    buffer.gather_gradients()
            for _, buffer, slot, parameter in self._used():
                s = buffer.layout.slots[slot]
                assert buffer.full_grad is not None
                parameter.grad = buffer.full_grad[s.start : s.stop].view(s.shape)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the full mean gradient of the closed window, None if no rank had one. Collective.

        Raises: StrategyError: the gradients are not final yet, or the parameter is not one of the model's.
        """
        if parameter not in self._place:
            raise StrategyError("gradient: the tensor is not a parameter of the model that this strategy trains.")
        if not self.window.closed:
            raise StrategyError("gradient: gradients are final from on_after_backward of a stepping batch to its step.")
        if not self.window.used[self.number[parameter]]:
            return None
        _, buffer, slot = self._place[parameter]
        s = buffer.layout.slots[slot]
        self.agreement.meet(f"gradient of {s.name}")
        with torch.no_grad():
            full = buffer.full_grad if not self.plan.shard_optimizer else buffer.gather_gradients()
            assert full is not None
            return full[s.start : s.stop].view(s.shape).clone()

    # --- the step

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Puts this rank's parts of the parameters into the optimizer's groups, in place. See shard_optimizer."""
        shard_optimizer(optimizer, self.local_parameters)

    def norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of all final gradients (of the optimizer's parameters), 0-dim fp64, equal on all ranks."""
        wanted = None if optimizer is None else self.local_parameters.numbers_of(optimizer)
        used = [u and (wanted is None or n in wanted) for n, u in enumerate(self.window.used)]
        with torch.no_grad():
            return norms.global_norm(self.buffers, used, norm_type, self.collectives)

    def clip(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`; returns the norm before. Collective."""
        self.close_window()
        total = self.norm(optimizer, norm_type)
        factor = float(max_norm / (total + 1e-6))
        if not factor >= 1.0:
            with torch.no_grad():
                for gradient in self._local_gradients(optimizer):
                    gradient *= factor
        return total

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamps every element of the gradients to [-limit, limit]."""
        self.close_window()
        with torch.no_grad():
            for gradient in self._local_gradients(optimizer):
                gradient.clamp_(-limit, limit)

    def _local_gradients(self, optimizer: Optimizer) -> Iterator[Tensor]:
        numbers = self.local_parameters.numbers_of(optimizer)
        for number in sorted(numbers):
            if self.window.used[number]:
                gradient = self.local_parameters.gradient(self.parameters[number])
                if gradient is not None:
                    yield gradient

    def step(self, optimizer: Optimizer) -> bool:
        """Steps the optimizer on this rank's parts and makes the new weights everyone's. Collective.

        Returns: False: no rank had any weight in this window (no valid token), and nothing was changed.
        """
        self.close_window()
        if not self.window.total_weight:
            self.open_window()
            return False
        numbers = self.local_parameters.numbers_of(optimizer)
        used = [self.parameters[n] for n in sorted(numbers) if self.window.used[n]]
        self.local_parameters.set_gradients(used)
        optimizer.step()
        self.local_parameters.clear_gradients(used)
        with torch.no_grad():
            for buffer in self.buffers:
                if any(self.number[p] in numbers for p in buffer.params):
                    buffer.publish()
        # Tells autograd that the weights changed: a backward through an older forward is an error, as it always is.
        if self.plan.shard_optimizer:
            torch.autograd.graph.increment_version(tuple(self.parameters))
        self.window.stepped = True
        return True

    # --- reading and writing state from outside

    def owned_piece(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        """Returns (start, flat part) of the elements that this rank writes to a checkpoint, each element on one rank.

        The part is a view of the live weights. None: not a parameter the engine holds.
        """
        if parameter not in self._place:
            return None
        _, buffer, slot = self._place[parameter]
        piece = buffer.pieces.get(slot)
        part = buffer.piece_of_shard(slot, buffer.shard)
        return (0, buffer.shard[:0]) if piece is None or part is None else (piece.start, part)

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns the shape of a parameter or any other tensor, also of a released one."""
        return tuple(tensor.shape)

    def weights_changed(self) -> None:
        """Makes shards that were written from outside everyone's weights. Collective."""
        with torch.no_grad():
            for buffer in self.buffers:
                if not self.plan.shard_parameters:
                    self.collectives.all_gather(buffer.full, buffer.shard, f"publish {buffer.name}")
        torch.autograd.graph.increment_version(tuple(self.parameters))

    def detach(self) -> None:
        """Takes the engine off its model, which is left with full plain weights. Collective."""
        with self.gathered(), torch.no_grad():
            whole = [p.data.clone() for p in self.parameters]
        for handle in self._handles:
            handle.remove()
        for parameter, data in zip(self.parameters, whole, strict=True):
            if isinstance(parameter, ReleasedParameter):
                mark_gathered(parameter)
            parameter.data = data

    # --- accounting

    def state_bytes(self, optimizers: Sequence[Optimizer] = ()) -> int:
        """Counts the live bytes of model state on this rank: weights, gradients, optimizer state; each storage once."""
        tensors = [t for b in self.buffers for t in b.tensors()]
        for optimizer in optimizers:
            tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


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
