"""Strategies under which ranks have parts of a model: what they have in common, whichever way it is cut.

The ranks are a mesh (engine/mesh.py). Those that have the whole model together see the same batch; those that have the
same part of it share this out as a row of the ZeRO table says. Matrices are cut over the ranks of a tensor group by a
transform (engine/transforms/tensor): what the user's code runs is their own module, of which parameters are parts.
"""

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from shardlight.strategies.base import ShardedStrategy
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.groups import EngineGroups
from shardlight.strategies.engine.mesh import Mesh
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.seeding import seed_generators
from shardlight.strategies.engine.transforms.tensor.apply import apply
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.plan import TensorPlan, tensor_plan
from shardlight.strategies.engine.transforms.tensor.sharded import Sharded, full
from shardlight.strategies.engine.whole import needs_whole
from shardlight.strategies.errors import CheckpointError, TensorError
from shardlight.strategies.micro_batches import same_batch
from shardlight.strategies.options import ROWS, CutOptions, StagedOptions, TensorOptions
from shardlight.strategies.process_group import engine_groups, tensor_group
from shardlight.strategies.random_state import random_state, set_random_state
from shardlight.strategies.replayed_logs import share_metrics
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class ModelParallel(ShardedStrategy):
    """Base of the strategies that cut a model; see zero.py for the options that all have."""

    options: StagedOptions | TensorOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.plan = replace(PLANS[ROWS[self.options.zero]], name=self.plan.name)  # type: ignore[misc]
        self._tensor: TensorGroup | None = None
        self.on_cut: Callable[[str], None] = rank_zero_info
        """Is told on each rank, line by line, how the model is cut."""

    @classmethod
    def defers(cls) -> bool:
        """What other ranks hold is never made here."""
        return True

    # --- the mesh

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged. Raises: MeshError: they do not divide."""
        return Mesh.over(self.world_size, **self.options.axes)

    @property
    def data_rank(self) -> int:
        """This rank's number among those that see different data."""
        return self.mesh.place(self.global_rank).data

    @property
    def data_world_size(self) -> int:
        """How many ranks see different data."""
        return self.mesh.data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are dealt to models, not to ranks."""
        return {"num_replicas": self.data_world_size, "rank": self.data_rank}

    @property
    def has_results(self) -> bool:
        """Whether steps run to their end on this rank, so that it has what they return."""
        return True

    @property
    def staged(self) -> bool:
        """Whether batches go through stages, one micro-batch after the other."""
        return False

    def _configure_launcher(self) -> None:
        Mesh.over(self.num_processes * self.num_nodes, **self.options.axes)
        super()._configure_launcher()

    def _engine_groups(self) -> EngineGroups | None:
        if self.world_size == 1:
            return None
        place = self._process_group_backend, self.timeout_s
        return engine_groups(*place, self.options.shard_group, self.mesh, self._joint())

    def _joint(self) -> Collection[tuple[int, ...]]:
        """Returns the sets of stages that share parameters."""
        return ()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks decided so."""
        if self._engine is None or self.world_size == 1:
            return super().reduce_boolean_decision(decision, all)
        self.engine.agreement.meet("decision")
        row = torch.tensor([int(decision)], dtype=torch.int64, device=self.root_device)
        rows = self.engine.everyone.gather_small(row, "decision")
        return bool(rows.all() if all else rows.any())

    # --- the cut

    def _cut(self, module: nn.Module) -> ModelPart:
        return self._cut_matrices(module, self._tensor_plan(module), WHOLE_MODEL)

    def _tensor_plan(self, module: nn.Module) -> TensorPlan | None:
        """Returns how matrices are cut, from the whole module; None: they are not."""
        options, size = self.options, self.mesh.tensor
        if size == 1:
            return None
        assert isinstance(options, CutOptions)
        plan = tensor_plan(module, size, options.plan, options.norms)
        if not plan.layers:
            raise TensorError(
                f"{type(module).__name__} has no layer that is cut over {size} ranks: neither attention, nor a pair of "
                "layers of which one is given what the other makes, nor an embedding of words. Name layers in "
                "strategy.plan ({'*.up': column, '*.down': row}), or use zero3."
            )
        for optimizer in self.optimizers:
            if any(needs_whole(optimizer, group) for group in optimizer.param_groups):
                raise TensorError(
                    f"{type(optimizer).__name__} needs whole parameters, and tensor: {size} cuts them. Use an "
                    "optimizer that treats elements by themselves (AdamW), or zero3."
                )
        return plan

    def _cut_matrices(self, module: nn.Module, plan: TensorPlan | None, part: ModelPart) -> ModelPart:
        if plan is None:
            return part
        rank = self.mesh.place(self.global_rank).tensor
        own = tensor_group(self._process_group_backend, self.timeout_s, self.mesh)
        self._tensor = TensorGroup(Collectives(own, self.root_device, transport=self.options.collectives))
        apply(module, plan.without(part.elsewhere), self._tensor)
        for line in plan.table().splitlines():
            self.on_cut(f"tensor: {line}")
        return replace(part, slices=plan.slices(rank), tensor_rank=rank)

    def setup(self, trainer: pl.Trainer) -> None:
        """Cuts the module, and shards this rank's part of it."""
        if self.data_world_size == 1:
            # Every rank logs the same, whatever `sync_dist` is.
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
        super().setup(trainer)
        ranks, mesh, module = self.engine.ranks, self.mesh, self.lightning_module
        assert module is not None
        if self._tensor is not None:
            self._tensor.collectives = ranks.tensor  # whose bytes the engine counts
            # Without a seed each process has begun with numbers of its own; what a step draws by Python or NumPy, and
            # decides by it, is to be the same on all ranks of the group.
            set_random_state(ranks.tensor.gather_objects(random_state(), "random numbers")[0])
        if mesh.data < mesh.size:
            share_metrics(module, ranks.everyone, [mesh.rank(self._stage_of_results(), n) for n in range(mesh.data)])

    def _stage_of_results(self) -> int:
        """Returns the stage at which steps run to their end."""
        return 0

    def _saves_window(self, path: Path) -> bool:
        """No: which rank has what of an open window is not in checkpoints.

        Raises: CheckpointError: there is an open one.
        """
        if self.mesh.data == self.mesh.size and not self.staged:
            return super()._saves_window(path)
        if self.interrupted:
            return False
        open_here = self.engine.gradients.unfinished() is not None
        if any(self.engine.everyone.gather_objects(open_here, "save_checkpoint")):
            raise CheckpointError(
                f"{path}: a checkpoint inside an accumulation window is not possible under {self.plan.name}: save when "
                "the optimizer has stepped, as ModelCheckpoint(every_n_train_steps=...) does."
            )
        return False

    # --- data and steps

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves a batch, which is then the same on all ranks that have the model together."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return batch if self._engine is None else same_batch(batch, self.engine.ranks.model)

    def _agree_on_random_numbers(self) -> int:
        """Returns a number that is drawn alike on all ranks that have the model together."""
        drawn = torch.randint(1 << 60, (1,)).to(self.root_device)
        return int(self.engine.ranks.model.gather_small(drawn, "random numbers of a batch")[0])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training_step; ranks of a tensor group draw the same random numbers."""
        if self._tensor is not None:
            seed_generators(self._agree_on_random_numbers(), self.root_device)
        return whole_result(super().training_step(*args, **kwargs))

    def _evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._tensor is not None:
            seed_generators(self._agree_on_random_numbers(), self.root_device)
        return whole_result(super()._evaluation_step(step, *args, **kwargs))


def whole_result(result: Any) -> Any:
    """Returns what a step returned, with whole tensors for those of which each rank has a part. Collective then."""

    def gather(tensor: Sharded) -> Tensor:
        return full(tensor)

    return tree_map_only(Sharded, gather, result)
