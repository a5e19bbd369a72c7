"""C082: nothing grows with the number of steps: tensors, bytes, hooks, threads, files."""

import gc
import os
import threading
import time
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import TinyGPT, token_batch
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch import Tensor, nn
from torch.nn import functional as F


class Model(pl.LightningModule):
    """Logs a loss that still requires grad, and keeps none of it."""

    def __init__(self):
        super().__init__()
        self.model = TinyGPT()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        assert loss.requires_grad
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten()), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def hooks(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    own = sum(len(getattr(m, kind)) for m in module.modules() for kind in kinds)
    on_parameters = (p._post_accumulate_grad_hooks for p in module.parameters())
    return (
        own + sum(len(h) for h in on_parameters if h) + sum(len(p._backward_hooks or ()) for p in module.parameters())
    )


def census(module: nn.Module) -> dict[str, int]:
    """The least of three counts: the transport's threads may hold a tensor for a moment longer."""
    counts = []
    for _ in range(3):
        time.sleep(0.01 * len(counts))
        counts.append(count(module))
    return {what: min(c[what] for c in counts) for what in counts[0]}


def count(module: nn.Module) -> dict[str, int]:
    gc.collect()
    with warnings.catch_warnings(), torch._C.DisableTorchFunctionSubclass():
        warnings.simplefilter("ignore")  # gc meets deprecated objects
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    counts = {"tensors": len(tensors), "storages": len(storages), "bytes": sum(storages.values())}
    counts |= {"hooks": hooks(module), "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
    return counts | {"native threads": len(os.listdir("/proc/self/task"))}


class Census(pl.Callback):
    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 20 == 0:
            self.counts.append((trainer.global_step, census(pl_module)))


def check_growth(rank, world_size, folder):
    gc.freeze()  # what the libraries made when they were imported: not counted, and slow to look through
    batch = [token_batch(m, 2, torch.float64) for m in range(60)]
    for strategy in strategies(world_size) if world_size > 1 else ("single", "zero3"):
        module, seen, after = Model(), Census(), []
        for fit in range(3):
            trainer = make_trainer(strategy, world_size, folder, log_every_n_steps=1, callbacks=[seen])
            trainer.fit(module, batches(*batch[: 60 if fit == 0 else 20]), batches(*batch[:2]))
            assert trainer.global_step == (60 if fit == 0 else 20)
            del trainer
            module.trainer = None
            after.append(census(module))
            if world_size > 1:
                dist.barrier()  # a rank that has ended takes its sockets along
        counts = [count for _, count in seen.counts]
        assert [step for step, _ in seen.counts] == [20, 40, 60, 20, 20], strategy
        assert counts[0] == counts[1] == counts[2], (strategy, counts[:3])
        assert counts[3] == counts[4], (strategy, counts[3:])
        assert after[1] == after[2], (strategy, after)
        for what in ("hooks", "bytes"):
            assert after[0][what] == after[1][what], (strategy, what, after)


@pytest.mark.case("C082")
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_grows_with_the_steps(world_size, tmp_path):
    run_ranks(check_growth, world_size, init=False, folder=str(tmp_path))
