"""Which units stay gathered between forward and backward, where parameters are sharded and memory allows it."""

import socket
from collections.abc import Sequence

import torch
from shardlight.ops.memory import available_bytes
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.unit import Unit

SHARE = 0.5
"""Of the memory that is left at the start of a backward, when activations take most: what `auto` uses."""


def keep_what_fits(units: Sequence[Unit], collectives: Collectives) -> None:
    """Lets units stay gathered over the accumulation window as long as the memory that is left allows it. Collective.

    The last units first: they are needed again soonest. Every rank keeps the same units.
    """
    budget = _budget_bytes(collectives)
    for unit in reversed(units):
        budget -= unit.nbytes
        if budget < 0:
            return
        unit.keep_gathered = "window"


def _budget_bytes(collectives: Collectives) -> float:
    """Returns what every rank can spend: ranks of one host share its memory."""
    device = collectives.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        left: int | None = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        left = available_bytes()
    own = socket.gethostname() if device.type == "cpu" else f"{socket.gethostname()} {device.index}"
    everyone = collectives.gather_objects((own, left or 0), "memory that is left")
    places = [place for place, _ in everyone]
    return min(SHARE * left / places.count(place) for place, left in everyone)
