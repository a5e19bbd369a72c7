"""transformers models train under every strategy with no edit: the numbers of one process on the joined batch."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from hf import CAUSAL, FIRST_ODD_WORD, MODELS, batch, build, checkpointed, dtype_of, joined, tolerance_of
from loops import Outcome, check_equal, optimizer_of
from shardlight.framework import TrainingModule
from shardlight.strategies import ZeRO3
from shardlight.strategies.engine.partition import find_units
from test_lightning_fit import make_trainer
from torch.utils.data import DataLoader, Dataset

STEPS = 3


class Steps(Dataset):
    def __init__(self, name, rank):
        self.name, self.rank = name, rank

    def __len__(self):
        return STEPS

    def __getitem__(self, step):
        return batch(self.name, step, self.rank)


class Tuned(pl.LightningModule):
    """What anybody writes around a transformers model."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.seen = Outcome()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def on_before_optimizer_step(self, optimizer):
        self.seen.norms.append(float(self.trainer.strategy.gradient_norm()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.losses.append(self.trainer.strategy.window_loss)
        if self.trainer.strategy.plan.shard_parameters:
            left = [u.name for u in self.trainer.strategy.engine.table.units if u.gathered]
            assert not left, f"left gathered: {left}"

    def configure_optimizers(self):
        return optimizer_of(self)


def fit(module, strategy, name, rank, world, folder, **options):
    precision = "64-true" if dtype_of(name) is torch.float64 else "32-true"
    trainer = make_trainer(strategy, world, folder, **{"precision": precision, **options})
    trainer.fit(module, DataLoader(Steps(name, rank), batch_size=None))
    with trainer.strategy.gathered():
        module.seen.weights = {n: p.detach().clone() for n, p in module.model.named_parameters()}
    return module.seen


def plain(model, name, world):
    """One process; the mean over the ranks' batches."""
    out, optimizer = Outcome(), optimizer_of(model)
    for step in range(STEPS):
        losses = [model(**batch(name, step, rank)).loss / world for rank in range(world)]
        sum(losses).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        out.norms.append(torch.cat(gradients).norm().item())
        out.losses.append(sum(loss.item() for loss in losses))
        optimizer.step()
        optimizer.zero_grad()
    out.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return out


LAYERS = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "qwen3": "model.layers",
    "bert": "bert.encoder.layer",
    "mixtral_list": "model.layers",
    "t5": "encoder.block decoder.block",
}


def check_units(rank, world_size):
    for name, lists in LAYERS.items():
        model = build(name)
        blocks = [f"{path}.{number}" for path in lists.split() for number in range(len(model.get_submodule(path)))]
        assert [u.name for u in find_units(model) if u.block] == blocks, name
    for name in ("llama", "qwen3"):
        model = MODELS[name]()
        model.resize_token_embeddings(5000, mean_resizing=False)
        units = {u.name: u for u in find_units(model) if not u.block}
        tied = name == "qwen3"
        assert set(units) == {"model.embed_tokens", "rest"} | (set() if tied else {"lm_head"}), name
        # A weight that two modules share stays gathered between them.
        assert len(units["model.embed_tokens"].roots) == 1 + tied and units["model.embed_tokens"].keep == tied


def test_decoder_layers_are_units_and_so_are_large_embeddings():
    run_ranks(check_units, 1, init=False)


def check_models(rank, world_size, folder, cases):
    for name, strategy, attention in cases:
        want = plain(build(name, attention=attention), name, world_size)
        got = fit(Tuned(build(name, attention=attention)), strategy, name, rank, world_size, folder)
        check_equal(got, want, f"{name} {strategy} {attention} on {world_size} ranks", tolerance_of(name))


def test_models_train_as_in_one_process(tmp_path):
    cases = [(name, "zero3", ("sdpa", "eager")[number % 2]) for number, name in enumerate(MODELS)]
    cases += [("t5", "zero2", "sdpa"), ("mixtral", "zero1", "eager"), ("bert", "ddp", "sdpa")]
    run_ranks(check_models, 2, init=False, timeout_s=240, folder=str(tmp_path), cases=cases)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_models_train_as_in_one_process_everywhere(strategy, world_size, tmp_path):
    cases = [(name, strategy, attention) for name in MODELS for attention in ("sdpa", "eager")]
    run_ranks(check_models, world_size, init=False, timeout_s=400, folder=str(tmp_path), cases=cases)


def route_by_words(model):
    """The first half of the experts takes the words of even ranks, the other half those of odd ones."""
    with torch.no_grad():
        vector = model.model.embed_tokens.weight
        vector[:, 0] = torch.where(torch.arange(len(vector)) < FIRST_ODD_WORD, 1.0, -1.0)
        for layer in model.model.layers:
            half = layer.mlp.gate.weight.shape[0] // 2
            layer.mlp.gate.weight[:, 0] += torch.tensor([10.0] * half + [-10.0] * half)
    return model


def check_experts(rank, world_size, folder, cases):
    chosen = set()
    for name, strategy in cases:
        model = route_by_words(build(name))
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.update(args[1].flatten().tolist()))
        got = fit(Tuned(model), strategy, name, rank, world_size, folder)
        want = plain(route_by_words(build(name)), name, world_size)
        check_equal(got, want, f"{name} {strategy}", tolerance_of(name))
    return chosen


