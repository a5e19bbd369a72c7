"""The ZeRO table as data: which model state each strategy replicates and which it shards.

Source: Rajbhandari et al. 2020, ZeRO, section 5 and table 1 (arXiv 1910.02054).
"""

from dataclasses import dataclass
from typing import Literal

Reduce = Literal["micro_batch", "window"]


@dataclass(frozen=True)
class StatePlan:
    """One row of the table: what a rank keeps of parameters, gradients and optimizer state.

    `reduce` is the default of the option of the same name: gradients are reduced after each micro-batch, or once per
    accumulation window (which keeps this rank's full gradients over the window).
    """

    name: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    reduce: Reduce
    single_process: bool = False

    def state_bytes(self, numel: int, world_size: int, bytes_per_element: int = 4) -> float:
        """Model state per rank between two steps, in bytes, for an optimizer with two moments (Adam).

        Args:
            numel: number of parameters of the model.
        """
        parts = (self.shard_parameters, self.shard_gradients, self.shard_optimizer, self.shard_optimizer)
        return sum(bytes_per_element * numel / (world_size if sharded else 1) for sharded in parts)

    def wire_elements(self, numel: int, world_size: int, micro_batches: int, reduce: Reduce) -> float:
        """Elements that one rank sends per optimizer step (parameters gathered in forward and again in backward)."""
        reductions = micro_batches if reduce == "micro_batch" else 1
        gathers = 2 * micro_batches if self.shard_parameters else 1
        return (reductions + gathers) * numel * (world_size - 1) / world_size


PLANS: dict[str, StatePlan] = {
    plan.name: plan
    for plan in (
        StatePlan("single", False, False, False, "window", single_process=True),
        StatePlan("ddp", False, False, False, "window"),
        StatePlan("zero1", False, False, True, "window"),
        StatePlan("zero2", False, True, True, "micro_batch"),
        StatePlan("zero3", True, True, True, "micro_batch"),
    )
}
