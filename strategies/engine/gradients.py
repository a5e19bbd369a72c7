"""Gradients on their way: from autograd into flat buffers, over the ranks, and to the means that a step uses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from shardlight.ops.sums import all_true
from shardlight.strategies.engine.agreement import Agreement
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.needs import Need
from shardlight.strategies.engine.replicas import Replicas
from shardlight.strategies.engine.sharded_gradient import ShardedGradient, stand_in
from shardlight.strategies.engine.unit import Unit
from shardlight.strategies.engine.units import UnitTable
from shardlight.strategies.engine.weights import Weights
from shardlight.strategies.engine.window import RAW, Window
from shardlight.strategies.errors import GradientError, StrategyError
from torch import Tensor, nn


class Gradients:
    """Runs backward, and owns the accumulation window."""

    def __init__(self, table: UnitTable, weights: Weights, replicas: Replicas, agreement: Agreement) -> None:
        self.table = table
        self.window = Window()
        self.handles: list[Any] = []
        self._weights = weights
        self._replicas = replicas
        self._agreement = agreement
        self.optimized: Callable[[], frozenset[int]] = lambda: frozenset(range(len(table.parameters)))
        """Numbers of the parameters that some optimizer updates; the gradients of others end with their window."""
        self._pending: frozenset[int] = frozenset()
        """Parameters whose `p.grad` stands for a gradient of the open window."""
        self._to_show = False
        """Gradients of a checkpoint are there that `p.grad` is to show."""
        self._running = False
        """A backward that the strategy knows of is under way."""
        self._stand_ins: list[Tensor] = [stand_in(p, self, b.home_dtype) for b in table.buffers for p in b.params]
        self._hook_gradients()

    def _hook_gradients(self) -> None:
        for unit in self.table.units:
            for buffer in unit.buffers:
                for slot, parameter in enumerate(buffer.params):
                    frozen = not parameter.requires_grad
                    # Also frozen ones: they may be set free later, and a hook needs requires_grad when it is made.
                    parameter.requires_grad_(True)
                    hook = self._gradient_hook(buffer.numbers[slot])
                    self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
                    parameter.requires_grad_(not frozen)

    def _gradient_hook(self, number: int) -> Callable[[Tensor], None]:
        """Returns what is called when a parameter's gradient has arrived.

        [Note: weak hooks] Python's collector does not see what a gradient hook refers to. One that held the engine
        would keep it, the parameters and their hooks for ever; the parameter itself holds the engine.
        """
        weak = ref(self)

        def arrived(parameter: Tensor) -> None:
            gradients = weak()
            if gradients is not None:
                gradients._arrived(parameter, number)

        return arrived

    def _arrived(self, parameter: Tensor, number: int) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._arrived(parameter, number)
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        unit, buffer, slot = self.table.places[number]
        if not self._running:
            raise GradientError(RAW.format(what=f"a gradient of '{buffer.layout.slots[slot].name}' arrived"))
        buffer.add_gradient(slot, gradient)
        self._has_arrived(unit, number)

    def _has_arrived(self, unit: Unit, number: int) -> None:
        arrived = self.window.arrived
        arrived[number] = arrived.get(number, 0) + 1
        turns, expected = self._weights.interleaver, unit.expected
        if turns is None:
            unit.fired.add((0, number))
        else:
            unit.fired.add((turns.turn, number))
            expected *= len(turns.users.get(unit, (0,)))
        if len(unit.fired) >= expected:
            unit.fired.clear()
            if self.table.reduce == "micro_batch" and unit.stages is None:
                self._need_reduction(unit)
            if self.table.plan.shard_parameters and unit.may_release():
                unit.release()

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a parameter of the engine's."""
        return id(tensor) in self.table.number_of_id

    def add_product(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> bool:
        """Adds `left @ right` to a parameter's gradient during backward, past autograd.

        Returns: False: nothing was done, since somebody else has a hook that waits for its gradients.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1:
                return False
        number = self.table.number_of_id[id(weight)]
        unit, buffer, slot = self.table.places[number]
        buffer.add_product(slot, left, right)
        self._has_arrived(unit, number)
        return True

    def _need_reduction(self, unit: Unit) -> None:
        kind = Need.REDUCE_SUMS if any(b.holds_a_sum() for b in unit.buffers) else Need.REDUCE
        self._agreement.need(kind.of(unit.index), f"reduce {unit.name}")

    def start_reduce(self, unit: Unit, sums: bool) -> None:
        """Starts to reduce a unit's local gradients. Collective.

        Args:
            sums: in the dtype of sums; equal on all ranks.
        """
        # Ranks for which the unit is not complete take part with zeros: sums are linear, theirs follow.
        complete = not unit.fired and (sums or not any(b.holds_a_sum() for b in unit.buffers))
        for buffer in unit.buffers:
            if buffer.trainable():
                if complete:
                    self._count(buffer)
                buffer.start_reduce(complete, sums)

    def _count(self, buffer: FlatBuffer) -> None:
        for slot in buffer.touched:
            number = buffer.numbers[slot]
            self.window.counted[number] = self.window.arrived[number]

    def backward(
        self,
        loss: Tensor,
        weight: float | None = None,
        factor: float | None = 1.0,
        run: Callable | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        """Runs backward for one micro-batch.

        Args:
            loss: 0-dim, the local mean, divided by `factor` already.
            weight: weight behind the mean (number of tokens); None: every micro-batch counts the same.
            factor: None: the window's gradient is the sum over micro-batches, not their mean.
            run: called with the loss to backpropagate; default: its `backward` method.
            loss_scale: what the loss is multiplied by on its way through backward; the first one of a window counts.
        Raises: GradientError: see Window.
        """
        self.begin(loss_scale)
        self.window.add_loss(loss.detach() * (factor or 1.0), weight, factor)
        with self.running_backward():
            share = self.window.loss_scale * (1.0 if weight is None else weight)
            if factor is not None and factor != self.window.factor:
                # A window that was saved goes on with other windows: what it holds is in the units it began with.
                share *= factor / self.window.factor
            scaled = loss if share == 1.0 and weight is None else loss * share
            (run or Tensor.backward)(scaled)
        if factor is None:
            self._tell_arrived()
            self._show_pending()

    def begin(self, loss_scale: float = 1.0) -> None:
        """Makes ready for the backwards of a micro-batch: opens a window, or goes on in one. Collective."""
        if self.window.closed and self.table.reduce == "micro_batch":
            # A rank that is ahead would add to gradients that one still in forward has not put away.
            self._agreement.meet("start of an accumulation window")
        if self.window.stepped:
            self.open_window()
        elif self.window.closed:
            self._go_on()
        else:
            self._hide()
        if self.window.loss_scale is None:
            self.window.loss_scale = loss_scale

    def _tell_arrived(self) -> None:
        """Lets every rank show the gradients that any has, where each keeps a part of their sum to drop."""
        ranks, row = self.table.collectives, torch.zeros(len(self.table.parameters), dtype=torch.int64)
        if self.table.reduce == "micro_batch" and ranks.world_size > 1:
            row[sorted(self.window.arrived)] = 1
            rows = ranks.gather_small(row.to(ranks.device), "gradients that arrived").view(ranks.world_size, -1)
            self.window.anywhere |= set(rows.any(dim=0).nonzero().view(-1).tolist())

    @contextmanager
    def running_backward(self) -> Iterator[None]:
        """Around a backward: afterwards every gradient that arrived is reduced or kept, and no unit is gathered."""
        self._weights.choose_kept()
        self.table.refresh()
        self._running = True
        try:
            with self._weights.forward("backward"):
                yield
                self._end_backward()
        finally:
            self._running = False

    def _end_backward(self) -> None:
        for unit in self.table.units:
            unit.fired.clear()
            unit.awaiting = 0
        for unit in reversed(self.table.units):
            if self.table.reduce == "micro_batch" and unit.stages is None and any(b.touched for b in unit.buffers):
                self._need_reduction(unit)
        if self.table.reduce == "micro_batch" or self.table.plan.shard_parameters:
            self._agreement.meet("end of backward")

    def open_window(self, carried: frozenset[int] = frozenset()) -> None:
        """Starts a new accumulation window; gradients of the last are dropped, but for the `carried` ones."""
        self._agreement.settle()
        self._to_show = False
        self.window = Window(carried=set(carried))
        for unit in self.table.units:
            unit.fired.clear()
        for buffer in self.table.buffers:
            buffer.open_window({n - buffer.numbers.start for n in carried if n in buffer.numbers})
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.table.parameters:
                parameter.grad = None

    def drop_open_window(self) -> None:
        """Forgets what was accumulated since the last step, on all ranks. Collective; nothing where nothing is."""
        if not self.window.closed and self.window.micro_batches:
            self._agreement.meet("start of an accumulation window")
            self.open_window()

    def _go_on(self) -> None:
        """Starts a window that adds to the gradients that are still there; see [Note: gradients that stay]."""
        self.adopt()
        there = frozenset(n for n, used in enumerate(self.window.used) if used)
        self.open_window(there & self.optimized())

    def _hide(self) -> None:
        """Takes `p.grad` out of autograd's way within a window; gradients that were set to None are dropped."""
        with torch._C.DisableTorchFunctionSubclass():
            for number in sorted(self._pending):
                parameter = self.table.parameters[number]
                if parameter.grad is None:
                    self.window.drop(number)
                    _, buffer, slot = self.table.places[number]
                    buffer.drop(slot)
                elif isinstance(parameter.grad, ShardedGradient):
                    parameter.grad = None
            self._pending = frozenset()
            for number, parameter in enumerate(self.table.parameters):
                if parameter.grad is not None:
                    raise GradientError(
                        f"'{self.table.names[number]}'.grad was set outside of backward: the gradients of "
                        f"{self.table.plan.name} come from `backward` alone; change them when they are final."
                    )

    def _show_pending(self) -> None:
        """In manual optimization every backward may be a window's last: its gradients can be seen, and set to None."""
        self._pending = frozenset(self.window.arrived) | self.window.carried | self.window.anywhere
        for number in self._pending:
            self.table.parameters[number].grad = self._stand_ins[number]

    def close_window(self) -> None:
        """Makes the gradients of the window final: reduced over ranks, and means. Collective; does nothing twice.

        Raises: GradientError: a contribution was lost.
        """
        if self.window.closed:
            return
        self._hide()
        self._agreement.meet("end of the accumulation window")
        n_params = len(self.table.parameters)
        flags = self._replicas.changed(), any(b.holds_a_sum() for b in self.table.buffers)
        row = self.window.row(n_params, [b.written for b in self.table.buffers], flags).to(
            self.table.collectives.device
        )
        rows = self.table.collectives.gather_small(row, "end of the accumulation window").cpu()
        buffers_changed, several = self.window.close(rows, n_params)
        several_shared = self._agree_with_stages()
        scale = self.window.factor / self.window.total_weight if self.window.total_weight else 0.0
        scale /= self.window.loss_scale or 1.0
        with torch.no_grad():
            written = [b for b, by_any in zip(self.table.buffers, self.window.written, strict=True) if by_any]
            self._reduce_window([b for b in written if b.reduce == "window" and b.ranks is self.table.ranks], several)
            for ranks in self.table.ranks.joint.values():
                self._reduce_window([b for b in written if b.ranks is ranks], several_shared)
            finite = [buffer.finish(scale) for buffer in written]
            self.window.check_complete(self.table.names)
            self.show()
            if all_true(finite):
                self.window.finite = frozenset(range(n_params)), self.versions()
            if buffers_changed:
                self._replicas.synchronise()

    def _agree_with_stages(self) -> bool:
        """Learns what other stages of a pipeline have written; returns whether one has sums of shared gradients."""
        ranks, several = self.table.ranks, False
        for joint in ranks.joint.values():
            buffers = [(i, b) for i, b in enumerate(self.table.buffers) if b.ranks is joint]
            numbers = [n for _, b in buffers for n in b.numbers]
            row = [any(b.holds_a_sum() for _, b in buffers), *(self.window.written[i] for i, _ in buffers)]
            row += [self.window.used[n] for n in numbers]
            mine = torch.tensor(row, dtype=torch.int64, device=joint.world.device)
            there = joint.world.gather_small(mine, "gradients that stages share").any(dim=0).tolist()
            several = several or there[0]
            for (index, _), written in zip(buffers, there[1:], strict=False):
                self.window.written[index] = written
            for number, used in zip(numbers, there[1 + len(buffers) :], strict=True):
                self.window.used[number] = used
        self.window.any_used = any(self.window.used)
        if ranks.model.world_size > 1:
            mine = torch.tensor([int(self.window.any_used)], dtype=torch.int64, device=ranks.model.device)
            self.window.any_used = bool(ranks.model.gather_small(mine, "gradients of other ranks").any())
        return several

    # --- for checkpoints

    @property
    def summed_from(self) -> int:
        """The first of the ranks whose gradients are added up together before the window ends: this one, if alone."""
        ranks = self.table.ranks
        return ranks.world.rank - (ranks.shard.rank if self.table.reduce == "micro_batch" else 0)

    def unfinished(self) -> tuple[Window, bool] | None:
        """Returns the window if a later step is to use its gradients, and whether `p.grad` shows them before it ends.

        Takes in what was done to `p.grad` until now, as the next backward or step would.
        """
        self._agreement.settle()
        self.show_restored()
        shown = bool(self._pending)
        if self.window.stepped:
            return None
        if self.window.closed:
            self.adopt()
            return (self.window, False) if any(self.window.used) else None
        self._hide()
        if shown:
            self._show_pending()
        return (self.window, shown) if self.window.micro_batches or self.window.carried else None

    def restore(self, window: Window, shown: bool) -> None:
        """Goes on with a window of a checkpoint, once the buffers have its gradients.

        Args:
            shown: see `unfinished`.
        """
        self.window = window
        if window.closed:
            window.written = [any(window.used[n] for n in b.numbers) for b in self.table.buffers]
        self._to_show = window.closed or shown

    def show_restored(self) -> None:
        """Makes restored gradients visible as `p.grad`: when training begins, as Lightning sets all to None before."""
        if self._to_show:
            self._to_show = False
            if self.window.closed:
                self.show()
            else:
                self._show_pending()

    def versions(self) -> tuple[int, ...]:
        """Returns what tells whether final gradients were changed: `p.grad` is a view of these tensors."""
        return tuple(t._version for b in self.table.buffers for t in (b.grad, b.full_grad) if t is not None)

    def _reduce_window(self, buffers: list[FlatBuffer], several: bool) -> None:
        # Each is under way while the one before is added up.
        for number, buffer in enumerate(buffers):
            self._count(buffer)
            buffer.start_reduce(True, several)
            if number:
                buffers[number - 1].finish_reduce()
        if buffers:
            buffers[-1].finish_reduce()

    def show(self) -> None:
        """Makes every final gradient visible as `p.grad`."""
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self.table.parameters):
                if self.window.used[number]:
                    if self.table.plan.shard_optimizer:
                        parameter.grad = self._stand_ins[number]
                    else:
                        _, buffer, slot = self.table.places[number]
                        assert buffer.full_grad is not None
                        parameter.grad = buffer.slice(slot, buffer.full_grad)

    def materialise(self, parameter: nn.Parameter) -> Tensor:
        """See [Note: sharded gradients].

        Raises: StrategyError: the stand-in is of an earlier step.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(parameter.grad, ShardedGradient):
                self.close_window()
            present = parameter.grad
        if isinstance(present, ShardedGradient):
            present = self._materialise_buffer(parameter)
        if present is None:
            raise StrategyError("a gradient of an earlier step was used: read `p.grad` anew in each step.")
        return present

    def _materialise_buffer(self, parameter: nn.Parameter) -> Tensor | None:
        # The whole buffer at once: who looks at one gradient mostly looks at all.
        _, buffer, _ = self.table.place[parameter]
        self._agreement.meet(f"gradients of {buffer.name}")
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            full = buffer.gather_gradients()
            full = full.clone() if full is buffer.full_grad else full
            for slot, other in enumerate(buffer.params):
                if isinstance(other.grad, ShardedGradient):
                    other.grad = buffer.slice(slot, full)
            return parameter.grad

    def adopt(self) -> bool:
        """Takes what hooks did to `p.grad` into the shards; returns whether any gradient may have been changed."""
        changed = False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self.table.parameters):
                gradient = parameter.grad
                if not self.window.used[number]:
                    if gradient is not None:
                        raise GradientError(
                            f"'{self.table.names[number]}'.grad was set, but no rank has a gradient for it in this "
                            "step: change gradients that are there, or let the parameter take part in the loss."
                        )
                    continue
                if isinstance(gradient, ShardedGradient):
                    continue
                if gradient is None:
                    self.window.used[number] = False
                    changed = True
                    continue
                changed = self._take_in(parameter, gradient) or changed
        return changed

    def _take_in(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        _, buffer, slot = self.table.place[parameter]
        if self.table.plan.shard_optimizer:
            assert buffer.grad is not None
            buffer.settle()
            part = buffer.piece_of_shard(slot, buffer.grad)
            if part is not None:
                piece = buffer.pieces[slot]
                part.copy_(gradient.reshape(-1)[piece.start : piece.stop])
            return True
        assert buffer.full_grad is not None
        view = buffer.slice(slot, buffer.full_grad)
        if gradient.data_ptr() == view.data_ptr():
            return False
        view.copy_(gradient)
        parameter.grad = view
        return True

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the full mean gradient of the closed window, None if no rank had one. Collective.

        Raises: StrategyError: the gradients are not final yet, or the parameter is not one of the model's.
        """
        if parameter not in self.table.place:
            raise StrategyError("gradient: the tensor is not a parameter of the model that this strategy trains.")
        if not self.window.closed:
            raise StrategyError("gradient: gradients are final from on_after_backward of a stepping batch to its step.")
        if not self.window.used[self.table.number[parameter]]:
            return None
        _, buffer, slot = self.table.place[parameter]
        s = buffer.layout.slots[slot]
        self._agreement.meet(f"gradient of {s.name}")
        with torch.no_grad():
            full = buffer.full_grad if not self.table.plan.shard_optimizer else buffer.gather_gradients()
            assert full is not None
            return buffer.slice(slot, full).clone()
