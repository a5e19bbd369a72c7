"""A trace of torch.profiler shows what the engine does by unit and phase: see [Note: ranges], ranges.py."""

import itertools
import json
from pathlib import Path

import torch
from harness import run_ranks
from lightning.pytorch.profilers import PyTorchProfiler
from loops import group, plans
from models import TinyGPT, token_batch
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.ranges import COMPUTING, SHARED, STEP, TRANSFERS
from test_cases_leaks import Model
from test_cases_training import batches
from test_lightning_fit import make_trainer
from torch.nn import functional as F

STEPS = 2


def spans(events: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) of every range in the order of their beginnings, by name, in microseconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def inside(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def traced(rank, world_size, folder):
    found = {}
    for name in plans(world_size):
        model = TinyGPT().double()
        engine = Engine(model, PLANS[name], group(world_size))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine.take_optimizer(optimizer)

        def step(number):
            tokens, labels = token_batch(number, 2, torch.float64)
            with torch.profiler.record_function("training step"):
                with engine.forward():
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                engine.backward(loss)
                engine.step(optimizer)

        step(0)
        before = hooks(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for number in range(1, 1 + STEPS):
                step(number)
        assert hooks(model) == before, "they are there only while a profile is taken"
        file = Path(folder) / f"{name}-{world_size}-{rank}.json"
        profile.export_chrome_trace(str(file))
        found[name] = spans(json.loads(file.read_text())["traceEvents"])
    return found


def check_step(plan, ranges, number):
    """The ranges of one training step of a model with two blocks."""
    whole = ranges["training step"][number]

    def of(name, count=1):
        here = [span for span in ranges.get(name, []) if inside(span, whole)]
        assert len(here) == count, (plan, name, here, sorted(ranges))
        return here

    (step,) = of(STEP)
    forward = [of(f"compute blocks.{n}")[0] for n in (0, 1)]
    backward = [of(f"compute backward blocks.{n}")[0] for n in (0, 1)]
    ends = [forward[0], forward[1], backward[1], backward[0], step]
    assert all(one[1] <= next_one[0] for one, next_one in itertools.pairwise(ends)), (plan, ends)
    if plan == "zero3":
        for n in (0, 1):
            # In forward and again in backward: it has arrived when its unit computes.
            arrived = of(f"gather blocks.{n} (wait)", 2)
            started = of(f"gather blocks.{n} (start)", 2)
            assert all(s[1] <= a[0] for s, a in zip(started, arrived, strict=True))
            assert arrived[0][1] <= forward[n][0] and forward[n][1] <= started[1][0]
            assert inside(arrived[1], backward[n]) or arrived[1][1] <= backward[n][0]
    if plan not in ("single", "ddp"):
        for n in (0, 1):
            (started,), (over,) = of(f"reduce blocks.{n} (start)"), of(f"reduce blocks.{n} (wait)")
            assert backward[n][0] <= started[0] and started[1] <= over[0] and over[1] <= step[1]
    if plan in ("zero1", "zero2"):
        assert all(inside(of(f"publish blocks.{n} (wait)")[0], step) for n in (0, 1))


def check_traces(world_size, folder):
    for found in run_ranks(traced, world_size, folder=str(folder)):
        assert set(found) == set(plans(world_size))
        for plan, ranges in found.items():
            assert len(ranges["training step"]) == STEPS
            for number in range(STEPS):
                check_step(plan, ranges, number)
            known = (*COMPUTING, *TRANSFERS, STEP, "training step", "Optimizer.", "gloo:", SHARED)
            strange = [name for name in ranges if not name.startswith(known)]
            assert not strange, strange


def test_every_unit_has_its_ranges_in_order_on_two_ranks(tmp_path):
    check_traces(2, tmp_path)


def fitted(rank, world_size, folder):
    profiler = PyTorchProfiler(dirpath=folder, filename="trace")
    trainer = make_trainer("zero3", world_size, folder, profiler=profiler, limit_val_batches=0, log_every_n_steps=6)
    rows = batches(*[token_batch(m, 2, torch.float64) for m in range(6)])
    trainer.fit(Model(), rows, rows)


def test_a_profile_that_lightning_takes_shows_them(tmp_path):
    run_ranks(fitted, 1, init=False, folder=str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    found = spans(json.loads(file.read_text())["traceEvents"])
    # Lightning ends a step of the profile with `training_step`: the last of three has no backward.
    assert len(found["compute model.blocks.0"]) == len(found["compute model.blocks.1"]) == 3
    for name in (
        "compute backward model.blocks.1",
        "reduce model.blocks.0 (wait)",
        "gather model.blocks.0 (wait)",
        STEP,
    ):
        assert len(found[name]) >= 2, name


def test_every_unit_has_its_ranges_in_order_on_one_rank(tmp_path):
    check_traces(1, tmp_path)
