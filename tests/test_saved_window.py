"""A checkpoint inside an accumulation window keeps what was accumulated: the run goes on to the last bit."""

from functools import partial
from itertools import product
from pathlib import Path

import lightning.pytorch as pl
import pytest
import test_manual_optimization as manual
import torch
import torch.distributed as dist
from harness import run_ranks
from loops import build, optimizer_of
from loops import rows as rows_of
from shardlight.strategies import STRATEGIES, MixedFP16
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.window import load_window
from shardlight.strategies.engine.collectives import EngineGroups
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from test_manual_optimization import BATCHES as MANUAL_BATCHES
from test_manual_optimization import Pair, batch
from torch import nn
from torch.utils.data import DataLoader

BATCHES, ACCUMULATE = 6, 4  # the second window of an epoch is short


class Windows(pl.LightningModule):
    """Buffers that move with each rank's data, dropout, a tied weight, a frozen and an empty one, and one that only
    some ranks use, late in a window."""

    def __init__(self, weighted=False):
        super().__init__()
        torch.manual_seed(3)
        self.weighted = weighted
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.5)) for _ in range(2)]
        )
        self.tied, self.frozen, self.late, self.head = (nn.Linear(7, n) for n in (7, 7, 7, 3))
        self.tied.weight = self.blocks[0][0].weight
        self.frozen.requires_grad_(False)
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.seen, self.norms = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        # What a rank has in its buffers counts in its next forward.
        x = x + self.blocks[0][1].running_mean.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        if batch_idx % ACCUMULATE == 3 or (batch_idx % ACCUMULATE == 1 and self.trainer.global_rank == 1):
            x = x + self.late(x)
        loss = nn.functional.mse_loss(self.head(self.tied(self.frozen(x))) * self.scalar, y) + self.empty.sum()
        if self.weighted:
            self.trainer.strategy.weigh_loss(1.0 + (batch_idx + self.trainer.global_rank) % 3)
        self.seen.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(self.trainer.strategy.gradient_norm()))

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)


class SaveAt(pl.Callback):
    """Saves after some batches, counted over epochs, or in the validation behind them."""

    def __init__(self, folder, at, hook="on_train_batch_end"):
        self.folder, self.at = folder, at
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if done in self.at:
            trainer.save_checkpoint(f"{self.folder}/{done}")


def rows(rank):
    made = [torch.Generator().manual_seed(10 * m + rank) for m in range(BATCHES)]
    return DataLoader([(torch.randn(3, 7, generator=g), torch.randn(3, 3, generator=g)) for g in made], batch_size=None)


def run(cell, world, rank, folder, callback=None, resume=None, **settings):
    strategy, options, weighted, precision = cell
    module = Windows(weighted)
    torch.manual_seed(11 + rank)
    precision = {"precision": None, "plugins": MixedFP16()} if precision == "fp16" else {"precision": precision}
    settings = {"max_epochs": 2, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.5, **settings}
    settings.setdefault("limit_val_batches", 0)
    trainer = make_trainer(
        STRATEGIES[strategy](**options),
        world,
        folder,
        callbacks=[callback] if callback else [],
        **settings,
        **precision,
    )
    trainer.fit(module, rows(rank), rows(rank), ckpt_path=resume)
    return module, trainer, state_of(module, trainer)


def state_of(module, trainer):
    """Everything that has to be equal to the last bit, by name."""
    held = [s for o in trainer.optimizers for s in o.state.values()]
    state = {f"state {n} {k}": v.clone() for n, s in enumerate(held) for k, v in s.items() if torch.is_tensor(v)}
    for buffer in trainer.strategy.engine.buffers:
        state[f"masters of {buffer.name} {buffer.dtype}"] = buffer.shard.clone()
    return state | {n: b.clone() for n, b in module.named_buffers()}


def assert_same(got, want, where):
    assert got.keys() == want.keys(), where
    differ = [n for n, v in want.items() if not torch.equal(got[n], v)]
    assert not differ, f"{where}: {differ} differ"


CELLS = [
    ("single", {}, True, "32-true"),
    ("ddp", {}, False, "32-true"),
    ("ddp", {"reduce": "micro_batch"}, True, "32-true"),
    ("zero1", {}, True, "bf16-mixed"),
    ("zero1", {"reduce": "micro_batch"}, False, "32-true"),
    ("zero2", {}, True, "32-true"),
    ("zero2", {"reduce": "window"}, False, "bf16-true"),
    ("zero3", {}, False, "bf16-mixed"),
    ("zero3", {"reduce": "window", "loss_scale": 256.0, "loss_scale_growth_steps": 1}, True, "fp16"),
    ("zero3", {"keep_small": 8}, True, "32-true"),
]


def cells(world):
    return [c for c in CELLS if (c[0] == "single") == (world == 1) or c[0] == "zero3"]


