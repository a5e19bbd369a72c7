"""An accumulation window that a checkpoint holds goes on under any strategy and on any number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from loops import build, optimizer_of
from loops import rows as rows_of
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.window import load_window
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.groups import EngineGroups
from shardlight.strategies.engine.plan import PLANS
from test_saved_window import assert_same
from torch import nn


class Uneven(nn.Module):
    """A parameter that one rank alone uses, one that only what follows uses, a frozen, a tied and an empty one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 160), nn.Tanh(), nn.Linear(160, 7)) for _ in range(2)])
        self.first, self.frozen, self.tied, self.after = (nn.Linear(7, n) for n in (7, 7, 7, 280))
        self.frozen.requires_grad_(False)
        self.tied.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 2))

    def forward(self, x, one, after):
        for block in self.blocks:
            x = x + block(x)
        x = self.tied(self.frozen(x)) + (self.first(x) if one else 0.0) + self.empty.sum()
        return (x + (self.after(x).view(4, 40, 7).mean(1) if after else 0.0)).square().mean()


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


def save_window(world, kind, rank, groups, path, stays):
    """`stays`: the save is after the step, and its gradients stay; else it is inside the window that follows."""
    model, optimizer, engine = engine_on(world, kind, groups)
    before, window = parts_of(world)
    accumulate(model, engine, before, rank)
    engine.close_window()
    engine.step(optimizer, keep_gradients=stays)
    accumulate(model, engine, [] if stays else window, rank)
    checkpoint = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": [{}]}
    trainer_state.save(engine, [optimizer], checkpoint, {}, path)
    return finish(model, optimizer, engine, world, rank)


class Counts(CheckpointReader):
    """Counts the elements of gradients that are read."""

    elements = 0

    def read_into(self, out, name, start=0, of=None):
        self.elements += out.numel() * ("gradient/" in name)
        super().read_into(out, name, start, of)


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
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"norm": torch.tensor(norm, dtype=torch.float64), "loss": torch.tensor(loss, dtype=torch.float64)} | weights


def in_one_process(saved_by, loaded_by, stays):
    """The plain loop over what the ranks that saved had, and those that went on."""
    model = build(Uneven)
    optimizer = optimizer_of(model)
    before, window = parts_of(saved_by)
    for parts in (before, ([] if stays else window) + parts_after(loaded_by)):
        total = sum(weight for _, _, weight, _, _ in parts)
        losses = [loss_of(model, part) * part[2] / total for part in parts]
        sum(losses).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9 if parts == before else 0.1)
        optimizer.step()
        if not stays:
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
    cells = [(w, k, stays) for w, k in cells for stays in ((False, True) if k in KINDS[1:3] else (False,))]
    paths = {cell: Path(f"{folder}/{number}") for number, cell in enumerate(cells)}
    own = {(w, k, s): save_window(w, k, rank, groups, path, s) for (w, k, s), path in paths.items() if rank < w}
    dist.barrier()
    turn = 0
    for cell, path in paths.items():
        saved_by, kind, stays = cell
        for world, kinds in kinds_of.items():
            want = in_one_process(saved_by, world, stays)
            same = [kind, *(KINDS[1:2] if world == 1 else [])] if world == saved_by else []
            others = [kinds[(turn + n) % len(kinds)] for n in range(2 if every else not same)]
            for chosen in dict.fromkeys([*same, *others]):
                turn += 1
                if rank < world:
                    where = f"saved under {cell}, gone on under {world, chosen}"
                    got = load_saved(world, chosen, rank, groups, path)
                    if (world, chosen) == cell[:2]:
                        assert_same(got, own[cell], where)
                    for name, value in want.items():
                        torch.testing.assert_close(
                            got[name], value, rtol=1e-10, atol=1e-10, check_dtype=False, msg=lambda m, w=f"{where} {name}": f"{w}: {m}",
                        )  # fmt: skip


@pytest.mark.conformance("D7")
@pytest.mark.conformance("D8")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_window_goes_on_under_any_strategy_and_number_of_ranks(every, tmp_path):
    run_ranks(check_cross, 4, folder=str(tmp_path), every=every, timeout_s=900)
