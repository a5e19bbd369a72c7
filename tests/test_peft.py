"""LoRA by peft on a transformers model: adapters train as in one process, and nothing is done for frozen weights."""

import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from hf import batch, checkpointed, llama, old_names, tolerance_of, transformers
from loops import check_equal, group
from shardlight.strategies import ZeRO3
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.unit import Unit
from test_lightning_fit import make_trainer
from test_transformers import Steps, Tuned, fit, plain
from torch.utils.data import DataLoader

peft = pytest.importorskip("peft")


def adapted(reentrant=None, layers=3, which=None):
    """LoRA in all layers or in those of `which`; with values in both matrices, so that each has a gradient at once."""
    torch.manual_seed(0)
    model = llama(num_hidden_layers=layers).double()
    targets = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": which}
    with old_names():
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **targets)).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model if reentrant is None else checkpointed(model, reentrant)


def trains(rank, world_size, folder, strategies):
    want, start = plain(adapted(), "llama", world_size), dict(adapted().named_parameters())
    trained = {n for n, p in start.items() if p.requires_grad}
    assert len(trained) == 3 * 2 * 2 and all("lora" in n for n in trained)
    for name in strategies:
        for reentrant in (None, False, True) if name == "zero3" else (None,):
            model = adapted(reentrant=reentrant)
            strategy = ZeRO3(recompute="blocks") if name == "recompute" else name
            got = fit(Tuned(model), strategy, "llama", rank, world_size, folder)
            check_equal(got, want, f"{name} {reentrant=}", tolerance_of("llama"))
            for n, weight in got.weights.items():
                assert torch.equal(weight, start[n]) == (n not in trained), f"{name} {reentrant=} {n}"


def test_adapters_train_as_in_one_process(tmp_path):
    strategies = ["zero3", "zero2"]
    run_ranks(trains, 2, init=False, timeout_s=240, folder=str(tmp_path), strategies=strategies)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_adapters_train_as_in_one_process_everywhere(world_size, tmp_path):
    strategies = ["ddp", "zero1", "zero2", "zero3", "recompute"]
    run_ranks(trains, world_size, init=False, timeout_s=400, folder=str(tmp_path), strategies=strategies)


def counts(rank, world_size):
    gather, log, most = Unit.finish_gather, [], [0]

    def counted(unit):
        gather(unit)
        log.append(unit.name.rpartition(".")[2])
        most[0] = max(most[0], sum(u.gathered for u in engine.table.units if u.name != "rest"))

    Unit.finish_gather = counted
    found = {}
    for which in (None, [2]):
        for reentrant in (None, False, True):
            engine = Engine(adapted(reentrant, 5, which), PLANS["zero3"], group(world_size))
            with engine.forward():
                loss = engine.model(**batch("llama", 0, rank)).loss
            log.clear()
            most[0] = 0
            before = engine.collectives.calls.copy()
            engine.backward(loss)
            reductions = (engine.collectives.calls - before)["reduce_scatter"]
            found[which and which[0], reentrant] = [n for n in log if n != "rest"], reductions, most[0]
            engine.detach()
    Unit.finish_gather = gather
    return found


def test_backward_gathers_each_unit_once_and_reduces_adapters_only():
    (found, _) = run_ranks(counts, 2, timeout_s=60)
    down = ["4", "3", "2", "1", "0"]
    # Without checkpointing no gradient goes below the lowest adapter.
    assert found == {
        (None, None): (down, 5, 1),
        (None, False): (down, 5, 1),
        (None, True): (down, 5, 1),
        (2, None): (down[:3], 1, 1),
        (2, False): (down, 1, 1),
        (2, True): (down, 1, 1),
    }


class Adapted(Tuned):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


def state_of(trainer):
    """Weights by name, and how many elements of optimizer state this rank has."""
    with trainer.strategy.gathered():
        weights = {n: p.detach().clone() for n, p in trainer.lightning_module.model.named_parameters()}
    held = [v for s in trainer.optimizers[0].state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
    return weights, sum(v.numel() for v in held)


def life_of(rank, world_size, folder, strategy):
    """Train, save, resume where the base differs, merge, save adapters and read them again."""
    here, loader = Path(folder) / strategy, DataLoader(Steps("llama", rank), batch_size=None)
    straight = make_trainer(strategy, world_size, folder, max_epochs=2)
    straight.fit(Adapted(adapted()), loader)
    first = make_trainer(strategy, world_size, folder, max_epochs=1)
    first.fit(Adapted(adapted()), loader)
    first.save_checkpoint(here / "saved")
    other = adapted()
    for parameter in other.parameters():
        parameter.data.fill_(7.0)
    second = make_trainer(strategy, world_size, folder, max_epochs=2)
    second.fit(Adapted(other), loader, ckpt_path=here / "saved")
    (want, _), (got, held) = state_of(straight), state_of(second)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert {n.removeprefix("model.") for n in CheckpointReader(here / "saved").names("model/")} == set(want)

    model, probe = second.lightning_module.model.eval(), batch("llama", 9, 0)
    with second.strategy.gathered(), torch.no_grad():
        logits = model(**probe).logits
        if rank == 0:
            model.save_pretrained(here / "adapters", save_embedding_layers=False)
            with old_names():
                again = peft.PeftModel.from_pretrained(llama().double(), here / "adapters")
            for n, p in again.named_parameters():
                assert torch.equal(p.detach(), want[n]) or "lora" not in n
    second.strategy.engine.detach()
    torch.testing.assert_close(model.merge_and_unload()(**probe).logits, logits, rtol=1e-6, atol=1e-6)
    return held


def lives(rank, world_size, folder, strategies):
    return [life_of(rank, world_size, folder, strategy) for strategy in strategies]


@pytest.mark.case("C026")
def test_a_checkpoint_holds_base_and_adapters_and_adapters_save_and_merge(tmp_path):
    held = run_ranks(lives, 2, init=False, timeout_s=240, folder=str(tmp_path), strategies=["zero3", "zero2"])
    moments = 2 * sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    assert [sum(ranks) for ranks in zip(*held, strict=True)] == [moments, moments]


def readme_example(rank, world_size, folder):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "get_peft_model" in b]
    names = {"pl": pl, "torch": torch, "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    names |= {"get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig}
    exec(block, names)
    with old_names():
        module = names["Chat"](folder)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = make_trainer("zero3", world_size, folder, precision="32-true", max_steps=2)
    loader = DataLoader(Steps("llama", rank), batch_size=None)
    trainer.fit(module, loader, loader)
    with trainer.strategy.gathered():
        moved = {n for n, p in module.named_parameters() if not torch.equal(p, start[n])}
        if rank == 0:
            module.model.save_pretrained(Path(folder) / "adapters", save_embedding_layers=False)
    assert moved and all("lora" in n for n in moved)


def test_the_example_of_the_readme(tmp_path):
    with old_names():
        llama().save_pretrained(tmp_path)
    run_ranks(readme_example, 2, init=False, timeout_s=120, folder=str(tmp_path))
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
