"""Imported once by the fork server of `harness.py`: whatever a rank would otherwise import lazily.

No backward pass and no process group here: a forked rank must not inherit their threads.
"""

import contextlib
import importlib

import lightning.pytorch
import lightning.pytorch.loggers
import lightning.pytorch.strategies
import pytest
import torch
import torch._dynamo  # torch.optim imports it on first use
import torch.distributed
import torch.testing
import torch.utils.data
import torchmetrics

__all__ = ["lightning", "pytest", "torch", "torchmetrics"]

torch.set_num_threads(1)  # first: a thread pool made here would be dead in every rank
_parameter = torch.nn.Parameter(torch.ones(1))
_parameter.grad = torch.ones(1)
torch.optim.AdamW([_parameter]).step()
torch.testing.assert_close(torch.ones(1), torch.ones(1))

# Code under test may be broken; then the rank that imports it says how, with its traceback. Without this the fork
# server itself would die, and every test with it.
for name in ("shardlight.strategies.ema", "shardlight.framework.assemble", "shardlight.cli"):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
