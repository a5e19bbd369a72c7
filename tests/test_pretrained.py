"""Full weights loaded into sharded, deferred and plain modules: the file's values, each rank only its part, faults whole."""

import json
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from loops import group, plans
from models import TinyGPT
from safetensors.torch import save_file
from shardlight.strategies import deferred_init, load_weights, materialise
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import CheckpointError
from test_deferred import Plain, peak_bytes, state
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader


def pretrained():
    """TINY-GPT's weights, with a value of its own at every element; the tied head under one name only."""
    torch.manual_seed(21)
    tensors = {n: torch.randn(t.shape) for n, t in TinyGPT().state_dict().items() if n != "head.weight"}
    return tensors


def write_files(folder):
    tensors = pretrained()
    save_file(tensors, folder / "whole.safetensors")
    save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, folder / "half.safetensors")
    save_file({f"transformer.{n}": t for n, t in tensors.items()}, folder / "named.safetensors")
    save_file({**tensors, "head.weight": tensors["tokens.weight"].clone()}, folder / "both.safetensors")
    save_file({**tensors, "head.weight": tensors["tokens.weight"] + 1}, folder / "untied.safetensors")
    wrong = {n: t for n, t in tensors.items() if n != "blocks.1.up.bias"}
    wrong |= {"norm.weight": torch.ones(13), "blocks.7.up.bias": torch.ones(48, 2)}
    save_file(wrong, folder / "wrong.safetensors")
    parts = folder / "parts"
    parts.mkdir()
    names, places = sorted(tensors), {}
    for number, some in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in some}, parts / f"model-{number}.safetensors")
        places |= dict.fromkeys(some, f"model-{number}.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": places})
    (parts / "model.safetensors.index.json").write_text(index)


SOURCES = {
    "whole.safetensors": {},
    "both.safetensors": {},
    "parts": {},
    "named.safetensors": {"rename": {"transformer.": "", "transformer.nothing.": "x"}},
    "half.safetensors": {},
    "dict": {"rename": lambda n: None if n == "extra" else n},
}


def check_values(model, name, where):
    for n, tensor in pretrained().items():
        want = tensor.to(torch.bfloat16).float() if name == "half.safetensors" else tensor
        assert torch.equal(model.state_dict()[n], want), f"{where} {n}"
    assert model.head.weight is model.tokens.weight


def loads(rank, world_size, folder):
    for plan in plans(world_size):
        for name, options in SOURCES.items():
            source = {**pretrained(), "extra": torch.ones(1)} if name == "dict" else f"{folder}/{name}"
            for when in ("after", "deferred", "before"):
                if plan != "zero3" and (when == "deferred" or name not in ("whole.safetensors", "parts")):
                    continue
                if when == "deferred":
                    with deferred_init():
                        model = TinyGPT()
                else:
                    model = TinyGPT()
                if when == "after":
                    engine = Engine(model, PLANS[plan], group(world_size))
                report = load_weights(model, source, **options)
                if when != "after":
                    engine = Engine(model, PLANS[plan], group(world_size))
                assert set(report.loaded) == set(model.state_dict(keep_vars=True)) and not report.missing
                with engine.gathered():
                    check_values(model, name, f"{plan} {name} {when}")


@pytest.mark.case("C068")
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_values_equal_the_file_before_and_after_sharding(world_size, tmp_path):
    write_files(tmp_path)
    run_ranks(loads, world_size, folder=str(tmp_path))


def misfits(rank, world_size, folder):
    for sharded in (False, True):
        model = TinyGPT()
        engine = Engine(model, PLANS["zero3"], group(world_size)) if sharded else None
        before = values(model, engine)
        with pytest.raises(CheckpointError) as caught:
            load_weights(model, f"{folder}/wrong.safetensors")
        text = str(caught.value)
        assert "wrong.safetensors: missing there: 'blocks.1.up.bias' (48,); " in text
        assert (
            "not in the model: 'blocks.7.up.bias' (48, 2); 'norm.weight' is (13,) there and (12,) in the model" in text
        )
        with pytest.raises(CheckpointError, match=r"'tokens.weight' and 'head.weight' are one tied weight .* differ"):
            load_weights(model, f"{folder}/untied.safetensors", strict=False)
        with pytest.raises(CheckpointError, match="are both called 'tokens.weight' after renaming"):
            load_weights(model, f"{folder}/both.safetensors", rename={"head.": "tokens."})
        numbers = {**pretrained(), "norm.weight": torch.ones(12, dtype=torch.int64)}
        with pytest.raises(CheckpointError, match="'norm.weight' there and here holds integers"):
            load_weights(model, numbers)
        for name, message in (("nothing", "no such file"), ("text.safetensors", "cannot be read"), ("a.pt", "pickle")):
            with pytest.raises(CheckpointError, match=message):
                load_weights(model, f"{folder}/{name}")
        with pytest.raises(CheckpointError, match=r"files that are not there: .*model-1.safetensors"):
            load_weights(model, f"{folder}/broken")
        for n, tensor in values(model, engine).items():
            assert torch.equal(tensor, before[n]), n
        report = load_weights(model, f"{folder}/wrong.safetensors", strict=False)
        assert report.missing == {"blocks.1.up.bias": (48,)} and report.unexpected == {"blocks.7.up.bias": (48, 2)}
        assert report.mismatched == {"norm.weight": ((13,), (12,))}
        want = pretrained() | {n: before[n] for n in ("blocks.1.up.bias", "norm.weight")}
        for n, tensor in values(model, engine).items():
            assert torch.equal(tensor, want["tokens.weight" if n == "head.weight" else n]), n


