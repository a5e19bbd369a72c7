"""The words that options of the engine may be. No torch in here: a config is checked without importing it."""

from typing import Literal

Transport = Literal["auto", "gloo"]
"""What moves data between ranks on CPU: `auto` is shared memory within a host."""
KeepGathered = Literal["no", "backward", "window", "auto"]
"""How long a unit's weights stay, where parameters are sharded."""
OptimizerKernel = Literal["auto", "torch"]
"""Who computes an optimizer's step."""
MomentsDtype = Literal["bfloat16"]
"""What the optimizer's moments may be kept in."""
Order = Literal["batch", "layer"]
"""Whether a batch goes through all units before the next one, or a unit has all micro-batches before the next unit."""
Override = Literal["column", "row", "vocab", "whole"]
"""How a layer is cut over a tensor group; whole: it is not, nor is anything in it."""
Norms = Literal["whole", "sharded"]
"""whole: what is between blocks is the same on all ranks of a group. sharded: it is divided along the sequence."""
Recompute = Literal["no", "blocks", "blocks_reentrant"]
"""Whose activations are computed again in backward."""
Compile = Literal["no", "blocks"]
"""What torch.compile compiles."""
