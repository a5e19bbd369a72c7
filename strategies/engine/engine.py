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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from shardlight.strategies.engine.agreement import Agreement
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.choices import KeepGathered, MomentsDtype, OptimizerKernel, Transport
from shardlight.strategies.engine.deferred.tensors import home_of, materialise_buffers
from shardlight.strategies.engine.dtypes import AS_THEY_ARE, DtypePolicy
from shardlight.strategies.engine.final_gradients import FinalGradients
from shardlight.strategies.engine.gradients import Gradients
from shardlight.strategies.engine.groups import EngineGroups, Ranks
from shardlight.strategies.engine.kernels import why_not_compiled, why_unknown
from shardlight.strategies.engine.needs import Need, kind_of, unit_of
from shardlight.strategies.engine.offload import Offload
from shardlight.strategies.engine.optimizer import LocalParameters, shard_optimizer
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.plan import Reduce, StatePlan
from shardlight.strategies.engine.ranges import STEP, begin, end
from shardlight.strategies.engine.raw_step import RawStep
from shardlight.strategies.engine.released import mark_gathered
from shardlight.strategies.engine.replicas import Replicas
from shardlight.strategies.engine.slices import Slice
from shardlight.strategies.engine.tiers import open_tiers
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.engine.transforms.compile import is_compiled, unwrap_compiled
from shardlight.strategies.engine.units import UnitTable
from shardlight.strategies.engine.weights import Weights
from shardlight.strategies.engine.window import RAW, StepResult, Window
from shardlight.strategies.errors import GradientError, StrategyError
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer


def _no_engine() -> None:
    """What an engine is once it was pickled."""


