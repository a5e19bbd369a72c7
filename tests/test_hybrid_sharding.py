"""shard_group: state is sharded within groups of ranks and replicated across them; numbers, bytes and checkpoints."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import build, check_equal, optimizer_of, plain, rows, sharded
from models import OddMLP, TinyGPT, token_batch, token_loss
from shardlight.strategies import STRATEGIES, ZeRO3
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.process_group import engine_groups
from test_lightning_fit import make_trainer
from test_master_weights import Saved, batches
from test_precision import weights_of

SHARDED = ("zero1", "zero2", "zero3")


def losses(model, batch, step, rank):
    return [model(batch).square().mean(), (model(batch * 0.5) - 1).square().mean()]


def tokens(step, rank):
    return token_batch(100 * step + rank, 2, torch.float64)


def token_losses(model, batch, step, rank):
    return [token_loss(model, batch)]


def check_numbers(rank, world_size, shard_size):
    groups = engine_groups("gloo", 60.0, shard_size)
    for make, loss, batch in ((OddMLP, losses, rows), (TinyGPT, token_losses, tokens)):
        want = plain(make, loss, world_size, batch=batch)
        for name in SHARDED:
            for reduce in ("micro_batch", "window"):
                got = sharded(make, loss, name, rank, world_size, batch=batch, groups=groups, reduce=reduce)
                check_equal(got, want, f"{name} {reduce} groups of {shard_size} on {world_size} ranks")


@pytest.mark.parametrize(("world_size", "shard_size"), [(4, 2), (3, 1)])
def test_numbers_do_not_depend_on_groups(world_size, shard_size):
    run_ranks(check_numbers, world_size, shard_size=shard_size)


def check_bytes(rank, world_size):
    groups = engine_groups("gloo", 60.0, 2)
    for micro_batches in (1, 3):
        model = build(TinyGPT)
        optimizer = optimizer_of(model)
        engine = Engine(model, PLANS["zero3"], groups)
        engine.take_optimizer(optimizer)
        before = engine.collectives.calls.copy()
        for m in range(micro_batches):
            with engine.forward():
                loss = token_loss(model, tokens(m, rank))
            engine.backward(loss)
        in_step = engine.collectives.calls - before
        sent = engine.collectives.bytes_sent
        engine.close_window()
        shards = sum(8 * b.layout.shard_numel for b in engine.buffers)
        small = 4 * (4 + len(engine.table.parameters)) * 8 * 4  # what ranks tell each other at the end of a window
        # Two replicas: an all-reduce sends as many bytes as the shard has, once per window.
        assert shards <= engine.collectives.bytes_sent - sent <= shards + small
        assert in_step["reduce_scatter"] == micro_batches * len(engine.buffers)
        held = sum(b.home.numel() for b in engine.buffers)
        assert 2 * held == sum(b.layout.numel for b in engine.buffers)


def test_only_shards_go_between_groups():
    run_ranks(check_bytes, 4)


def check_checkpoints(rank, world_size, folder):
    keep = ModelCheckpoint(folder, "two", every_n_train_steps=2, save_top_k=-1)
    settings = {"callbacks": keep, "enable_checkpointing": True, "precision": "bf16-true"}
    whole = make_trainer(ZeRO3(shard_group=2), world_size, folder, **settings)
    whole.fit(Saved(), batches(rank, 3))
    want = weights_of(whole.strategy.engine)
    for name, options in (("zero3", {"shard_group": 2}), ("ddp", {}), ("zero1", {"shard_group": 1})):
        keep = ModelCheckpoint(folder, f"again-{name}", every_n_train_steps=2, save_top_k=-1)
        again = make_trainer(STRATEGIES[name](**options), world_size, folder, **{**settings, "callbacks": keep})
        again.fit(Saved(), batches(rank, 3), ckpt_path=f"{folder}/two.ckpt")
        got = weights_of(again.strategy.engine)
        for n in want:
            torch.testing.assert_close(got[n], want[n], rtol=1e-3, atol=1e-5, msg=lambda m: f"{name} {n}: {m}")
            if options.get("shard_group") == 2:
                assert torch.equal(got[n], want[n]), n


def test_a_checkpoint_of_groups_holds_each_piece_once_and_opens_under_any_strategy(tmp_path):
    run_ranks(check_checkpoints, 4, init=False, folder=str(tmp_path), timeout_s=150)


def check_refusals(rank, world_size):
    with pytest.raises(
        StrategyError, match=r"strategy.shard_group: 3: 2 ranks do not divide into groups of 3. Use one of \[1, 2\]"
    ):
        engine_groups("gloo", 60.0, 3)
    assert engine_groups("gloo", 60.0, 2).replicate is None
    dist.barrier()


def test_groups_that_do_not_fit_are_refused():
    run_ranks(check_refusals, 2)
    with pytest.raises(
        StrategyError,
        match="shard_group is for zero1, zero2, zero3, infinity, pipeline, tensor and mesh: ddp shards nothing",
    ):
        STRATEGIES["ddp"](shard_group=2)