def test_experts_that_differ_by_rank(tmp_path):
    cases = [(name, "zero3") for name in MODELS if "mixtral" in name] + [("mixtral_list", "zero2")]
    first, second = run_ranks(check_experts, 2, init=False, timeout_s=240, folder=str(tmp_path), cases=cases)
    assert first and second and first.isdisjoint(second)


class WeighedByTokens(Tuned, TrainingModule):
    """The mean over the tokens of all ranks."""

    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")
        return self.token_loss(self.model(**batch).logits[:, :-1], labels[:, 1:])


def plain_joined(model, name, world):
    out, optimizer = Outcome(), optimizer_of(model)
    for step in range(STEPS):
        whole = joined([batch(name, step, rank) for rank in range(world)])
        labels = whole.pop("labels")
        loss = F.cross_entropy(model(**whole).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        out.norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        out.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    out.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return out


def check_tokens(rank, world_size, folder, names):
    for name in names:
        got = fit(WeighedByTokens(build(name)), "zero3", name, rank, world_size, folder)
        check_equal(got, plain_joined(build(name), name, world_size), name, tolerance_of(name))


@pytest.mark.parametrize("names", [["llama", "gpt2"], pytest.param(CAUSAL, marks=pytest.mark.long)])
def test_token_loss_is_that_of_one_padded_batch(names, tmp_path):
    run_ranks(check_tokens, 3, init=False, timeout_s=240, folder=str(tmp_path), names=names)


def check_recomputed(rank, world_size, folder, names):
    for name in names:
        want = plain(build(name), name, world_size)
        ways = {f"checkpointed, {reentrant=}": (checkpointed(build(name), reentrant), "zero3") for reentrant in (0, 1)}
        ways["recompute: blocks"] = (build(name), ZeRO3(recompute="blocks"))
        for way, (model, strategy) in ways.items():
            inner, calls = next(m for n, m in model.named_modules() if "att" in n.lower()), []
            inner.register_forward_pre_hook(lambda *_: calls.append(1))
            got = fit(Tuned(model), strategy, name, rank, world_size, folder)
            check_equal(got, want, f"{name} {way}", tolerance_of(name))
            assert len(calls) == 2 * STEPS, f"{name} {way}: {len(calls)} forwards"
        strategy.engine.detach()
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


@pytest.mark.parametrize("names", [["llama", "mixtral_list", "t5"], pytest.param(list(MODELS), marks=pytest.mark.long)])
def test_gradient_checkpointing_changes_no_number(names, tmp_path):
    run_ranks(check_recomputed, 2, init=False, timeout_s=240, folder=str(tmp_path), names=names)