class Engine:
    """Owns the sharded state of one model.

    Args:
        model: on its device, with full parameters or built under `deferred_init`; equal structure on all ranks. Rank
            0's weights and buffers win.
        plan: the row of the ZeRO table.
        group: process group of the data-parallel ranks, or the groups of hybrid sharding; None: one process.
        reduce: overrides the plan's default.
        unit_classes: see find_units.
        transforms: what is done to the blocks before they are sharded.
        dtypes: see DtypePolicy.
        keep_gathered, keep_small, collectives, optimizer_kernel, moments_dtype, offload: see EngineOptions.
        part: see ModelPart.
    Raises: StrategyError: a unit class or a transform finds no module.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StatePlan,
        group: dist.ProcessGroup | EngineGroups | None = None,
        reduce: Reduce | None = None,
        unit_classes: Sequence[str] = (),
        transforms: BlockTransforms | None = None,
        dtypes: DtypePolicy = AS_THEY_ARE,
        keep_gathered: KeepGathered = "no",
        keep_small: int = 0,
        collectives: Transport = "auto",
        optimizer_kernel: OptimizerKernel = "auto",
        moments_dtype: MomentsDtype | None = None,
        offload: Offload | None = None,
        part: ModelPart = WHOLE_MODEL,
    ) -> None:
        if (transforms is not None and transforms.compile != "no") or is_compiled(model):
            # torch.compile does not look through classes of parameters.
            dtypes = replace(dtypes, guarded=False)
        self._wrap_compiled = unwrap_compiled(model)
        self.model = model
        self.plan = plan
        dtypes = dtypes.under(plan)
        device = next((home_of(p) for p in model.parameters()), torch.device("cpu"))
        groups = group if isinstance(group, EngineGroups) else EngineGroups(group)
        self.ranks = Ranks(groups, device, collectives)
        self.collectives = self.ranks.world
        """Over the ranks that have the same parameters; `everyone`: over all, also those of other pipeline stages."""
        self.everyone = self.ranks.everyone
        self.part = part
        self.agreement = Agreement(self.collectives, self)
        self._had: dict[int, bool] = {}
        """By unit that is being gathered: whether this rank had it gathered already."""
        self.tiers = open_tiers(offload, self.ranks.shard.pages, device)
        """What moves state that is on disk; None: all is in memory."""
        with torch.no_grad():
            materialise_buffers(model)
            self.table = UnitTable(
                model,
                plan,
                reduce or plan.reduce,
                unit_classes,
                self.ranks,
                self,
                dtypes,
                keep_small,
                self.tiers,
                part,
            )
            self.replicas = Replicas(model, self.ranks)
        self.weights = Weights(model, self.table, self.agreement, keep_gathered)
        blocks = [root for spec in self.table.specs for root in spec.roots if spec.block]
        self._undo_transforms = (transforms or BlockTransforms()).apply(
            model, blocks, self.weights.saving, self.weights.gather_module if plan.shard_parameters else None
        )
        self.gradients = Gradients(self.table, self.weights, self.replicas, self.agreement)
        moments = None if moments_dtype is None else getattr(torch, moments_dtype)
        self.local_parameters = LocalParameters(self.table, moments)
        self.final_gradients = FinalGradients(self.table, self.local_parameters, self.gradients, self.agreement)
        self._optimizer_kernel: OptimizerKernel = optimizer_kernel
        self.stepping = False
        """`step` is under way."""
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._optimizer_hooks: list[Any] = []
        self.gradients.optimized = self._optimized
        self.on_raw_step: Callable[[], Callable[[Optimizer, StepResult], None] | None] = lambda: None
        """A weak reference to who is told of a step that an optimizer made by itself, not by `step`."""
        # The parts' own calls, which are this class's interface as well.
        self.gathered = self.weights.gathered
        self.backward = self.gradients.backward
        self.open_window = self.gradients.open_window
        self.close_window = self.gradients.close_window
        self.gradient = self.gradients.gradient
        self.norm = self.final_gradients.norm
        self.clip = self.final_gradients.clip
        self.clip_value = self.final_gradients.clip_value

    def __reduce__(self) -> tuple[Any, ...]:
        # Parameters know their engine. What is pickled of a model are its weights; who loads them has no engine.
        return _no_engine, ()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """See Weights.forward. Raises: GradientError: a backward inside that is not the engine's."""
        try:
            with self.weights.forward():
                yield
        except RuntimeError as error:
            # Autograd tried to add to the stand-in of a final gradient.
            if "more than one element of the written-to tensor" in str(error):
                raise GradientError(RAW.format(what="a gradient arrived")) from error
            if any(b.shows_home and not b.guarded for b in self.buffers) and "dtype" in str(error):
                error.add_note(
                    f"Under {self.plan.name}, mixed precision and compilation weights of matrix-multiplying modules "
                    "are 16-bit. A module that switches autocast off needs its weights in fp32: name it in "
                    "strategy.keep_fp32."
                )
            raise

    @property
    def window(self) -> Window:
        """The accumulation window that is open, or was closed last."""
        return self.gradients.window

    @property
    def buffers(self) -> list[FlatBuffer]:
        """All flat buffers, in order."""
        return self.table.buffers

    def holds(self, model: nn.Module) -> bool:
        """Whether this engine was made for the model and its parameters are still the model's."""
        floating = (p for p in model.parameters() if p.is_floating_point() or p.is_complex())
        return self.model is model and all(p in self.table.place for p in floating)

    def on_use(self, parameter: nn.Parameter, operation: str) -> None:
        """See Weights.on_use."""
        self.weights.on_use(parameter, operation)

    def equal(self, first: Tensor, second: Tensor) -> bool:
        """See Weights.equal."""
        return self.weights.equal(first, second)

    def on_copy_use(self, parameter: nn.Parameter) -> None:
        """See Weights.on_copy_use."""
        self.weights.on_copy_use(parameter)

    # --- the collectives that ranks agree on: see Server

    def start(self, code: int) -> None:
        """Starts the collective that a need stands for."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.start(code)
        unit, kind = self.table.units[unit_of(code)], kind_of(code)
        if kind is Need.GATHER:
            self._had[unit.index] = unit.gathered
            unit.start_gather()
            self.weights.gathering(unit)
        elif kind is not Need.GATHER_HOME:
            self.gradients.start_reduce(unit, kind is Need.REDUCE_SUMS)

    def finish(self, code: int, own: bool) -> None:
        """Returns when the collective is done; what this rank gathered for others alone is released."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.finish(code, own)
        unit, kind = self.table.units[unit_of(code)], kind_of(code)
        if kind is Need.GATHER:
            unit.finish_gather()
            if not own and not self._had[unit.index]:
                # A rank that waits for others must not end up with the whole model. Nobody here has used it.
                unit.drop()
        elif kind is Need.GATHER_HOME:
            unit.gather_home(own)
        else:
            unit.finish_reduce()

    def can_prefetch(self, code: int) -> bool:
        """See Server.can_prefetch."""
        unit = self.table.units[unit_of(code)]
        return not unit.arriving and not any(b.gathered for b in unit.buffers)

    def size(self, code: int) -> int:
        """See Server.size."""
        return self.table.units[unit_of(code)].nbytes

    # --- the step

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Gets an optimizer that was made on the full parameters ready. See shard_optimizer.

        Raises: StrategyError: also where moments are to be kept in 16 bits, and its step is its own.
        """
        self._check_moments(optimizer)
        shard_optimizer(optimizer, self.local_parameters)
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            raw = RawStep(self)
            self._optimizer_hooks += [
                optimizer.register_step_pre_hook(raw.before),
                optimizer.register_step_post_hook(raw.after),
            ]

    def _optimized(self) -> frozenset[int]:
        return frozenset().union(*(self.local_parameters.numbers_of(o) for o in self._optimizers))

    def step(self, optimizer: Optimizer, keep_gradients: bool = False) -> StepResult:
        """Steps the optimizer on this rank's parts and makes the new weights everyone's. Collective.

        Without any weight in the window, or with a gradient that is not finite on some rank, no rank changes anything.

        Args:
            keep_gradients: they stay until they are set to None, as in plain PyTorch; else they end with the step.
        """
        opened = begin(STEP) if profiler._is_profiler_enabled else None
        used = self.prepare_step(optimizer)
        if isinstance(used, StepResult):
            self.window.stepped = not keep_gradients
            if opened is not None:
                end(opened)
            return used
        with self.local_parameters.stepping(optimizer):
            self.stepping = True
            try:
                self.give_gradients(optimizer, used)
                optimizer.step()
            finally:
                self.stepping = False
            self.local_parameters.clear_gradients(optimizer, used)
        self.finish_step(optimizer, used)
        self.window.stepped = not keep_gradients
        if opened is not None:
            end(opened)
        return StepResult.STEPPED

    def why_no_kernel(self, optimizer: Optimizer) -> str | None:
        """Returns why the optimizer's own arithmetic runs; None: ours takes its step, which is a compiled op.

        Where moments are kept in 16 bits ours takes it with PyTorch's operations where nothing was compiled.
        """
        if self.local_parameters.needs_whole(optimizer):
            return "it needs whole parameters"
        why = why_unknown(optimizer, self._optimizer_kernel)
        if why is not None or self.local_parameters.moments is not None:
            return why
        return why_not_compiled(optimizer, self.collectives.device)

    def _check_moments(self, optimizer: Optimizer) -> None:
        moments = self.local_parameters.moments
        why = None if moments is None else self.why_no_kernel(optimizer)
        if why is not None:
            kept = str(moments).removeprefix("torch.")
            raise StrategyError(
                f"moments_dtype={kept}: {type(optimizer).__name__} takes its step itself ({why}), and keeps what it "
                "likes. Leave moments_dtype out, or use AdamW, Adam, SGD, Adagrad or RMSprop of torch.optim, or Lion."
            )

    def give_gradients(self, optimizer: Optimizer, used: list[int]) -> None:
        """Gives an optimizer that is about to step its gradients, or lets an op take the step with them.

        Raises: StrategyError: its step was known, and its moments in 16 bits, and it is its own now.
        """
        if self.tiers is not None:
            self.local_parameters.streamed_step(optimizer, used, self.why_no_kernel(optimizer) is None)
        elif self.why_no_kernel(optimizer) is None:
            self.local_parameters.kernel_step(optimizer, used)
        else:
            self._check_moments(optimizer)
            self.local_parameters.set_gradients(optimizer, used)

    def prepare_step(self, optimizer: Optimizer) -> list[int] | StepResult:
        """Returns the numbers of the optimizer's parameters that have a gradient, or why there is no step."""
        self.close_window()
        self.gradients.adopt()
        self.weights.release_for_step()
        self.take_in_changes()
        if not self.window.total_weight and self.window.any_used:
            self.open_window()
            return StepResult.NO_WEIGHT
        numbers = self.local_parameters.numbers_of(optimizer)
        with torch.no_grad():
            self.window.not_finite = self.final_gradients.not_finite(numbers)
        if self.window.not_finite:
            return StepResult.NOT_FINITE
        return [n for n in sorted(numbers) if self.window.used[n]]

    def finish_step(self, optimizer: Optimizer, used: list[int]) -> None:
        """Makes the weights that this rank has updated everyone's. Collective."""
        numbers = self.local_parameters.numbers_of(optimizer)
        with torch.no_grad():
            buffers = [b for b in self.buffers if not numbers.isdisjoint(b.numbers)]
            for buffer in buffers:
                buffer.start_publish()
            for buffer in buffers:
                buffer.finish_publish()
        # Tells autograd that the weights changed: a backward through an older forward is an error, as it always is.
        if self.plan.shard_optimizer or any(b.mastered for b in buffers):
            torch.autograd.graph.increment_version([self.table.parameters[n] for n in used])
        # Full gradients that hooks looked at are not kept.
        self.gradients.show()

    # --- reading and writing state from outside

    def owned_piece(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        """Returns (start, flat part) of the elements that this rank writes to a checkpoint, each element on one rank.

        The part is a view of the live weights. None: not a parameter the engine holds.
        """
        if parameter not in self.table.place:
            return None
        unit, buffer, slot = self.table.place[parameter]
        if buffer.wide is not None and not unit.sharded:
            # What a hook wrote to the weights it used counts; what is written to the part from here on comes later.
            buffer.write_back(narrow=not unit.pinned)
        piece = buffer.pieces.get(slot)
        part = buffer.piece_of_shard(slot, buffer.shard)
        return (0, buffer.shard[:0]) if piece is None or part is None else (piece.start, part)

    @property
    def writes_pieces(self) -> bool:
        """Whether of the ranks that have the same this is the one that writes what cannot be shared out among them."""
        return self.ranks.replicate.rank == 0 and self.ranks.tensor.rank == 0

    @property
    def writes_whole(self) -> bool:
        """Whether of the ranks at one stage this is the one that writes what all of them have."""
        return self.collectives.rank == 0 and self.ranks.tensor.rank == 0

    def slice_of(self, tensor: Tensor) -> Slice:
        """Returns which part of a logical tensor a parameter or any other tensor is, also a released one."""
        number = self.table.number_of_id.get(id(tensor))
        found = None if number is None else self.part.slices.get(self.table.names[number])
        return Slice.whole(tuple(tensor.shape)) if found is None else found

    def accounts_for(self, parameter: nn.Parameter) -> bool:
        """Whether of the ranks that have a parameter, or the same slice of it, this one's shards go to checkpoints."""
        number = self.table.number_of_id.get(id(parameter))
        return number is None or self.part.accounts_for(self.table.names[number])

    def take_in_changes(self) -> None:
        """Takes changes that were made to whole parameters (in place, or of their `data`) into what is updated."""
        with torch.no_grad():
            for unit in self.table.units:
                if not unit.sharded:
                    unit.write_back(narrow=not unit.pinned)

    def weights_changed(self) -> None:
        """Makes shards that were written from outside everyone's weights. Collective."""
        with torch.no_grad():
            self.weights.drop()
            for buffer in self.buffers:
                buffer.shards_changed()
        torch.autograd.graph.increment_version(tuple(self.table.parameters))

    def detach(self) -> None:
        """Takes the engine off its model, which is left with full plain weights. Collective."""
        with self.gathered(), torch.no_grad():
            whole = [p.data.clone() for p in self.table.parameters]
        self._undo_transforms()
        self._wrap_compiled()
        for handle in (*self.weights.handles, *self.gradients.handles, *self._optimizer_hooks):
            handle.remove()
        for parameter, data in zip(self.table.parameters, whole, strict=True):
            mark_gathered(parameter)
            with torch._C.DisableTorchFunctionSubclass():
                if parameter.grad is not None and parameter.grad.dtype != data.dtype:
                    # Of master weights, which end here.
                    parameter.grad = None
            parameter.data = data
            parameter.grad_dtype = data.dtype
            del parameter._shardlight_owner
            vars(parameter).pop("_shardlight_dtype", None)

    # --- accounting

    def state_bytes(self, optimizers: Sequence[Optimizer] = ()) -> int:
        """Counts the live bytes of model state on this rank: weights, gradients, optimizer state; each storage once."""
        tensors = [t for b in self.buffers for t in b.tensors()]
        for optimizer in optimizers:
            tensors += [v for s in optimizer.state.values() for v in s.values() if type(v) is Tensor]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())
