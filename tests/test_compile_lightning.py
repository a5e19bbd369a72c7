"""Compiled modules under Lightning's Trainer: same weights as uncompiled ones, and checkpoints that go between them."""

import warnings

import pytest
import torch
from harness import run_ranks
from models import reference
from safetensors.torch import load_file
from shardlight.strategies import STRATEGIES
from shardlight.strategies.checkpoint.export import export_safetensors
from test_lightning_fit import Batches, Module, make_trainer
from torch.utils.data import DataLoader

BACKEND = "eager"


class Compiled(Module):
    """Compiles its model in one of the ways there are."""

    def __init__(self, how=None, optimizer="adamw"):
        super().__init__("tiny_gpt", optimizer)
        self.how = how
        if how == "in init":
            self.model = torch.compile(self.model, backend=BACKEND)
        elif how == "in place":
            self.model.compile(backend=BACKEND)
        elif how == "submodule":
            self.model.blocks[1] = torch.compile(self.model.blocks[1], backend=BACKEND)

    def configure_model(self):
        if self.how == "in configure_model" and not hasattr(self.model, "_orig_mod"):
            self.model = torch.compile(self.model, backend=BACKEND)


def fit(rank, world, folder, strategy, how, steps, resume=None, precision="64-true"):
    module = Compiled(None if how in ("option", "whole") else how)
    options = {"compile": "blocks", "compile_backend": BACKEND} if how == "option" else {}
    trainer = make_trainer(
        STRATEGIES[strategy](**options), world, folder, max_epochs=-1, max_steps=steps, precision=precision
    )
    given = torch.compile(module, backend=BACKEND) if how == "whole" else module
    loader = DataLoader(Batches("tiny_gpt", rank, 4), batch_size=None)
    val = DataLoader(Batches("tiny_gpt", rank, 2), batch_size=None)
    trainer.fit(given, loader, val, ckpt_path=resume)
    return trainer, module


def check_keys(rank, world_size, folder, ways):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    bare = Module("tiny_gpt", "adamw")
    _, _, want = reference("tiny_gpt", world_size, 4, 1, None, "adamw")
    for number, (strategy, how, other) in enumerate(ways):
        where = f"{strategy} {how} then {other}"
        torch._dynamo.reset()
        path = f"{folder}/{number}"
        trainer, _ = fit(rank, world_size, folder, strategy, how, 2)
        trainer.save_checkpoint(path)
        if rank == 0:
            export_safetensors(path, f"{path}.safetensors")
            exported = load_file(f"{path}.safetensors")
            assert set(exported) == set(bare.state_dict()), where
            bare.load_state_dict(exported, strict=True)
        torch._dynamo.reset()
        trainer, module = fit(rank, world_size, folder, strategy, other, 4, resume=path)
        with trainer.strategy.gathered():
            got = {n.replace("_orig_mod.", ""): p.detach().clone() for n, p in module.model.named_parameters()}
        assert set(got) == set(want), where
        for name, weight in want.items():
            torch.testing.assert_close(got[name], weight, rtol=1e-10, atol=1e-10, msg=lambda m: f"{where} {name}: {m}")


WAYS = ("whole", "in init", "in place", "submodule", "in configure_model", "option")


@pytest.mark.case("C028")
@pytest.mark.conformance("A12")
@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_go_between_compiled_and_bare_modules(world_size, tmp_path):
    ways = [("single", None, "whole")]
    if world_size == 2:
        ways = [
            ("ddp", "whole", None),
            ("zero3", None, "whole"),
            ("zero3", "in init", "option"),
        ]
    run_ranks(check_keys, world_size, init=False, folder=str(tmp_path), ways=ways, timeout_s=400)


@pytest.mark.long
@pytest.mark.case("C028")
@pytest.mark.conformance("A12")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_checkpoints_go_between_every_way_to_compile(strategy, tmp_path):
    ways = [(strategy, how, None) for how in WAYS] + [(strategy, None, how) for how in WAYS]
    run_ranks(check_keys, 2, init=False, folder=str(tmp_path), ways=ways, timeout_s=900)


def mixed(rank, world_size, folder):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    weights = []
    for how in (None, "option", "in init"):
        torch._dynamo.reset()
        trainer, module = fit(rank, world_size, folder, "zero3", how, 2, precision="bf16-mixed")
        with trainer.strategy.gathered():
            weights.append({n: p.detach().clone() for n, p in module.model.named_parameters()})
    for other in weights[1:]:
        for name, weight in weights[0].items():
            torch.testing.assert_close(other[name], weight, rtol=1e-2, atol=1e-3, msg=lambda m: f"{name}: {m}")


@pytest.mark.conformance("A12")
def test_compiled_under_bf16_mixed(tmp_path):
    run_ranks(mixed, 2, init=False, folder=str(tmp_path), timeout_s=400)
