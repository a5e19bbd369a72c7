"""What an estimate says of memory and disk is what is counted when the run is there."""

import gc
import threading

import pytest
import torch
from harness import run_ranks
from loops import group
from models import TinyGPT, token_batch, token_loss
from shardlight.framework.bench.meters import memory
from shardlight.ops.lion import Lion
from shardlight.strategies.engine.deferred.tensors import deferred_init
from shardlight.strategies.engine.dtypes import AS_THEY_ARE, DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.estimate import Setting, estimate
from shardlight.strategies.engine.offload import Offload
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.shapes import shapes_of

POLICIES = {
    "32": AS_THEY_ARE,
    "mixed": DtypePolicy(compute=torch.bfloat16, mixed=True),
    "bf16": DtypePolicy(compute=torch.bfloat16),
}
STATE = ("weights", "fp32 masters", "gradients", "optimizer state")
EVERYTHING = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}


def two_steps(rank, world, plan, precision="32", make=torch.optim.AdamW, offload=None, keep_small=0, **options):
    """The estimate of a run, and what there is of its state in memory and on disk after two steps."""
    torch.manual_seed(0)
    model = TinyGPT(vocab=64, width=64, layers=2)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    opt = make(model.parameters(), 0.01)
    dtypes, reduce = POLICIES[precision], options.get("reduce") or PLANS[plan].reduce
    moments = torch.bfloat16 if options.get("moments_dtype") else None
    units = shapes_of(model, PLANS[plan], [opt], dtypes=dtypes, keep_small=keep_small, moments=moments)
    setting = Setting(plan=PLANS[plan], ranks=world, world_size=world, reduce=reduce, offload=offload)
    engine = Engine(model, PLANS[plan], group(world), dtypes=dtypes, offload=offload, keep_small=keep_small, **options)
    engine.take_optimizer(opt)
    for step in range(2):
        with engine.forward(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed"):
            loss = token_loss(model, [t % 17 for t in token_batch(step, 2, torch.float32)])
        engine.backward(loss)
        engine.step(opt)
    told = estimate(units, setting)
    state = [line for line in told.lines if line.what in STATE]
    memory = sum(line.nbytes for line in state if line.where == "host")
    certain = {where: sum(line.certain for line in state if line.where == where) for where in ("host", "disk")}
    counters = 4 * sum(1 for s in opt.state.values() for key in s if key in ("step", "mu_product"))
    there = engine.state_bytes([opt]) - counters, engine.tiers.disk_bytes if engine.tiers is not None else 0
    return (memory, told.nbytes("disk")), there, certain


def counted(rank, world, folder):
    disk = {"disk": folder, "staging_bytes": 4096}
    everything = Offload(**EVERYTHING, **disk)
    runs = [
        {"plan": "ddp"},
        {"plan": "ddp", "precision": "bf16"},
        {"plan": "zero1"},
        {"plan": "zero1", "precision": "mixed", "offload": Offload(optimizer="disk", **disk)},
        {"plan": "zero2", "precision": "mixed"},
        {"plan": "zero2", "reduce": "window"},
        {"plan": "zero2", "precision": "bf16", "offload": Offload(optimizer="disk", gradients="disk", **disk)},
        {"plan": "zero3", "precision": "mixed", "make": torch.optim.SGD},
        {"plan": "zero3", "precision": "bf16", "keep_small": 100},
        {"plan": "zero3", "moments_dtype": "bfloat16"},
        {"plan": "zero3", "offload": Offload(parameters="disk", **disk)},
        {"plan": "zero3", "offload": Offload(optimizer="disk", **disk), "make": torch.optim.NAdam},
        {"plan": "infinity", "offload": everything},
        {"plan": "infinity", "offload": everything, "precision": "mixed", "keep_small": 100},
        {"plan": "infinity", "offload": everything, "precision": "bf16", "make": Lion},
    ]
    return [(str(r), *two_steps(rank, world, **r)) for r in runs]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_state_is_what_is_counted(world, tmp_path):
    """To the byte on the first rank, which has at least as much as any other; and no rank has less than is certain."""
    for ranks in zip(*run_ranks(counted, world, folder=str(tmp_path), timeout_s=200), strict=True):
        name, told, there, certain = ranks[0]
        assert told == there, name
        assert all(mine[0] <= told[0] and mine[1] <= told[1] for _, _, mine, _ in ranks), name
        for n, where in enumerate(("host", "disk")):
            assert sum(mine[n] for _, _, mine, _ in ranks) >= world * certain[where], (name, where)
            assert certain[where] >= 0.92 * told[n], (name, where)


def peak(rank, world, folder, width, layers):
    """What the estimate says of memory, and the most that was there above what a small run leaves: bytes."""

    def go(width, layers, steps):
        with deferred_init("cpu"):
            model = TinyGPT(vocab=17, width=width, layers=layers)
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        units = shapes_of(model, PLANS["infinity"], [opt], dtypes=AS_THEY_ARE)
        offload = Offload(**EVERYTHING, disk=folder)
        setting = Setting(plan=PLANS["infinity"], ranks=world, world_size=world, reduce="micro_batch", offload=offload)
        engine = Engine(model, PLANS["infinity"], group(world), offload=offload)
        engine.take_optimizer(opt)
        after = []
        for step in range(steps):
            with engine.forward():
                loss = token_loss(model, token_batch(step, 1, torch.float32))
            engine.backward(loss)
            del loss
            engine.step(opt)
            after.append(memory()["pss"])
        return estimate(units, setting), after, engine.tiers.disk_bytes

    go(16, 2, 2)
    gc.collect()
    before, most, done = memory()["pss"], [0], threading.Event()

    def watch():
        while not done.wait(0.003):
            most[0] = max(most[0], memory()["pss"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    told, after, disk = go(width, layers, 5)
    done.set()
    watcher.join()
    assert disk == told.nbytes("disk")
    return told.nbytes("host"), most[0] - before, after


ALLOCATOR_BYTES = 48 << 20
"""What glibc keeps of freed memory at these sizes, and activations."""


@pytest.mark.parametrize(
    "world, width, layers",
    [(1, 512, 3), pytest.param(2, 512, 6, marks=pytest.mark.long), pytest.param(1, 1536, 4, marks=pytest.mark.long)],
)
def test_memory_of_a_run_on_disk_is_what_was_told_and_steady(world, width, layers, tmp_path):
    for told, most, after in run_ranks(peak, world, folder=str(tmp_path), width=width, layers=layers, timeout_s=300):
        assert 0.6 * told < most < 1.05 * told + ALLOCATOR_BYTES, (told, most)
        assert after[-1] < 1.05 * after[2] + (16 << 20), after
