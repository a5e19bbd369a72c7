"""The rank's side of `bench gpu`: answers one check after the other. What is checked is in gpu_ops and gpu_training."""

from typing import Any

import torch
from shardlight.framework.bench.contenders import gpu_ops, gpu_training
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.ops.built import why_not


def run(job: dict[str, Any], turns: Turns) -> None:
    """Answers `look`, `ops`, `speed` and `train` until the end. Args: job: `device`, cuda or cpu."""
    device = torch.device(job["device"])
    for request in turns.requests():
        what = request["do"]
        if what == "look":
            turns.reply(_look(device))
        elif what == "ops":
            turns.reply({"figures": gpu_ops.check(device)})
        elif what == "speed":
            turns.reply({"seconds": gpu_ops.measure(device, request["numel"], request["rounds"])})
        else:
            size = Size(**request["size"])
            found = gpu_training.check(device, size, request["precision"], request["plans"], request["steps"])
            turns.reply({"figures": found})


def _look(device: torch.device) -> dict[str, str | None]:
    if device.type == "cuda" and not torch.cuda.is_available():
        return {"missing": "PyTorch sees no CUDA device", "name": None, "reference": None}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    # On either side, since the bits are compared.
    return {
        "missing": None,
        "name": name,
        "reference": why_not("cuda" if device.type == "cuda" else "cpu") or why_not(),
    }