def check_resume(rank, world_size, folder, every):
    for number, cell in enumerate(cells(world_size)):
        module, trainer, want = run(cell, world_size, rank, folder)
        points = (1, 2, 3, 5, 7, 9, 11) if every else [(2, 5), (3, 11), (9, 5)][number % 3]
        place = f"{folder}/{number}"
        saving = run(cell, world_size, rank, folder, SaveAt(place, points))
        assert_same(saving[2], want, f"{cell}: saving changed the run")
        for at in points:
            where = f"{cell} saved after batch {at}"
            again, resumed, got = run(cell, world_size, rank, folder, resume=f"{place}/{at}")
            assert again.seen == module.seen[at:], f"{where}: losses {again.seen} instead of {module.seen[at:]}"
            assert again.norms == module.norms[-len(again.norms) :], f"{where}: {again.norms} {module.norms}"
            assert len(again.norms) == sum(at < end for end in (4, 6, 10, 12)), where
            assert resumed.global_step == trainer.global_step == 4, where
            assert_same(got, want, where)


@pytest.mark.conformance("D1")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_that_stops_inside_a_window_is_the_run_that_never_stopped(world_size, tmp_path):
    run_ranks(check_resume, world_size, init=False, folder=str(tmp_path), every=world_size == 3, timeout_s=300)


# --- manual optimization: every backward may be a window's last, and gradients stay until they are set to None


def run_manual(strategy, recipe, rank, world, folder, callback=None, resume=None):
    module = Pair(recipe)
    loader = batches(*[batch(n, rank) for n in range(MANUAL_BATCHES)])
    callbacks = [callback] if callback else []
    trainer = make_trainer(strategy, world, folder, callbacks=callbacks)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer, state_of(module, trainer)