def values(model, engine):
    if engine is None:
        return {n: t.clone() for n, t in model.state_dict().items()}
    with engine.gathered():
        return {n: t.clone() for n, t in model.state_dict().items()}


@pytest.mark.case("C068")
def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_changed(tmp_path):
    write_files(tmp_path)
    (tmp_path / "text.safetensors").write_text("not a safetensors file")
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "broken").mkdir()
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    (tmp_path / "broken" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "parts" / "model-0.safetensors").rename(tmp_path / "broken" / "model-0.safetensors")
    run_ranks(misfits, 2, folder=str(tmp_path))


def loads_where_gathered(rank, world_size):
    for plan in plans(world_size):
        model = TinyGPT()
        engine = Engine(model, PLANS[plan], group(world_size))
        with engine.gathered(), pytest.raises(CheckpointError, match="inside `with strategy.gathered"):
            load_weights(model, pretrained())


def test_loading_inside_gathered_is_refused():
    run_ranks(loads_where_gathered, 2)


def layers():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])


def never_a_copy(rank, world_size, folder):
    unit, file = 4 * (256 * 256 + 256), Path(folder, "layers.safetensors")
    mapped = file.stat().st_size  # safetensors maps the file, which is no memory of ours
    engine = Engine(layers(), PLANS["zero3"], group(world_size))
    _, most = peak_bytes(lambda: load_weights(engine.model, file))
    assert most - mapped < 1.1 * unit, most / unit
    with deferred_init():
        model = layers()
    _, most = peak_bytes(lambda: load_weights(model, file))
    assert most - mapped < 0.1 * unit, most / unit
    engine, most = peak_bytes(lambda: Engine(model, PLANS["zero3"], group(world_size)))
    assert most < (4 + (2 if rank == 0 else 1)) * unit + 50_000, most / unit
    with engine.gathered():
        assert all(bool((p == i).all()) for i, p in enumerate(model.parameters()))


@pytest.mark.case("C068")
def test_no_rank_reads_more_than_its_part_or_one_tensor_at_a_time(tmp_path):
    tensors = {n: torch.full_like(t, i) for i, (n, t) in enumerate(layers().state_dict().items())}
    save_file(tensors, tmp_path / "layers.safetensors")
    run_ranks(never_a_copy, 2, folder=str(tmp_path))


class Resized(Plain):
    """Loads in configure_model, and then grows the vocabulary from 17 to 19."""

    def __init__(self, source, late_load):
        super().__init__(3, late=True)
        self.source, self.late_load = source, late_load

    def make(self):
        torch.manual_seed(3)
        model = TinyGPT()
        if not self.late_load:
            load_weights(model, self.source)
            wider = nn.Embedding(19, 12)
            wider.weight.data[:17] = model.tokens.weight.data
            model.tokens, model.head = wider, nn.Linear(12, 19, bias=False)
            model.head.weight = wider.weight
        return model

    def on_fit_start(self):
        if self.late_load:
            load_weights(self.model, self.source)
        super().on_fit_start()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def lightning_loads(rank, world_size, folder):
    data = DataLoader([torch.arange(10).unsqueeze(0)], batch_size=None)
    for late_load in (False, True):
        module = Resized(f"{folder}/parts", late_load)
        trainer = make_trainer("zero3", world_size, folder, precision="bf16-mixed" if late_load else "32-true")
        trainer.fit(module, data, data)
        for n, tensor in pretrained().items():
            assert torch.equal(module.start[n][: len(tensor)], tensor), f"late_load={late_load} {n}"
        with trainer.strategy.gathered():
            assert torch.equal(module.model.state_dict()["norm.weight"], pretrained()["norm.weight"])
        assert len(module.start["tokens.weight"]) == (17 if late_load else 19)


@pytest.mark.case("C068")
def test_a_lightning_module_loads_in_configure_model_and_after_sharding_and_grows_its_vocabulary(tmp_path):
    write_files(tmp_path)
    run_ranks(lightning_loads, 2, init=False, folder=str(tmp_path), timeout_s=120)


def test_a_deferred_module_that_is_loaded_needs_its_file_until_it_is_sharded(tmp_path):
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "layer.safetensors")
    with deferred_init():
        layer = nn.Linear(3, 2)
    load_weights(layer, tmp_path / "layer.safetensors")
    layer.double()
    materialise(layer)
    assert layer.weight.dtype == torch.float64 and bool((layer.weight == 1).all())
    assert set(state(layer)) == {"weight", "bias"}
