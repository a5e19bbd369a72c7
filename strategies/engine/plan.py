"""The ZeRO table as data: which model state each strategy replicates and which it shards.

Source: Rajbhandari et al. 2020, ZeRO, section 5 and table 1 (arXiv 1910.02054).
"""

from dataclasses import dataclass
from typing import Literal

Reduce = Literal["micro_batch", "window"]


@dataclass(frozen=True)
class StateWidths:
    """Bytes per parameter: of the weights a model computes with, their masters, gradients, and optimizer state."""

    weight: int
    master: int
    gradient: int
    optimizer: int


FP32 = StateWidths(weight=4, master=0, gradient=4, optimizer=8)
"""Adam in fp32: two moments."""
MASTERED = StateWidths(weight=2, master=4, gradient=4, optimizer=8)
"""Adam on fp32 masters of 16-bit weights; gradients are summed in fp32."""


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

    def state_bytes(self, numel: int, world_size: int, widths: StateWidths = FP32) -> float:
        """Model state per rank between two steps, in bytes.

        Args:
            numel: number of parameters of the model.
            widths: bytes per parameter of each kind of state.
        """
        updated = numel / (world_size if self.shard_optimizer else 1)
        if not widths.master:
            weights = widths.weight * numel / (world_size if self.shard_parameters else 1)
            gradients = widths.gradient * numel / (world_size if self.shard_gradients else 1)
            return weights + gradients + widths.optimizer * updated
        # With master weights the 16-bit copies of sharded parameters live only while their unit is in use, and the
        # gradients of this rank's masters are all that is kept of a window.
        copies = 0 if self.shard_parameters else widths.weight * numel
        return copies + (widths.master + widths.gradient + widths.optimizer) * updated

    def wire_elements(
        self, numel: int, world_size: int, micro_batches: int, reduce: Reduce, keep_gathered: str = "no"
    ) -> float:
        """Elements that one rank sends per optimizer step.

        Args:
            keep_gathered: how long sharded parameters stay: they are gathered in forward and again in backward ("no"),
                once per micro-batch ("backward"), or once per step ("window").
        """
        reductions = micro_batches if reduce == "micro_batch" else 1
        gathers = {"no": 2 * micro_batches, "backward": micro_batches, "window": 1}[keep_gathered]
        gathers = gathers if self.shard_parameters else 1
        return (reductions + gathers) * numel * (world_size - 1) / world_size


PLANS: dict[str, StatePlan] = {
    plan.name: plan
    for plan in (
        StatePlan("single", False, False, False, "window", single_process=True),
        StatePlan("ddp", False, False, False, "window"),
        StatePlan("zero1", False, False, True, "window"),
        StatePlan("zero2", False, True, True, "micro_batch"),
        StatePlan("zero3", True, True, True, "micro_batch"),
        StatePlan("infinity", True, True, True, "micro_batch"),
    )
}
