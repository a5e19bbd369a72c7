"""PyTorch's FSDP2 as ZeRO-3: `fully_shard` on each block and the root, parameters released after forward."""

from typing import Any

import torch.distributed as dist
from shardlight.framework.bench.contenders import loop
from shardlight.framework.bench.contenders.gpt import fixed_gpt
from shardlight.framework.bench.contenders.torch_ddp import PlainLoop
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def fsdp2(size: Size) -> PlainLoop:
    """Makes the contender."""
    model = fixed_gpt(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return PlainLoop(model)


BUILDERS: loop.Builders = {"fsdp2": fsdp2}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run."""
    loop.run(job, turns, BUILDERS)
