"""ShardedStrategy: the one place that speaks Lightning's Strategy contract; everything it does is the engine's."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, WeakSet, ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from shardlight.strategies.checkpoint.lightning_file import LightningFile
from shardlight.strategies.checkpoint.modules import refuse_unresolved
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.compiled import keep_trainer_out
from shardlight.strategies.data_loading import DataLoading
from shardlight.strategies.data_position import DataPosition
from shardlight.strategies.engine.deferred.tensors import deferred_init, materialise_others, refuse_unrecorded
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.groups import EngineGroups
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.engine.window import StepResult
from shardlight.strategies.errors import GradientError, StrategyError
from shardlight.strategies.loss_log import LossLog
from shardlight.strategies.notices import notify
from shardlight.strategies.options import OPTIONS, make_options, offload_of
from shardlight.strategies.precision import ShardedPrecision, sharded_precision
from shardlight.strategies.process_group import engine_groups
from shardlight.strategies.random_state import EpochRandomness
from shardlight.strategies.refusals import refuse_callbacks
from shardlight.strategies.room import Room, refuse_without_room, room_for
from shardlight.strategies.schedules import hold_when_skipped
from shardlight.strategies.stopping import StopTogether
from torch import Tensor, nn
from torch.optim import Optimizer

_engines: "WeakKeyDictionary[nn.Module, ReferenceType[Engine]]" = WeakKeyDictionary()
"""The engine that holds a module's parameters now; a second Trainer takes the module over from the first."""

_cut_by: "WeakKeyDictionary[nn.Module, ReferenceType[ShardedStrategy]]" = WeakKeyDictionary()
"""By a module of which this rank has only a part: whose part that is."""


