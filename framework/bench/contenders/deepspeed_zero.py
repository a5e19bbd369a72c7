"""DeepSpeed's ZeRO-1, 2 and 3, with its defaults but for one: it clips gradients at 1.0 unless told 0.0."""

import functools
from typing import Any

import deepspeed
import torch.distributed as dist
from shardlight.framework.bench.contenders import loop
from shardlight.framework.bench.contenders.gpt import fixed_gpt, loss_of, optimizer_of
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from torch import Tensor


class DeepSpeedZeRO:
    """A model under `deepspeed.initialize`.

    Args:
        size: of the model.
        stage: 1, 2 or 3.
    """

    def __init__(self, size: Size, stage: int) -> None:
        model = fixed_gpt(size)
        config = {
            "train_batch_size": size.batch,
            "train_micro_batch_size_per_gpu": size.batch // dist.get_world_size(),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        made = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config, dist_init_required=False)
        self.engine: Any = made[0]

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes an optimizer step; returns the rows' mean loss."""
        loss = loss_of(self.engine, tokens_BT, labels_BT)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def counters(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Nothing."""
        return {}


BUILDERS: loop.Builders = {
    f"deepspeed-zero{stage}": functools.partial(DeepSpeedZeRO, stage=stage) for stage in (1, 2, 3)
}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run."""
    loop.run(job, turns, BUILDERS)
