"""fp32 master weights behind 16-bit parameters: nothing small is lost, and what users do to weights counts."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import IN_MEMORY
from models import token_batch
from safetensors.torch import load_file
from shardlight.strategies import STRATEGIES, MixedFP16, ZeRO2
from shardlight.strategies.checkpoint.export import export_safetensors
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from test_lightning_fit import make_trainer
from test_precision import TokenModule, weights_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

BF16 = DtypePolicy(compute=torch.bfloat16)


class Slope(nn.Module):
    """Eight weights of 1 whose gradient is 1, whatever their values."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1, bias=False)
        nn.init.ones_(self.line.weight)

    def forward(self, x):
        return self.line(x).sum()


def made(plan, dtypes, lr=1e-3, **options):
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    engine = Engine(model, PLANS[plan], dist.group.WORLD, dtypes=dtypes, **options)
    engine.take_optimizer(optimizer)
    return model, optimizer, engine


def step(model, optimizer, engine, dtype=torch.bfloat16):
    with engine.forward():
        loss = model(torch.ones(1, 8, dtype=dtype))
    engine.backward(loss)
    engine.close_window()
    return engine.step(optimizer)


def check_small_steps(rank, world_size, folder):
    for plan in ("ddp", "zero1", "zero2", "zero3"):
        model, optimizer, engine = made(plan, BF16)
        for _ in range(100):
            step(model, optimizer, engine)
        weight = weights_of(engine)["line.weight"]
        torch.testing.assert_close(weight, torch.full((1, 8), 0.9), rtol=0, atol=1e-5, msg=lambda m: f"{plan}: {m}")
        with engine.gathered():
            assert torch.equal(model.line.weight, torch.full((1, 8), 0.8984375, dtype=torch.bfloat16)), plan
        check_changes(model, optimizer, engine, plan)


def check_changes(model, optimizer, engine, plan):
    before = weights_of(engine)["line.weight"]
    with engine.gathered(), torch.no_grad():
        model.line.weight[0, 1] = 3.0
    after = weights_of(engine)["line.weight"]
    assert after[0, 1] == 3.0 and after[0, 0] == before[0, 0], f"{plan}: only what was written has changed"
    step(model, optimizer, engine)
    if plan != "zero3":
        model.line.weight.data.clamp_(max=2.0)
        step(model, optimizer, engine)
        assert weights_of(engine)["line.weight"][0, 1] == pytest.approx(1.999, abs=1e-6), plan


def test_steps_smaller_than_a_bf16_step_add_up(tmp_path):
    run_ranks(check_small_steps, 2, folder=str(tmp_path))


class ByHand(nn.Module):
    """Multiplies with weights of its own, which autocast casts by itself."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        return torch.matmul(x, self.w).relu()


class Casts(TorchDispatchMode):
    """Keeps weak references to every 16-bit copy of something of a weight's size."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.shape == (64, 64):
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out


def check_copies(rank, world_size):
    for block, plan in ((ByHand, "zero3"), (lambda: nn.Linear(64, 64), "zero3"), (ByHand, "ddp")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*[block() for _ in range(4)]))
        plain = torch.nn.Sequential(*[block() for _ in range(4)])
        plain.load_state_dict({k.removeprefix("0."): v.clone() for k, v in model.state_dict().items()})
        engine = Engine(model, PLANS[plan], dist.group.WORLD, dtypes=DtypePolicy(compute=torch.bfloat16, mixed=True))
        x = torch.ones(3, 64, requires_grad=True)
        with engine.forward(), torch.autocast("cpu", torch.bfloat16), Casts() as casts:
            loss = model(x).square().mean()
        alive = sum(not made.expired() for made in casts.made)
        assert alive == (0 if plan == "zero3" else 4), f"{plan}: {alive} of {len(casts.made)} copies are alive"
        assert len(casts.made) == (0 if block is not ByHand else 4)
        engine.backward(loss)
        engine.close_window()
        with torch.autocast("cpu", torch.bfloat16):
            plain(x).square().mean().backward()
        for p, q in zip(engine.table.parameters, plain.parameters(), strict=True):
            torch.testing.assert_close(engine.gradient(p), q.grad)


