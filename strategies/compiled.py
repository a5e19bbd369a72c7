"""A LightningModule that was handed to the Trainer as `torch.compile(module)`: what of it is not compiled."""

import lightning.pytorch as pl
import torch

_CALLS = ("log", "log_dict", "print", "all_gather", "manual_backward", "optimizers", "lr_schedulers", "clip_gradients")
_CALLS += ("toggle_optimizer", "untoggle_optimizer")


def keep_trainer_out(module: pl.LightningModule) -> None:
    """Keeps what a compiled step calls of the Trainer from being compiled with it: torch 2.13 fails in `self.log`."""
    if module._compiler_ctx is None:
        return
    for name in _CALLS:
        if name not in vars(module):
            setattr(module, name, torch.compiler.disable(getattr(module, name), reason="the Trainer is not compiled"))
