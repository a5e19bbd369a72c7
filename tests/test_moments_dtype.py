"""Moments in bf16: half the memory, what it costs in precision, and the same state through save and resume."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import build, group, plans, rows
from shardlight.ops.adam import adam_step
from shardlight.ops.lion import Lion
from shardlight.ops.registry import Op
from shardlight.ops.steps import Batch
from shardlight.strategies import STRATEGIES
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from test_lightning_fit import make_trainer
from test_optimizer_kernels import OPTIMIZERS, Mine, Odd, groups_of
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

STEPS = 4
BF16 = torch.bfloat16


def second_moment(beta2, dtype, gradient, steps=2000):
    param, mean, square = torch.ones(1), torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    for step in range(steps):
        batch = Batch(params=[param], grads=[torch.tensor([gradient])], states=([mean], [square]), numbers=[step + 1.0])
        adam_step(batch, lr=0.0, betas=(0.9, beta2), eps=1e-8, weight_decay=0.0, decoupled=True)
    return float(square)


def test_a_second_moment_in_bf16_needs_a_beta2_that_moves_it():
    # Gradients fell from 1 to 0.1: the second moment is 0.01 in the end.
    assert second_moment(0.999, torch.float32, 0.1) == pytest.approx(0.144, rel=0.01)
    assert second_moment(0.999, BF16, 0.1) == 1.0
    assert 0.011 < second_moment(0.99, BF16, 0.1) < 0.02
    assert second_moment(0.95, BF16, 0.1) == pytest.approx(0.01, rel=0.08)
    # Gradients rose to 3: 9 in the end.
    assert second_moment(0.999, BF16, 3.0) == 2.0
    assert second_moment(0.95, BF16, 3.0) == pytest.approx(9, rel=0.08)


def rounded_by_hand(make, world):
    """One process, whose state is rounded after each of PyTorch's own steps."""
    model = build(Odd, torch.float32)
    optimizer = make(groups_of(model))
    for step in range(STEPS):
        for rank in range(world):
            (model(rows(step, rank).float(), step) / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for state in optimizer.state.values():  # made by the constructor
            round_(state)
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            round_(state)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def round_(state):
    for key, value in state.items():
        if key != "step" and isinstance(value, torch.Tensor):
            value.copy_(value.bfloat16())


def under(plan, make, rank, world, moments, compute=None):
    model = build(Odd, torch.float32)
    optimizer = make(groups_of(model))
    dtypes = DtypePolicy(compute=compute)
    engine = Engine(model, PLANS[plan], group(world), dtypes=dtypes, moments_dtype=moments)
    engine.take_optimizer(optimizer)
    for step in range(STEPS):
        with engine.forward():
            loss = model(rows(step, rank).to(compute or torch.float32), step)
        engine.backward(loss)
        engine.close_window()
        engine.clip(optimizer, 0.5)
        engine.step(optimizer)
    with engine.gathered():
        return {n: p.detach().clone() for n, p in model.named_parameters()}, optimizer, engine


def moments_of(optimizer):
    return [(p, v) for p, s in optimizer.state.items() for k, v in s.items() if k != "step" and v is not None]


def check_engine(rank, world):
    for name, make in OPTIMIZERS.items():
        want = rounded_by_hand(make, world)
        for number, plan in enumerate(plans(world)):
            for native in (True, False) if number == len(plans(world)) - 1 else (True,):
                own = Op.native
                if not native:
                    Op.native = lambda op, device: False
                weights, optimizer, engine = under(plan, make, rank, world, "bfloat16")
                Op.native = own
                for _, value in moments_of(optimizer):
                    assert value.dtype == BF16, (name, plan)
                assert all(s["step"].dtype == torch.float32 for s in optimizer.state.values() if "step" in s)
                for key, weight in want.items():
                    # A rounding that falls the other way is 1/256 of a moment.
                    close = {"rtol": 2e-3, "atol": 4e-3 if name != "lion" else 0.1}
                    torch.testing.assert_close(
                        weights[key], weight, **close, msg=lambda m, k=key: f"{name} {plan} {k} {m}"
                    )
            _, wide, of_wide = under(plan, make, rank, world, None)
            saved = sum(2 * v.numel() for _, v in moments_of(wide))
            assert of_wide.state_bytes([wide]) - engine.state_bytes([optimizer]) == saved, (name, plan)
            assert bool(saved) == (bool(moments_of(wide)) and any(v.numel() for _, v in moments_of(wide)))
    _, optimizer, _ = under("zero2", OPTIMIZERS["adamw"], rank, world, "bfloat16", compute=BF16)
    # Rank 0 alone holds a part of so few elements.
    assert {v.dtype for _, v in moments_of(optimizer)} == ({BF16} if rank == 0 else set()), "of fp32 masters"


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_moments_in_bf16_are_those_of_a_plain_step_rounded(world_size):
    run_ranks(check_engine, world_size, timeout_s=200)


def test_who_steps_by_its_own_code_is_refused():
    for make, options, why in (
        (Mine, {}, r"Mine takes its step itself \(there is no op for Mine\)"),
        (AdamW, {"optimizer_kernel": "torch"}, r"AdamW takes its step itself \(optimizer_kernel is torch\)"),
    ):
        model = nn.Linear(3, 2)
        engine = Engine(model, PLANS["zero2"], moments_dtype="bfloat16", **options)
        with pytest.raises(StrategyError, match=f"moments_dtype=bfloat16: {why}"):
            engine.take_optimizer(make(model.parameters(), lr=0.1))
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    engine = Engine(model, PLANS["zero2"], moments_dtype="bfloat16")
    engine.take_optimizer(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    with engine.forward():
        loss = model(torch.ones(1, 3)).sum()
    engine.backward(loss)
    with pytest.raises(StrategyError, match="hooks on its step may look at gradients"):
        engine.step(optimizer)
    with pytest.raises(StrategyError, match="moments_dtype='float16' is not an option of zero2: use 'bfloat16'"):
        STRATEGIES["zero2"](moments_dtype="float16")


class OddModule(pl.LightningModule):
    def __init__(self, make):
        super().__init__()
        self.make, self.model = make, build(Odd, torch.float32)
        # So that every rank holds a part.
        self.model.many = nn.Parameter(torch.linspace(-1, 1, 5000))

    def training_step(self, batch, batch_idx):
        return self.model(batch.float(), batch_idx) + self.model.many.square().mean()

    def configure_optimizers(self):
        return self.make(groups_of(self.model))


def check_resume(rank, world, folder):
    def fit(name, strategy, moments, steps=STEPS, **options):
        module = OddModule({"adamw": OPTIMIZERS["adamw"], "lion": lambda g: Lion(g, lr=0.01)}[name])
        keep = ModelCheckpoint(folder, f"{name}-{strategy}-{moments}-{{step}}", every_n_train_steps=2, save_top_k=-1)
        chosen = STRATEGIES[strategy](moments_dtype=moments)
        trainer = make_trainer(
            chosen, world, folder, callbacks=keep, enable_checkpointing=True, precision="32-true", max_steps=steps
        )
        loader = DataLoader([rows(step, rank) for step in range(STEPS)], batch_size=None)
        trainer.fit(module, loader, **options)
        with trainer.strategy.gathered():
            weights = {n: p.detach().clone() for n, p in module.named_parameters()}
        state = trainer.optimizers[0].state
        return weights, {n: v.clone() for n, v in enumerate(v for s in state.values() for v in s.values())}

    for name, strategy in (("adamw", "zero3"), ("lion", "ddp")):
        for saved in ("bfloat16", None):
            want, kept = fit(name, strategy, saved)
            path = f"{folder}/{name}-{strategy}-{saved}-step=2.ckpt"
            got, again = fit(name, strategy, saved, ckpt_path=path)
            assert all(torch.equal(got[n], want[n]) for n in want), (name, saved)
            assert all(a.dtype == kept[n].dtype and torch.equal(a, kept[n]) for n, a in again.items())
            other = None if saved else "bfloat16"
            got, again = fit(name, strategy, other, ckpt_path=path)
            dtypes = {v.dtype for v in again.values() if v.numel() and v.dim()}
            assert dtypes == ({BF16} if other else {torch.float32}), (name, other)
            for n in want:
                torch.testing.assert_close(got[n], want[n], rtol=1e-2, atol=1e-2 if name == "adamw" else 0.05)


def test_bf16_moments_survive_save_and_resume_and_open_as_fp32_and_back(tmp_path):
    run_ranks(check_resume, 2, init=False, folder=str(tmp_path), timeout_s=120)