def test_no_16_bit_copy_of_a_weight_lives_on_after_its_unit(tmp_path):
    run_ranks(check_copies, 2)


def check_wire(rank, world_size):
    sent = {}
    for name, reduce_dtype in (("own", None), ("bfloat16", torch.bfloat16)):
        model, optimizer, engine = made("zero2", DtypePolicy(reduce=reduce_dtype))
        model.line.weight.requires_grad_()
        before = engine.collectives.bytes_sent
        with engine.forward():
            loss = model(torch.full((1, 8), 1.0 + 2**-12 + rank))
        engine.backward(loss)
        sent[name] = engine.collectives.bytes_sent - before
        engine.close_window()
        want = 1.5 if reduce_dtype else 1.5 + 2**-12
        assert torch.equal(engine.gradient(model.line.weight), torch.full((1, 8), want)), name
    assert sent["own"] - sent["bfloat16"] == 2 * engine.buffers[0].layout.shard_numel


def test_reduce_dtype_is_what_goes_over_the_wire():
    run_ranks(check_wire, 2)


class Constant(pl.LightningModule):
    """One weight, of which the gradient is 5."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.line.weight)
        self.norms, self.scales = [], []

    def training_step(self, batch, batch_idx):
        self.scales.append(self.trainer.precision_plugin.loss_scale.scale)
        return self.line(batch * float("inf") if self.global_step == self.overflow_at else batch).sum()

    overflow_at = -1

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(self.trainer.strategy.gradient_norm()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fives(count=4):
    return DataLoader([torch.full((1,), 5.0)] * count, batch_size=None)


def fit_fp16(world_size, folder, strategy, module, **settings):
    trainer = make_trainer(strategy, world_size, folder, precision=None, plugins=MixedFP16(), **settings)
    trainer.fit(module, fives())
    return trainer


def check_scale(rank, world_size, folder):
    for name in [s for s in IN_MEMORY if s != "single" or world_size == 1]:
        for growth, scales in ((1, [8.0, 16.0, 32.0, 64.0]), (0, [128.0] * 4)):
            module = Constant()
            chosen = STRATEGIES[name](loss_scale=scales[0], loss_scale_growth_steps=growth)
            fit_fp16(world_size, folder, chosen, module)
            assert (module.norms, module.scales) == ([5.0] * 4, scales), f"{name} growth {growth}"
            assert module.line.weight.dtype == torch.float32, name
            module = Constant()
            module.overflow_at = 1
            with nullcontext() if rank else pytest.warns(UserWarning, match="The loss scale is 4 now"):
                trainer = fit_fp16(world_size, folder, STRATEGIES[name](loss_scale=8.0), module, max_steps=3)
            assert module.scales == [8.0, 8.0, 4.0], name
            assert trainer.strategy.not_finite_steps == 1, name


@pytest.mark.case("C059")
@pytest.mark.conformance("A9")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_norm_does_not_know_the_loss_scale(world_size, tmp_path):
    run_ranks(check_scale, world_size, init=False, folder=str(tmp_path))


class Saved(TokenModule):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(rank, count):
    return DataLoader([token_batch(1000 * m + rank, 4, torch.float32) for m in range(count)], batch_size=None)


def check_resume(rank, world_size, folder):
    for precision in ("bf16-true", "16-mixed"):
        chosen = {"precision": None, "plugins": MixedFP16()} if precision == "16-mixed" else {"precision": precision}
        options = {"loss_scale": 256.0, "loss_scale_growth_steps": 1} if precision == "16-mixed" else {}
        results, path = {}, f"{folder}/{precision}"
        for saver, loader in (("zero3", "zero3"), ("zero3", "ddp"), ("zero1", "zero2")):
            keep = ModelCheckpoint(path, f"{saver}-{loader}", every_n_train_steps=2, save_top_k=-1)
            whole = make_trainer(
                STRATEGIES[saver](**options), world_size, folder, callbacks=keep, enable_checkpointing=True, **chosen
            )
            whole.fit(Saved(), batches(rank, 3))
            keep = ModelCheckpoint(path, "unused", every_n_train_steps=2, save_top_k=-1)
            chosen_again = {**chosen, "plugins": MixedFP16()} if "plugins" in chosen else chosen
            again = make_trainer(
                STRATEGIES[loader](**options),
                world_size,
                folder,
                callbacks=keep,
                enable_checkpointing=True,
                **chosen_again,
            )
            again.fit(Saved(), batches(rank, 3), ckpt_path=f"{path}/{saver}-{loader}.ckpt")
            want, got = weights_of(whole.strategy.engine), weights_of(again.strategy.engine)
            assert all(torch.equal(want[n], got[n]) for n in want), f"{precision} {saver} to {loader}"
            if precision == "16-mixed":
                assert again.precision_plugin.loss_scale.scale == 2048.0
            results[saver] = want
        assert all(torch.equal(results["zero3"][n], results["zero1"][n]) for n in want), precision
        if rank == 0 and precision == "bf16-true":
            export_safetensors(f"{path}/zero3-ddp.ckpt", f"{path}/weights.safetensors")
            assert {t.dtype for t in load_file(f"{path}/weights.safetensors").values()} == {torch.float32}


def test_a_run_with_masters_resumes_to_the_last_bit_under_any_strategy(tmp_path):
    run_ranks(check_resume, 2, init=False, folder=str(tmp_path), timeout_s=120)


class Router(nn.Module):
    """Switches autocast off for its own weights, as routers of experts do."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.gate(x.float())
        return self.out(x).sum()


