"""C082: nothing grows with the number of steps: tensors, bytes, hooks, threads, files, resident memory."""

import gc
import os
import threading
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from loops import group, plans
from models import TinyGPT, token_batch
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch import Tensor, nn
from torch.nn import functional as F

GROWTH_MB = 5.0
OPEN = ("files", "threads", "native threads")


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


def resident_mb() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


class Census(pl.Callback):
    def __init__(self):
        self.counts, self.resident_mb = [], []

    def look(self, step, module):
        if step % 20 == 0:
            self.counts.append((step, census(module)))
            self.resident_mb.append(resident_mb())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.look(trainer.global_step, pl_module)


def bare_engine(name, world_size, batch) -> Census:
    """60 steps of the engine without a Trainer; when its model is gone nothing of it is left."""
    model, seen, logged = TinyGPT().double(), Census(), torch.zeros((), dtype=torch.float64)
    engine = Engine(model, PLANS[name], group(world_size))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine.take_optimizer(optimizer)
    for step, (tokens, labels) in enumerate(batch, 1):
        with engine.forward():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        engine.backward(loss)
        engine.clip(optimizer, 1e-3)  # in every step: where nothing is clipped the norm is kept for who asks again
        engine.step(optimizer)
        logged += loss.detach()
        seen.look(step, model)
    return seen


def check_bare_growth(rank, world_size):
    gc.freeze()
    batch = [token_batch(m, 2, torch.float64) for m in range(60)]
    nothing = nn.Identity()
    bare_engine(plans(world_size)[0], world_size, batch[:1])  # what PyTorch makes on first use
    for name in plans(world_size):
        before = census(nothing)
        seen = bare_engine(name, world_size, batch)
        if world_size > 1:
            dist.barrier()
        after = census(nothing)
        counts = [count for _, count in seen.counts]
        assert [step for step, _ in seen.counts] == [20, 40, 60]
        assert counts[0] == counts[1] == counts[2], (name, counts)
        assert counts[0]["tensors"] > before["tensors"] and counts[0]["hooks"] > 0, "the count sees something"
        assert seen.resident_mb[2] - seen.resident_mb[0] < GROWTH_MB, (name, seen.resident_mb)
        assert after == before, (name, before, after)


def check_growth(rank, world_size, folder, chosen):
    gc.freeze()  # what the libraries made when they were imported: not counted, and slow to look through
    batch = [token_batch(m, 2, torch.float64) for m in range(60)]
    for strategy in chosen:
        module, seen, after, start = Model(), Census(), [], census(nn.Identity())
        group_was_there = dist.is_initialized()  # a process starts its group once, with its first fit
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
        for what in OPEN if group_was_there or world_size == 1 else ():
            assert start[what] == after[0][what] == after[2][what], (strategy, what, start, after)
        assert seen.resident_mb[2] - seen.resident_mb[0] < GROWTH_MB, (strategy, seen.resident_mb)
        assert seen.resident_mb[4] - seen.resident_mb[3] < GROWTH_MB, (strategy, seen.resident_mb)


@pytest.mark.case("C082")
@pytest.mark.parametrize(
    "world_size,chosen",
    [
        (1, ("single", "zero3")),
        (2, ("zero1", "zero3")),
        pytest.param(2, tuple(strategies(2)), marks=pytest.mark.long),
    ],
)
def test_nothing_grows_with_the_steps(world_size, chosen, tmp_path):
    run_ranks(check_growth, world_size, init=False, folder=str(tmp_path), chosen=chosen)


@pytest.mark.case("C082")
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_grows_with_the_steps_of_the_bare_engine(world_size):
    run_ranks(check_bare_growth, world_size)