class ShardedStrategy(DataLoading):
    """Base of the strategies in zero.py; each is a row of the ZeRO table.

    Args:
        options: the fields of EngineOptions.
    Raises: StrategyError: an option's value is impossible; TypeError: there is no such option.
    """

    plan: ClassVar[StatePlan]

    def __init__(self, **options: Any) -> None:
        chosen = make_options(OPTIONS[self.plan.name], self.plan.name, options)
        super().__init__()
        self.options = chosen
        self.timeout_s = float(chosen.timeout_s)
        self.skipped_steps = 0
        """Windows without any weight (no valid token), in which nothing was updated."""
        self.not_finite_steps = 0
        """Steps that were skipped because a gradient was inf or NaN on some rank."""
        self.last_step_skipped = False
        self._skipped: WeakSet[Optimizer] = WeakSet()
        """The last optimizer step changed nothing."""
        self._not_finite_in_a_row = 0
        self.room: Room | None = None
        """What a fit takes of memory and disk, beside what there is; None before its setup."""
        self.on_room: Callable[[Room], None] = lambda room: None
        """Called with it on every rank, before anything is allocated and before the fit is refused where it must be."""
        self._engine: Engine | None = None
        self._weight: float | None = None
        self._blocked = False
        self._trainer_accelerator: Accelerator | None = None
        self._belongs_to_trainer = False
        self._stopping: StopTogether | None = None
        self._reader: CheckpointReader | LightningFile | None = None
        self._randomness = EpochRandomness()
        self._position: DataPosition | None = None
        self._losses = LossLog()

    # --- what users call

    @property
    def engine(self) -> Engine:
        """The sharding engine. Raises: StrategyError: the Trainer has not set the strategy up yet."""
        if self._engine is None:
            raise StrategyError(
                f"{self.plan.name}: nothing is sharded before the Trainer's setup (fit, validate, test, predict)."
            )
        return self._engine

    def weigh_loss(self, weight: float | Tensor) -> None:
        """Says, inside training_step, what weight (number of tokens) stands behind the mean loss that it will return.

        Raises: StrategyError: called twice in one step with different weights.
        """
        value = float(weight)
        if self._weight is not None and self._weight != value:
            raise StrategyError(
                f"one training_step weighs its loss twice, with {self._weight:g} and {value:g}: add the sums up and "
                "call `weighted` once."
            )
        self._weight = value

    def gathered(self, module: nn.Module | None = None) -> Any:
        """Context in which every rank has the full weights of `module` (default: all). Collective; changes are kept."""
        return self.engine.gathered(module)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the full mean gradient of a parameter, from on_after_backward of a stepping batch on. Collective."""
        return self.engine.gradient(parameter)

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of all mean gradients as they are now (0-dim, fp64); clipping changes them. Collective."""
        self.engine.close_window()
        return self.engine.norm(norm_type=norm_type)

    def clip_by_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the optimizer's gradients so that their global norm is at most `max_norm`; returns the norm before."""
        return self.engine.clip(optimizer, max_norm, norm_type)

    @property
    def window_loss(self) -> float:
        """The exact mean loss of the last complete window over ranks and micro-batches."""
        return self.engine.window.mean_loss

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank has sent to others in collectives of the engine."""
        return self.engine.collectives.bytes_sent

    def model_state_bytes(self) -> int:
        """Live bytes of weights, gradients and optimizer state on this rank now."""
        return self.engine.state_bytes(self.optimizers)

    # --- processes

    @property
    def accelerator(self) -> Accelerator | None:
        """The Trainer's accelerator."""
        return self._trainer_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        # Not in `_accelerator`: a second Trainer would find it there, and refuse the one it is given.
        self._trainer_accelerator = accelerator

    def _configure_launcher(self) -> None:
        if self._belongs_to_trainer:
            raise StrategyError(
                f"this {self.plan.name} strategy object belongs to another Trainer already, whose shards it holds: "
                "make one for each Trainer, or use one Trainer for fit, validate, test and predict."
            )
        self._belongs_to_trainer = True
        if self.plan.single_process and self.num_processes * self.num_nodes != 1:
            raise StrategyError(
                f"strategy 'single' is one process, but {self.num_processes * self.num_nodes} were asked for: set "
                "trainer.devices to 1, or choose ddp, zero1, zero2 or zero3."
            )
        super()._configure_launcher()

    @property
    def precision_plugin(self) -> ShardedPrecision:
        """The Trainer's plugin, with what sharding needs."""
        assert self._precision_plugin is not None
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None stays None: of a strategy made with a plugin, the Trainer takes that one and ignores its own `precision`.
        self._precision_plugin = None if plugin is None else sharded_precision(plugin, self)

    # --- setting up

    def setup_environment(self) -> None:
        """Starts the process group. Raises: StrategyError: a callback of the Trainer cannot work."""
        assert self.lightning_module is not None
        refuse_callbacks(self.lightning_module.trainer, self.plan.name)
        super().setup_environment()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read into shards, so sharding comes first."""
        return True

    def setup(self, trainer: pl.Trainer) -> None:
        """Shards the module once; makes the optimizers when fitting, on parameters that still have names and shapes."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        if self.data_world_size == 1:
            # Lightning would shuffle the training data of one process (or pipeline) for a distributed sampler's sake.
            trainer._accelerator_connector.use_distributed_sampler = False
        # Lightning warns that its evaluation sampler repeats samples; process_dataloader puts one in that does not.
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        module = self.lightning_module
        self._refuse(trainer)
        keep_trainer_out(module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        holder = _engines[module]() if module in _engines else None
        if holder is not None and (holder is not self._engine or not holder.holds(module)):
            holder.detach()  # another Trainer's, or of a module that has been given other parameters since
            self._engine = None
            # Its memory, and its swap file, go now, and not when a collection happens to come: this run needs the room.
            del holder
            gc.collect()
        if self._engine is None or self._engine.model is not module:
            self._engine = None
            refuse_unrecorded(module)
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
            # Those of a module that was trained before mean nothing to another one.
            self._reset_optimizers_and_schedulers()
            if fitting:
                self.setup_optimizers(trainer)
            part = self._cut(module)
            if part is not WHOLE_MODEL:
                _cut_by[module] = ref(self)
            if fitting:
                self._look_for_room(module, part)
            groups, options = self._engine_groups(), self.options
            self._engine = Engine(
                module,
                self.plan,
                groups,
                options.reduce,
                options.units,
                BlockTransforms(
                    recompute=options.recompute, compile=options.compile, compile_backend=options.compile_backend
                ),
                self.precision_plugin.dtype_policy(),
                options.keep_gathered,
                options.keep_small,
                options.collectives,
                options.optimizer_kernel,
                options.moments_dtype,
                offload_of(options),
                part,
            )
            self._engine.on_raw_step = WeakMethod(self._note_step)
            _engines[module] = ref(self._engine)
        elif fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        else:
            self._reset_optimizers_and_schedulers()
        for optimizer in self.optimizers:
            self.engine.take_optimizer(optimizer)
            why = self.engine.why_no_kernel(optimizer)
            how = (
                "by its own code: " + why if why else "by a compiled op (strategy.optimizer_kernel=torch turns it off)"
            )
            rank_zero_info(f"optimizer: {type(optimizer).__name__} is stepped {how}")
        materialise_others()
        for config in self.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                hold_when_skipped(config.scheduler, self)
        self.setup_precision_plugin()

    def _cut(self, module: nn.Module) -> ModelPart:
        """Takes out of the module, and of the optimizers, what is on other ranks' stages of a pipeline."""
        return WHOLE_MODEL

    @classmethod
    def defers(cls) -> bool:
        """Whether modules are built without memory if `defer` is not set."""
        return cls.plan.shard_parameters

    def _look_for_room(self, module: nn.Module, part: ModelPart) -> None:
        dtypes, options = self.precision_plugin.dtype_policy(), self.options
        where = self.root_device, part, self.data_world_size
        self.room = room_for(module, self.plan, options, self.optimizers, dtypes, *where)
        self.on_room(self.room)
        if not self.options.force:
            refuse_without_room(self.room)

    def _engine_groups(self) -> EngineGroups | None:
        if self.world_size == 1:
            return None
        return engine_groups(self._process_group_backend, self.timeout_s, self.options.shard_group)

    def _refuse(self, trainer: pl.Trainer) -> None:
        for owner in (self.lightning_module, trainer.datamodule):
            refuse_unresolved(owner)
        by = _cut_by.get(self.lightning_module)
        if by is not None and by() is not self:
            raise StrategyError(
                f"this {type(self.lightning_module).__name__} is cut by another strategy object, and the rest of it "
                "is not in this process: make a new module and load the checkpoint of that run, or use "
                "one Trainer for fit, validate, test and predict."
            )
        if self._layer_sync is not None and self.root_device.type == "cpu":
            raise StrategyError("sync_batchnorm=True needs CUDA devices: PyTorch's SyncBatchNorm refuses CPU tensors.")
        if self._checkpoint_io is not None:
            raise StrategyError(
                f"{type(self._checkpoint_io).__name__} is not used by {self.plan.name}, which writes folders of "
                "its own: leave the checkpoint plugin out."
            )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around `configure_model` and in `trainer.init_module()`: where and how a module's tensors are made.

        With the option `defer`, or with `empty_init=True` unless `defer` is False, they take no memory before they are
        sharded. Either way they get the values of their own initialisation.
        """
        defer = self.options.defer
        if empty_init is None:
            deferred = self.defers() if defer is None else defer
        else:
            deferred = empty_init and defer is not False
        with deferred_init(self.root_device) if deferred else self.root_device:
            with self.precision_plugin.tensor_init_context():
                yield

    def model_to_device(self) -> None:
        """Moves the module to this rank's device, before it is sharded."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def on_train_start(self) -> None:
        """Takes over SIGTERM and `should_stop` from Lightning's handlers; shows gradients that were restored."""
        assert self.lightning_module is not None
        self._stopping = StopTogether(self.lightning_module.trainer, self.engine)
        self._data_position().begin_training()
        self.engine.gradients.show_restored()

    # --- a step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training_step with weights gathered as they are used."""
        self._weight = None
        self._before_batch = self.engine.window, self.engine.window.micro_batches
        with self.engine.forward():
            return self._plain_training_step(*args, **kwargs)

    def _plain_training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward; on a stepping batch gradients are final when `on_after_backward` is called."""
        module = self.lightning_module
        assert module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        automatic = module.automatic_optimization

        def run(scaled: Tensor) -> None:
            self.precision_plugin.backward(scaled, module, optimizer, *args, **kwargs)

        # Lightning has divided the loss by the full accumulation factor, also in a short window, but not a manual one.
        factor = float(module.trainer.accumulate_grad_batches) if automatic else None
        if automatic and module.trainer.fit_loop.epoch_loop.batch_idx == 0 and not self._keeps_gradients(module):
            # As Lightning's zero_grad does: what the end of an epoch has cut off does not leak into the next.
            self.engine.gradients.drop_open_window()
        loss_scale = self.precision_plugin.loss_scale
        self.engine.backward(loss, self._weight, factor, run, loss_scale.scale if loss_scale is not None else 1.0)
        if automatic and not self._blocked:
            self.engine.close_window()
        return self.precision_plugin.post_backward(loss, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While a window accumulates: gradients do not become final after backward."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs the closure, clips, and steps the user's optimizer on this rank's part of the parameters."""
        module = model or self.lightning_module
        result = closure()
        self.engine.close_window()
        self.precision_plugin._after_closure(module, optimizer)
        self._note_step(optimizer, self.engine.step(optimizer, keep_gradients=self._keeps_gradients(module)))
        return result

    @staticmethod
    def _keeps_gradients(module: pl.LightningModule) -> bool:
        """Whether gradients may stay after a step: in automatic optimization Lightning drops them."""
        return not module.automatic_optimization or is_overridden("optimizer_zero_grad", module)

    def _note_step(self, optimizer: Optimizer, result: StepResult) -> None:
        self.last_step_skipped = result is not StepResult.STEPPED
        self._losses.add(float("nan") if self.last_step_skipped else self.engine.window.mean_loss)
        (self._skipped.add if self.last_step_skipped else self._skipped.discard)(optimizer)
        loss_scale = self.precision_plugin.loss_scale
        lowered = loss_scale is not None and loss_scale.update(result)
        if result is StepResult.NO_WEIGHT:
            self.skipped_steps += 1
        if result is not StepResult.NOT_FINITE:
            self._not_finite_in_a_row = 0
            return
        self.not_finite_steps += 1
        self._not_finite_in_a_row += not lowered
        names = self.engine.window.not_finite
        which = ", ".join(f"'{n}'" for n in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if self._not_finite_in_a_row >= self.options.max_not_finite_steps:
            scale = "" if loss_scale is None else f" with the loss scale at its minimum ({loss_scale.scale:g})"
            raise GradientError(
                f"the gradients of {which} were inf or NaN in {self._not_finite_in_a_row} steps in a row{scale}: lower "
                "the learning rate, clip gradients, or look at the data (trainer.detect_anomaly names the operation)."
            )
        scale = "" if loss_scale is None else f" The loss scale is {loss_scale.scale:g} now."
        notify(f"a step was skipped on all ranks: the gradients of {which} are inf or NaN.{scale}")

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's last step changed nothing."""
        return optimizer in self._skipped

    def _evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Lightning evaluates under inference_mode, whose tensors training cannot use afterwards.
        with torch.inference_mode(False), torch.no_grad(), self.engine.forward():
            result = step(*args, **kwargs)
        self._meet_at_the_end()
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's validation_step with weights gathered as they are used."""
        return self._evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's test_step with weights gathered as they are used."""
        return self._evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's predict_step with weights gathered as they are used."""
        return self._evaluation_step(super().predict_step, *args, **kwargs)

    def _meet_at_the_end(self) -> None:
        """After this rank's last evaluation batch: serves the gathers of ranks that have one more."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        stage = trainer.state.stage
        loops = {
            RunningStage.VALIDATING: trainer.validate_loop
            if trainer.state.fn == TrainerFn.VALIDATING
            else trainer.fit_loop.epoch_loop.val_loop,
            RunningStage.SANITY_CHECKING: trainer.fit_loop.epoch_loop.val_loop,
            RunningStage.TESTING: trainer.test_loop,
            RunningStage.PREDICTING: trainer.predict_loop,
        }
        if stage in loops and loops[stage].batch_progress.is_last_batch:
            self.engine.agreement.meet(f"last {stage.value} batch")

    # --- the end

    def on_exception(self, exception: BaseException) -> None:
        """Nothing to do: no collective may follow an error."""

    def teardown(self) -> None:
        """Ends an entry point. Shards, optimizer state and the process group stay, for what is called after it."""
        assert self.accelerator is not None and self.cluster_environment is not None
        self._randomness.set_now()
        if self._position is not None:
            self._position.loops.undo()
        if self._stopping is not None:
            self._stopping.undo()
            self._stopping = None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