def check_router(rank, world_size):
    inputs = torch.linspace(-1, 1, 8).view(1, 8)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        want = Router()(inputs)
    for keep in ((), ("gate",)):
        torch.manual_seed(0)
        model = Router()
        policy = DtypePolicy(compute=torch.bfloat16, mixed=True, keep_fp32=keep)
        engine = Engine(model, PLANS["zero3"], dist.group.WORLD, dtypes=policy)
        with engine.forward(), torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs)
        assert torch.equal(loss, want), keep
        engine.backward(loss)
    with pytest.raises(StrategyError, match="strategy.keep_fp32: no parameter is below a module called nope"):
        DtypePolicy(compute=torch.bfloat16, mixed=True, keep_fp32=("nope",)).compute_dtypes(model)


def test_a_router_that_switches_autocast_off_computes_in_fp32():
    run_ranks(check_router, 2)


def check_other_masters(rank, world_size, folder):
    keep = ModelCheckpoint(folder, "with", every_n_train_steps=2, save_top_k=-1)
    settings = {"callbacks": keep, "enable_checkpointing": True, "precision": "bf16-true"}
    make_trainer(ZeRO2(), world_size, folder, **settings).fit(Saved(), batches(rank, 3))
    keep = ModelCheckpoint(folder, "without", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(ZeRO2(master=False), world_size, folder, **{**settings, "callbacks": keep})
    trainer.fit(Saved(), batches(rank, 3), ckpt_path=f"{folder}/with.ckpt")
    assert trainer.global_step == 3


def test_a_run_goes_on_without_the_masters_it_had(tmp_path):
    run_ranks(check_other_masters, 2, init=False, folder=str(tmp_path))


def test_masters_off_needs_bf16_true():
    assert ZeRO2(master=False).options.master is False


def test_a_model_can_be_taken_back_after_a_step():
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(model, PLANS["zero3"], None, dtypes=BF16)
    engine.take_optimizer(optimizer)
    with engine.forward():
        loss = model(torch.ones(1, 8, dtype=torch.bfloat16))
    engine.backward(loss)
    engine.step(optimizer)
    engine.detach()
    assert model.line.weight.grad is None  # it was one of fp32 weights, which ended
    assert model.line.weight.dtype == torch.bfloat16 and model.line.weight.eq(0.5).all()
    model(torch.ones(1, 8, dtype=torch.bfloat16)).backward()
    assert model.line.weight.grad.eq(1).all()
