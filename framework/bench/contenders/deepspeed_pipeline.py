"""DeepSpeed's PipelineModule with its 1F1B, on the model cut by hand; it clips gradients at 1.0 unless told 0.0."""

from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from shardlight.framework.bench.contenders import loop
from shardlight.framework.bench.contenders.gpt import optimizer_of
from shardlight.framework.bench.contenders.pipeline import MICRO_BATCHES
from shardlight.framework.bench.contenders.stages import Part, counts_of, token_loss
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from torch import Tensor


class DeepSpeedPipeline:
    """A layer per stage, which is all of it: DeepSpeed divides nothing. Args: size: of the model."""

    def __init__(self, size: Size) -> None:
        ranks = dist.get_world_size()
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        counts = counts_of(size, range(ranks))
        layers = [LayerSpec(Part, size, counts, stage) for stage in range(ranks)]
        model = PipelineModule(layers, num_stages=ranks, loss_fn=token_loss, partition_method="uniform")
        config = {
            "train_batch_size": size.batch,
            "train_micro_batch_size_per_gpu": size.batch // MICRO_BATCHES,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.0,
            "steps_per_print": 1 << 30,
        }
        made = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config, dist_init_required=False)
        self.engine: Any = made[0]

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes an optimizer step; returns the batch's mean loss."""
        parts = zip(tokens_BT.chunk(MICRO_BATCHES), labels_BT.chunk(MICRO_BATCHES), strict=True)
        return float(self.engine.train_batch(data_iter=iter(parts)))

    def counters(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Nothing."""
        return {}


BUILDERS: loop.Builders = {"deepspeed-1f1b": DeepSpeedPipeline}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run; every rank gets all rows of a batch."""
    loop.run(job, turns, BUILDERS, whole=True)
