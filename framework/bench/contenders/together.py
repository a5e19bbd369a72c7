"""Several contenders in the same processes, for a quick look: one start, but no start-up or memory of each."""

from typing import Any

from shardlight.framework.bench.contenders import fsdp2, loop, ours, torch_ddp
from shardlight.framework.bench.turns import Turns

BUILDERS: loop.Builders = {**torch_ddp.BUILDERS, **fsdp2.BUILDERS, **ours.BUILDERS}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run."""
    loop.run(job, turns, BUILDERS)
