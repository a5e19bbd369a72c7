"""`--to hf` writes what `from_pretrained` of transformers and peft opens: the weights that were trained."""

import copy
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from hf import MODELS, batch, build, dtype_of, old_names, transformers
from shardlight.framework.exports import WeightExports
from shardlight.strategies.checkpoint.export import HF_SHARD_BYTES, export
from shardlight.strategies.errors import CheckpointError
from test_export import same_files
from test_lightning_fit import make_trainer
from test_peft import adapted, peft
from test_transformers import Steps, Tuned
from torch import nn
from torch.utils.data import DataLoader

NAMES = [name for name in MODELS if name not in ("mixtral_list", "mixtral_grouped")]
"""Those that are what transformers itself builds of their config."""


class WithHead(Tuned):
    """A model with something beside it."""

    def __init__(self, model):
        super().__init__(model)
        self.beside = nn.Linear(2, 2).double()


def trained(module, name, rank, world_size, folder, strategy, **options):
    """Trains and saves; returns the module's full weights."""
    precision = "64-true" if dtype_of(name) is torch.float64 else "32-true"
    exports = WeightExports(Path(folder), 3, options.pop("dtype", "bf16"))
    trainer = make_trainer(strategy, world_size, folder, precision=precision, callbacks=[exports])
    trainer.fit(module, DataLoader(Steps(name, rank), batch_size=None))
    trainer.save_checkpoint(f"{folder}/saved")
    with trainer.strategy.gathered():
        return {n: t.detach().clone() for n, t in module.model.state_dict().items()}


def check_opens(rank, world_size, folder, cases):
    for name, strategy in cases:
        home = Path(folder, name)
        home.mkdir(exist_ok=True)
        weights = trained(Tuned(build(name)), name, rank, world_size, home, strategy)
        if rank:
            continue
        made = export(home / "saved", home / "hf", to="hf")
        assert made.left_out == ()
        loaded, report = type(build(name)).from_pretrained(home / "hf", output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (name, report)
        found = loaded.state_dict()
        assert found.keys() == weights.keys(), name
        for key, value in weights.items():
            assert torch.equal(found[key], value), (name, key)
        config = build(name).config.to_dict()
        same = {k for k, v in loaded.config.to_dict().items() if config.get(k) == v}
        assert {"vocab_size", "model_type", "pad_token_id"} <= same
        words = batch(name, 0, 0)
        again = build(name)
        again.load_state_dict(weights)
        with torch.no_grad():
            # transformers' default way of experts has no fp64.
            # transformers keeps weights where they lie in the file: a copy lies as any other model's, and computes its bits.
            found = copy.deepcopy(loaded).eval()
            assert name == "mixtral" or torch.equal(found(**words).logits, again.eval()(**words).logits), name
        export(home / "saved", home / "small", to="hf", max_file_bytes=4_000, dtype="bf16")
        assert len(list((home / "small").glob("model-0*.safetensors"))) > 1
        loaded = type(build(name)).from_pretrained(home / "small")
        assert loaded.dtype == torch.bfloat16
        assert all(torch.equal(t, weights[n].bfloat16()) for n, t in loaded.state_dict().items() if n in weights), name
        export(home / "saved", home / "bf16", to="hf", dtype="bf16", max_file_bytes=HF_SHARD_BYTES)
        assert "config.json" in same_files(home / "bf16", home / "exports" / "step-3"), name
        with pytest.raises(CheckpointError, match="--only trainable leaves out weights that from_pretrained needs"):
            export(home / "saved", home / "x", to="hf", trainable=True)


def test_from_pretrained_opens_an_export(tmp_path):
    strategies = ("zero3", "ddp", "zero2", "zero1")
    cases = [(name, strategies[number % 4]) for number, name in enumerate(NAMES)]
    run_ranks(check_opens, 2, init=False, timeout_s=300, folder=str(tmp_path), cases=cases)


def check_adapters(rank, world_size, folder):
    home = Path(folder)
    weights = trained(Tuned(adapted()), "llama", rank, world_size, home, "zero3", dtype="fp32")
    if rank:
        return
    made = export(home / "saved", home / "adapter", to="hf")
    assert sorted(p.name for p in (home / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    again = adapted()
    again.load_state_dict(weights)
    wanted = peft.get_peft_model_state_dict(again)
    assert made.tensors == len(wanted) == 12
    with old_names():
        base = adapted().unload()
        loaded = peft.PeftModel.from_pretrained(base, home / "adapter")
    found = peft.get_peft_model_state_dict(loaded)
    assert found.keys() == wanted.keys() and all(torch.equal(found[n].double(), wanted[n].double()) for n in wanted)
    export(home / "saved", home / "fp32", to="hf", dtype="fp32")
    same_files(home / "fp32", home / "exports" / "step-3")
    export(home / "saved", home / "part", trainable=True)
    export(home / "saved", home / "whole")


def test_adapters_are_exported_as_peft_writes_them(tmp_path):
    run_ranks(check_adapters, 2, init=False, timeout_s=240, folder=str(tmp_path))


def check_left_out(rank, world_size, folder):
    module = WithHead(build("gpt2"))
    with pytest.warns(
        UserWarning, match="exports hold the transformers model alone.* and not beside.weight, beside.bias"
    ):
        trained(module, "gpt2", rank, world_size, folder, "single")
    assert export(f"{folder}/saved", f"{folder}/hf", to="hf").left_out == ("beside.weight", "beside.bias")
    assert transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/hf").config.n_layer == 3


def test_what_is_beside_a_model_is_left_out_and_named(tmp_path):
    run_ranks(check_left_out, 1, init=False, timeout_s=120, folder=str(tmp_path))
