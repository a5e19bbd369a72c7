"""How a strategy starts its ranks and talks to them outside of the model: logged values, decisions, barriers."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.states import TrainerStatus
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.process_group import end_with_parent, start_process_group
from torch import Tensor


class _NoContext:
    """Stands in for autograd's context where no gradient is wanted."""


class _AllGather(torch.autograd.Function):
    """Stacks the tensors of all ranks; backward adds up what every rank wants of this rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        flat = tensor.detach().contiguous().view(-1)
        return collectives.gather_small(flat, "all_gather").view(collectives.world_size, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        stacked = grads[0].contiguous()
        own = torch.empty_like(stacked[0])
        ctx.collectives.reduce_scatter(stacked.view(-1), own.view(-1), "backward of all_gather")
        return own, None


class RankCalls(DDPStrategy):
    """The part of Lightning's contract that is about processes; every call is agreed first, so that none can hang."""

    _engine: Engine | None
    timeout_s: float

    def setup_distributed(self) -> None:
        """Starts the process group when there is more than one rank. Raises: LaunchError."""
        reset_seed()
        self.set_world_ranks()
        environment = self.cluster_environment
        assert isinstance(environment, ClusterEnvironment)
        if isinstance(environment, LightningEnvironment) and self.local_rank:
            end_with_parent()
        self._process_group_backend = self._get_process_group_backend()
        if self.world_size > 1:
            start_process_group(
                self.global_rank,
                self.world_size,
                environment.main_address,
                environment.main_port,
                self._process_group_backend,
                self.timeout_s,
                self.root_device,
            )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a logged value over the data-parallel ranks, after all agreed that they reduce the same one.

        Raises: CollectiveError: ranks reduce different values; names them.
        """
        if (
            self._engine is None
            or self.world_size == 1
            or not isinstance(tensor, Tensor)
            or group not in (None, dist.group.WORLD)
        ):
            return (
                super().reduce(tensor, group, reduce_op)
                if isinstance(tensor, Tensor) and self.world_size > 1
                else tensor
            )
        self.engine.agreement.meet(_name_of_logged_value())
        rows = self.engine.collectives.gather_small(tensor.detach().reshape(-1).contiguous(), "reduce a logged value")
        op = str(reduce_op).lower().rsplit(".", 1)[-1]
        if op in ("mean", "avg"):
            result = (rows if rows.is_floating_point() else rows.double()).mean(dim=0)
        elif op in ("sum", "max", "min"):
            result = rows.sum(dim=0) if op == "sum" else getattr(rows, f"a{op}")(dim=0)
        else:
            return super().reduce(tensor, group, reduce_op)
        return result.view(tensor.shape)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks stacked, (world_size, *shape); with `sync_grads` gradients flow back."""
        if self._engine is None or group not in (None, dist.group.WORLD):
            return super().all_gather(tensor, group, sync_grads)
        self._engine.agreement.meet("all_gather")
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        if sync_grads and tensor.requires_grad:
            return _AllGather.apply(tensor, self._engine.collectives)
        return _AllGather.forward(_NoContext(), tensor, self._engine.collectives)

    @property
    def interrupted(self) -> bool:
        """Whether an error ended the Trainer's run on this rank; others may know nothing of it."""
        module = self.lightning_module
        return module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks; ranks at different barriers get an error. After an error: nothing."""
        if self.interrupted:
            return
        if self._engine is not None:
            self.engine.agreement.meet(f"barrier {name or ''}".strip())
            if self.engine.ranks.model.world_size > 1:
                here = torch.zeros(1, dtype=torch.int64, device=self.root_device)
                self.engine.everyone.gather_small(here, f"barrier {name or ''}".strip())
        else:
            super().barrier(name, *args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns rank `src`'s object on all ranks."""
        if self._engine is not None:
            self.engine.agreement.meet("broadcast")
            return self.engine.everyone.gather_objects(obj if self.global_rank == src else None, "broadcast")[src]
        return super().broadcast(obj, src)


def _name_of_logged_value() -> str:
    """Finds what `self.log` calls the value that is being reduced: the strategy is not told."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if isinstance(owner, _ResultMetric):
            return f"log '{owner.meta.name}' in {owner.meta.fx}"
        frame = frame.f_back  # type: ignore[assignment]
    return "reduce"
