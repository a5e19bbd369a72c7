"""DeepSpeed's ZeRO-3 with parameters and optimizer state on disk (Rajbhandari et al. 2021, arXiv 2104.07857).

With what it needs to run in fp32 on CPU: version 0.19 forgets the dtype it is given there, and its pool of buffers runs
empty unless fewer parameters stay gathered and there are more buffers.
"""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import partition_parameters
from shardlight.framework.bench.contenders import loop
from shardlight.framework.bench.contenders.gpt import LEARNING_RATE, fixed_gpt, loss_of
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.framework.launch import STORE
from torch import Tensor

BUFFERS = 64
LIVE_PARAMETERS = 1_000_000


def _keep_fp32(self: Any, config: Any, dtype: torch.dtype | None) -> None:
    self.dtype = dtype or torch.float32


class DeepSpeedNVMe:
    """A model under `deepspeed.initialize`; its files go into the crew's folder."""

    def __init__(self, size: Size) -> None:
        partition_parameters.Init._set_dtype = _keep_fp32
        model = fixed_gpt(size)
        ranks, folder = dist.get_world_size(), str(Path(os.environ[STORE]).parent / "nvme")
        Path(folder).mkdir(exist_ok=True)
        disk = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
        largest = max(p.numel() for p in model.parameters())
        zero = {
            "stage": 3,
            "offload_param": {**disk, "buffer_count": BUFFERS, "buffer_size": largest},
            "offload_optimizer": {**disk, "pipeline_read": True, "pipeline_write": True},
            "stage3_max_live_parameters": LIVE_PARAMETERS,
            "stage3_max_reuse_distance": LIVE_PARAMETERS,
        }
        config = {
            "train_batch_size": size.batch,
            "train_micro_batch_size_per_gpu": size.batch // ranks,
            "zero_optimization": zero,
            "gradient_clipping": 0.0,
        }
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True)
        made = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
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


BUILDERS: loop.Builders = {"deepspeed-nvme": DeepSpeedNVMe}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run."""
    loop.run(job, turns, BUILDERS)
