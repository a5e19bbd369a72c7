"""The versions of an op that a test runs: compiled code and the PyTorch reference, on CPU and on CUDA."""

import pytest
import torch
from shardlight.ops.built import why_not

VERSIONS = ["native", "reference", *(pytest.param(f"cuda {v}", marks=pytest.mark.gpu) for v in ("native", "reference"))]


def use_version(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes one of VERSIONS run, or skips with the reason; returns the device for tensors."""
    device = "cuda" if name.startswith("cuda") else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
    if name.endswith("reference"):
        monkeypatch.setattr("shardlight.ops.registry.Op.native", lambda op, device: False)
    elif why_not(device) is not None:
        pytest.skip(f"compiled ops are not used on {device.upper()}: {why_not(device)}")
    return device