def check_manual(rank, world_size, folder, every):
    names = strategies(world_size)
    left = set()
    leaving = [manual.toggled_without_zero_grad, manual.left_on_the_other, manual.zeroed_not_none]
    leaving += [manual.every_second_batch, manual.frequencies, manual.looked_at, manual.gradient_penalty]
    for number, recipe in enumerate(manual.RECIPES if every else leaving):
        kinds = [(names[number % len(names)], ("micro_batch", "window")[number // 2 % 2])]
        for name, reduce in product(names, ("micro_batch", "window")) if every else kinds:
            place = f"{folder}/{recipe.__name__}-{name}-{reduce}"
            make = partial(STRATEGIES[name], reduce=reduce)
            module, _, want = run_manual(make(), recipe, rank, world_size, folder)
            points = (1, 2, 3, 4) if every else (1 + number % 3,)
            saving = run_manual(make(), recipe, rank, world_size, folder, SaveAt(place, points))
            assert saving[0].seen == module.seen
            assert_same(saving[2], want, f"{recipe.__name__} under {name}: saving changed the run")
            for at in points:
                where = f"{recipe.__name__} under {name} {reduce}, saved after batch {at}"
                window = CheckpointReader(f"{place}/{at}").content["window"]
                left.add(None if window is None else window[0]["closed"])
                again, _, got = run_manual(make(), recipe, rank, world_size, folder, resume=f"{place}/{at}")
                assert again.seen == module.seen[len(module.seen) - len(again.seen) :], where
                assert_same(got, want, where)
    assert left >= {False, True}


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradients_that_manual_optimization_leaves_are_there_after_a_resume(world_size, every, tmp_path):
    run_ranks(check_manual, world_size, init=False, folder=str(tmp_path), every=every, timeout_s=900)


# --- under another strategy and on other ranks


class Uneven(nn.Module):
    """A parameter that one rank alone uses, one that only what follows uses, a frozen, a tied and an empty one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2)])
        self.first, self.after, self.frozen, self.tied = (nn.Linear(7, 7) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.tied.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 2))

    def forward(self, x, one, after):
        for block in self.blocks:
            x = x + block(x)
        x = self.tied(self.frozen(x)) + (self.first(x) if one else 0.0) + self.empty.sum()
        return (x + (self.after(x) if after else 0.0)).square().mean()


KINDS = [
    ("ddp", "window"), ("zero2", "micro_batch"), ("zero1", "window"), ("zero3", "micro_batch"), ("ddp", "micro_batch"),
    ("zero2", "window"), ("zero1", "micro_batch"), ("zero3", "window"),
]  # fmt: skip
HYBRID = 4
"""Ranks in two groups of two."""


def parts_of(world):
    """(number, rank, weight, uses `first`, uses `after`) of the micro-batches of the step before, and of a window up to
    a save."""
    before = [(0, r, 2.0, True, True) for r in range(world)]
    return before, [(m, r, 1.0 + (m + r) % 3, r == world - 1, False) for m in (1, 2) for r in range(world)]


def parts_after(world):
    return [(m, r, 1.0 + (m * r) % 2, False, m == 4) for m in (3, 4) for r in range(world)]


def loss_of(model, part):
    m, r, _, one, after = part
    return model(rows_of(m, r), one, after)


def engine_on(world, kind, groups):
    plan, reduce = kind
    model = build(Uneven)
    optimizer = optimizer_of(model)
    engine = Engine(model, PLANS[plan], groups[world], reduce)
    engine.take_optimizer(optimizer)
    return model, optimizer, engine


def accumulate(model, engine, parts, rank):
    for part in parts:
        if part[1] == rank:
            with engine.forward():
                loss = loss_of(model, part)
            engine.backward(loss, weight=part[2])


def save_window(world, kind, rank, groups, path):
    model, optimizer, engine = engine_on(world, kind, groups)
    before, window = parts_of(world)
    accumulate(model, engine, before, rank)
    engine.close_window()
    engine.step(optimizer)
    accumulate(model, engine, window, rank)
    checkpoint = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": [{}]}
    trainer_state.save(engine, [optimizer], checkpoint, {}, path)
    return finish(model, optimizer, engine, world, rank)


class Counts(CheckpointReader):
    """Counts the elements of gradients that are read."""

    elements = 0

    def read_into(self, out, name, start=0):
        self.elements += out.numel() * ("gradient/" in name)
        super().read_into(out, name, start)


def load_saved(world, kind, rank, groups, path):
    model, optimizer, engine = engine_on(world, kind, groups)
    reader = Counts(path)
    state = model.state_dict(keep_vars=True)
    trainer_state.load_model(engine, reader, state, list(state), True)
    trainer_state.load_optimizers(engine, reader, [optimizer])
    load_window(engine, reader)
    engine.gradients.show_restored()
    owned = sum(p.stop - p.start for b in engine.buffers for p in b.pieces.values())
    copies = len({ledger["summed_from"] for ledger in reader.content["window"]})
    if kind[1] == "micro_batch" or len(reader.content["window"]) != world:
        assert reader.elements <= owned * copies, "more was read than this rank keeps"
    return finish(model, optimizer, engine, world, rank)


def finish(model, optimizer, engine, world, rank):
    accumulate(model, engine, parts_after(world), rank)
    engine.close_window()
    norm, loss = float(engine.clip(optimizer, 0.1)), engine.window.mean_loss
    engine.step(optimizer)
    with engine.gathered():
        return {"norm": torch.tensor(norm, dtype=torch.float64), "loss": torch.tensor(loss, dtype=torch.float64)} | {
            n: p.detach().clone() for n, p in model.named_parameters()
        }


def in_one_process(saved_by, loaded_by):
    """The plain loop over what the ranks that saved had, and those that went on."""
    model = build(Uneven)
    optimizer = optimizer_of(model)
    before, window = parts_of(saved_by)
    for parts in (before, window + parts_after(loaded_by)):
        total = sum(weight for _, _, weight, _, _ in parts)
        losses = [loss_of(model, part) * part[2] / total for part in parts]
        sum(losses).backward()
        norm = nn.utils.clip_grad_norm_(
            [p for p in model.parameters() if p.requires_grad], 1e9 if parts == before else 0.1
        )
        optimizer.step()
        optimizer.zero_grad()
    return {"norm": norm, "loss": sum(losses).detach()} | {n: p.detach().clone() for n, p in model.named_parameters()}


def check_cross(rank, world_size, folder, every):
    shards = [dist.new_group([first, first + 1]) for first in (0, 2)], [dist.new_group([n, n + 2]) for n in (0, 1)]
    worlds = {n: dist.new_group(list(range(n))) for n in (2, 3)}
    groups = {1: None, **worlds, HYBRID: EngineGroups(dist.group.WORLD, shards[0][rank // 2], shards[1][rank % 2])}
    kinds_of = {w: [k for k in KINDS if w != HYBRID or k[0] != "ddp"] for w in groups}
    cells = [(w, k) for w, kinds in kinds_of.items() for k in kinds]
    if not every:
        cells = [(1, KINDS[0]), *[(2, k) for k in KINDS[:4]], (3, KINDS[1]), (3, KINDS[2]), (HYBRID, KINDS[3])]
    own = {}
    for world, kind in cells:
        if rank < world:
            own[world, kind] = save_window(world, kind, rank, groups, Path(f"{folder}/{world}-{'-'.join(kind)}"))
    dist.barrier()
    number = 0
    for saved in cells:
        for world in groups:
            want = in_one_process(saved[0], world)
            kinds = kinds_of[world]
            for kind in kinds if every else [saved[1] if world == saved[0] else kinds[number % len(kinds)]]:
                if rank < world:
                    got = load_saved(world, kind, rank, groups, f"{folder}/{saved[0]}-{'-'.join(saved[1])}")
                    where = f"saved under {saved}, gone on under {world, kind}"
                    if (world, kind) == saved:
                        assert all(
                            torch.equal(torch.as_tensor(got[n]), torch.as_tensor(v)) for n, v in own[saved].items()
                        ), where
                    for name, value in want.items():
                        torch.testing.assert_close(
                            got[name], value, rtol=1e-10, atol=1e-10, check_dtype=False, msg=lambda m, w=f"{where} {name}": f"{w}: {m}",
                        )  # fmt: skip
                number += 1


@pytest.mark.conformance("D7")
@pytest.mark.conformance("D8")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_window_goes_on_under_any_strategy_and_number_of_ranks(every, tmp_path):
    run_ranks(check_cross, 4, folder=str(tmp_path), every=every, timeout_s=900)
