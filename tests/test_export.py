"""Exports hold the bare module's weights: of a checkpoint and, byte for byte the same, of a run while it trains."""

import errno
import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from shardlight import cli
from shardlight.framework.exports import WeightExports
from shardlight.strategies import ZeRO3
from shardlight.strategies.checkpoint import export as exporting
from shardlight.strategies.checkpoint import layouts, live_export
from shardlight.strategies.checkpoint.exact import compare_exactly
from shardlight.strategies.checkpoint.export import HF_SHARD_BYTES, export
from shardlight.strategies.checkpoint.hf import adapter_names, describe_models, model_names
from shardlight.strategies.checkpoint.layouts import OutTensor, hf_folders, make_folder
from shardlight.strategies.checkpoint.live_export import export_running
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.unit import Unit
from shardlight.strategies.errors import CheckpointError
from test_cases_training import batches, strategies
from test_checkpoint_format import write_checkpoint
from test_lightning_fit import make_trainer
from torch import nn
from typer.testing import CliRunner

WIDTH = 64
"""So that each of three ranks has a part of every block: shards are of whole chunks of 1024 elements."""
LIMIT_BYTES = 6000


class LoRA(nn.Module):
    """A frozen layer of 7.0 with a trainable product of two small matrices beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.base.weight, 7.0)
        self.base.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


class Everything(pl.LightningModule):
    """Frozen, tied, 16-bit, complex and integer parameters, in two groups; buffers of every kind; an empty tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)])
        self.lora, self.head = LoRA(), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.blocks[0][0].weight
        self.thin = nn.Linear(WIDTH, 3).bfloat16()
        self.wave = nn.Parameter(torch.tensor([1 + 1j]))
        self.codes = nn.Parameter(torch.tensor([3, -7], dtype=torch.int8), requires_grad=False)
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seven", torch.tensor([7]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def training_step(self, batch, batch_idx):
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        for block in self.blocks:
            x = x + block(x)
        x = self.head(self.lora(x / WIDTH)) * self.scalar
        return x.square().mean() + self.thin(x.bfloat16()).float().square().mean() + self.wave.abs().square().sum()

    def configure_optimizers(self):
        named = {n: p for n, p in self.named_parameters() if p.requires_grad}
        decayed = [p for n, p in named.items() if n.endswith("weight")]
        others = [p for n, p in named.items() if not n.endswith("weight")]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], 1e-3)


def same_files(one: Path, other: Path) -> list[str]:
    """The names of the files in two folders, which have to be equal to the last byte."""
    names = sorted(str(p.relative_to(one)) for p in one.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(other)) for p in other.rglob("*") if p.is_file())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    return names


def export_small(trainer, module, path):
    """An export of several files, during which no weight is gathered."""

    def refused(unit):
        raise AssertionError(f"{unit.name} is gathered for an export")

    kept, Unit.start_gather = Unit.start_gather, refused
    try:
        state = trainer.strategy.lightning_module_state_dict()
        assert export_running(trainer.strategy.engine, state, path, max_file_bytes=LIMIT_BYTES) == []
    finally:
        Unit.start_gather = kept


def check_exports(rank, world_size, folder):
    chosen = {name: name for name in strategies(world_size)}
    if world_size == 2:
        chosen["hybrid"] = ZeRO3(shard_group=1)
    for name, strategy in chosen.items():
        home = Path(folder, name)
        module = Everything()
        trainer = make_trainer(
            strategy, world_size, folder, precision="32-true", callbacks=[WeightExports(home, 2)], max_steps=3
        )
        trainer.fit(module, batches(*[torch.ones(1)] * 3))
        trainer.save_checkpoint(home / "step-3")
        export_small(trainer, module, home / "small")
        state = trainer.strategy.lightning_module_state_dict()
        export_running(trainer.strategy.engine, state, home / "exports" / "step-3")
        with trainer.strategy.gathered():
            live = {n: t.detach().clone() for n, t in module.state_dict().items()}
        if rank == 0:
            check_against(live, home, name, module)


def check_against(live, home, strategy, module):
    saved, bare = home / "step-3", Everything()
    wanted = {n: t for n, t in bare.state_dict().items()}
    made = export(saved, home / "all.safetensors")
    exported = load_file(home / "all.safetensors")
    assert made.tensors == len(wanted) == len(exported) and exported.keys() == wanted.keys()
    for name, value in live.items():
        assert torch.equal(exported[name], value), (strategy, name)
        assert (exported[name].dtype, exported[name].shape) == (wanted[name].dtype, wanted[name].shape)
    bare.load_state_dict(exported, strict=True)
    assert exported["blocks.0.1.num_batches_tracked"] == 3 and exported["seven"].tolist() == [7]
    assert exported["lora.base.weight"].eq(7.0).all() and exported["lora.B"].any()
    export(saved, home / "part.safetensors", trainable=True)
    trainable = {n for n, p in bare.named_parameters(remove_duplicate=False) if p.requires_grad}
    assert load_file(home / "part.safetensors").keys() == trainable and "lora.base.weight" not in trainable
    export(saved, home / "whole", dtype="bf16", max_file_bytes=HF_SHARD_BYTES)
    assert same_files(home / "whole", home / "exports" / "step-3") == ["model.safetensors"]
    export(saved, home / "pieces", dtype="bf16", max_file_bytes=LIMIT_BYTES)
    names = same_files(home / "pieces", home / "small")
    check_index(home / "pieces", names, live)
    assert sorted(p.name for p in (home / "exports").iterdir()) == ["step-2", "step-3"]
    assert sorted(p.name for p in home.iterdir() if p.name.startswith(".")) == []
    other = home.parent / "zero1" / "step-3"
    if other.exists():
        differences = compare_exactly(CheckpointReader(other), CheckpointReader(saved))
        assert not differences, (strategy, list(map(str, differences)))


def check_index(folder, names, live):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert names == [*files, "model.safetensors.index.json"] and len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    joined = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found = {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
        assert len(found) == 1 or sum(t.nbytes for t in found.values()) <= LIMIT_BYTES
        assert {index["weight_map"][n] for n in found} == {file}
        joined |= found
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in joined.values())
    for name, value in live.items():
        kept = not value.is_floating_point()
        assert torch.equal(joined[name], value if kept else value.bfloat16()), name


@pytest.mark.case("C020")
@pytest.mark.case("C026")
@pytest.mark.case("C061")
@pytest.mark.case("C064")
@pytest.mark.case("C088")
@pytest.mark.case("C089")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_export_during_a_run_is_that_of_its_checkpoint(world_size, tmp_path):
    run_ranks(check_exports, world_size, init=False, folder=str(tmp_path), timeout_s=180)


def check_failure(rank, world_size, folder):
    module = Everything()
    trainer = make_trainer("zero3", world_size, folder, precision="32-true", max_steps=1)
    trainer.fit(module, batches(torch.ones(1)))
    state, path = trainer.strategy.lightning_module_state_dict(), Path(folder, "out")
    for failing in ("pwrite", "fsync"):
        for at in range(world_size):
            kept = getattr(live_export.os, failing)

            def full(*args):
                raise OSError(errno.ENOSPC, "No space left on device")

            if rank == at:
                setattr(live_export.os, failing, full)
            try:
                with pytest.raises(
                    CheckpointError, match=rf"was not exported|were not exported. rank {at}: .*No space"
                ):
                    export_running(trainer.strategy.engine, state, path)
            finally:
                setattr(live_export.os, failing, kept)
            trainer.strategy.barrier()
            assert [p.name for p in Path(folder).iterdir() if "out" in p.name] == [], (failing, at)
    export_running(trainer.strategy.engine, state, path)
    trainer.strategy.barrier()
    before = (path / "model.safetensors").read_bytes()
    with torch.no_grad(), trainer.strategy.gathered():
        module.scalar.fill_(1e6)
    with pytest.raises(CheckpointError, match="'scalar': 1 of its numbers are too large for float16"):
        export_running(trainer.strategy.engine, trainer.strategy.lightning_module_state_dict(), path, dtype="fp16")
    assert (path / "model.safetensors").read_bytes() == before


def test_one_ranks_failure_is_everyones_and_leaves_nothing_half_written(tmp_path):
    run_ranks(check_failure, 2, init=False, folder=str(tmp_path), timeout_s=120)


class Slope(pl.LightningModule):
    """A weight of 1 that goes down by 1e-3 in each step, which is less than a step of bf16."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))
        self.register_buffer("count", torch.tensor([300]))

    def training_step(self, batch, batch_idx):
        return self.w.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def check_masters(rank, world_size, folder):
    for strategy in ("zero1", "zero3"):
        home, module = Path(folder, strategy), Slope()
        trainer = make_trainer(strategy, world_size, folder, precision="bf16-true", max_steps=100, max_epochs=-1)
        trainer.fit(module, batches(*[torch.ones(1)] * 100))
        trainer.save_checkpoint(home / "a")
        state = trainer.strategy.lightning_module_state_dict()
        export_running(trainer.strategy.engine, state, home / "live", dtype="fp32")
        trainer.save_checkpoint(home / "b")
        if rank:
            continue
        found = {}
        for dtype in ("fp32", "bf16", None):
            export(home / "a", home / f"{dtype}.safetensors", dtype=dtype)
            found[dtype] = load_file(home / f"{dtype}.safetensors")
            assert found[dtype]["count"].dtype == torch.int64 and found[dtype]["count"] == 300
        for kept in (found["fp32"], found[None], load_file(home / "live" / "model.safetensors")):
            torch.testing.assert_close(kept["w"], torch.full((8,), 0.9), rtol=0, atol=1e-5)
        assert torch.equal(found["bf16"]["w"], torch.full((8,), 0.8984375, dtype=torch.bfloat16))
        assert compare_exactly(CheckpointReader(home / "a"), CheckpointReader(home / "b")) == []


@pytest.mark.case("C065")
def test_an_fp32_export_of_a_16_bit_run_is_that_of_its_masters(tmp_path):
    run_ranks(check_masters, 2, init=False, folder=str(tmp_path), timeout_s=120)


# --- without ranks


def stored(name, tensor):
    return name, tensor, None, 0


@pytest.fixture
def saved(tmp_path):
    content = {"aliases": {"head": "embed"}, "trainable": ["embed"], "step": 2}
    tensors = [stored("model/embed", torch.arange(40.0).view(8, 5)), stored("model/n", torch.tensor([1, 2]))]
    tensors.append(stored("ema/embed", torch.arange(40.0, dtype=torch.float64).view(8, 5) / 2))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return write_checkpoint(tmp_path / "run" / "checkpoints" / "step-2", [tensors], content)


def test_only_a_part_of_one_tensor_is_in_memory(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 16)
    read, sizes = CheckpointReader.read, []

    def recorded(reader, name, start=0, stop=None):
        found = read(reader, name, start, stop)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(CheckpointReader, "read", recorded)
    export(saved, tmp_path / "out", dtype="bf16")
    assert max(sizes) == 8 and sum(sizes) == 82
    assert torch.equal(load_file(tmp_path / "out")["head"], torch.arange(40.0).view(8, 5).bfloat16())


def test_averages_are_exported_in_the_dtype_of_weights_or_the_one_asked_for(saved, tmp_path):
    for dtype, wanted in ((None, torch.float32), ("fp16", torch.float16)):
        export(saved, tmp_path / "out", ema=True, dtype=dtype)
        found = load_file(tmp_path / "out")
        assert found["embed"].dtype == found["head"].dtype == wanted and found["n"].tolist() == [1, 2]
        assert torch.equal(found["head"], (torch.arange(40.0).view(8, 5) / 2).to(wanted))


def test_a_file_of_lightning_is_exported_too(tmp_path):
    weights = {"a": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}
    weights["b"] = weights["a"]
    torch.save({"state_dict": weights, "global_step": 1}, tmp_path / "old.ckpt")
    export(tmp_path / "old.ckpt", tmp_path / "out", dtype="bf16")
    found = load_file(tmp_path / "out")
    assert torch.equal(found["b"], weights["a"].bfloat16()) and found["n"] == 3 and found.keys() == weights.keys()
    with pytest.raises(CheckpointError, match="old.ckpt has no trainable parameter"):
        export(tmp_path / "old.ckpt", tmp_path / "out", trainable=True)


def test_a_failed_export_leaves_nothing_and_what_was_there(saved, tmp_path, monkeypatch):
    write, out = exporting.write_all, tmp_path / "out"
    out.write_text("mine")
    calls = []

    def short(file, data):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr(exporting, "write_all", short)
    with pytest.raises(CheckpointError, match=r"out cannot be written: .*No space left"):
        export(saved, out)
    assert out.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
    calls.clear()
    with pytest.raises(CheckpointError, match="No space left"):
        export(saved, tmp_path / "folder", max_file_bytes=100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def here(*arguments):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def test_the_command_names_what_it_wrote(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert here("export", saved) == (0, "step-2.safetensors: 3 tensors, 592 B\n", "")
    assert here("export", saved, "--max-shard-size", "170B", "--dtype", "bf16")[1].startswith(
        "step-2-safetensors: 3 ten"
    )
    assert len(list(Path("step-2-safetensors").glob("*.safetensors"))) == 2
    assert here("export", saved, "--only", "trainable", "--out", "t")[0] == 0
    assert load_file("t").keys() == {"embed", "head"}
    assert here("export", saved, "--out", "new/t")[0] == 0 and len(load_file("new/t")) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "fault"),
    [
        (["{saved}", "--to", "gguf"], 2, "--to is 'gguf'; the formats are safetensors and hf."),
        (["{saved}", "--dtype", "int8"], 2, "--dtype is 'int8'; choose from fp32, bf16, fp16"),
        (["{saved}", "--only", "frozen"], 2, "--only is 'frozen'; the only choice is trainable."),
        (["{saved}", "--max-shard-size", "5"], 2, "--max-shard-size is '5'; write a size such as 5GB or 500MB."),
        (["{saved}", "--to", "hf"], 1, "without a transformers model, which --to hf needs: use --to safetensors."),
        (["{saved}", "--out", "run"], 1, "run is a folder: give a name for the file to write, such as run/model.safe"),
        (["{saved}", "--out", "run", "--max-shard-size", "1GB"], 1, "run is there already, and not an empty folder"),
        (["run"], 1, "run is a folder of checkpoints: pass one of them, such as run/checkpoints/step-2."),
        (["{saved}/rank-00000.safetensors"], 1, "is a file, and checkpoints here are folders: pass "),
        (["nowhere"], 1, "nowhere: there is no such folder."),
        (
            ["{saved}", "--out", "a/b/c"],
            1,
            "a/b/c cannot be written: neither a/b is there nor the folder it would be in.",
        ),
        (["{saved}", "--out", "a/b/c", "--max-shard-size", "1GB"], 1, "a/b/c cannot be written: neither a/b is there"),
    ],
)
def test_mistakes_are_said_without_a_traceback(saved, tmp_path, monkeypatch, arguments, code, fault):
    monkeypatch.chdir(tmp_path)
    found = here("export", *(a.format(saved=saved) for a in arguments))
    assert found[0] == code and fault in found[2] and "Traceback" not in found[2], found
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


# --- transformers' and peft's layouts, without them; with them: test_export_hf.py


class Config:
    name_or_path = "base/model"

    def to_dict(self):
        return {"hidden": 4, "limit": float("inf"), "labels": {0: "a"}, "kinds": {"b", "a"}}


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.inner = Config(), nn.Linear(2, 2)
        self.all_tied_weights_keys = {"head.weight": "inner.weight"}

    def save_pretrained(self, folder):
        raise NotImplementedError


def test_models_are_known_by_what_they_can_do_and_the_outermost_counts():
    module = nn.Module()
    module.teacher, module.inner = Pretrained(), nn.Sequential(Pretrained())
    module.teacher.child = Pretrained()
    first, second = describe_models(module)
    assert (first["prefix"], second["prefix"]) == ("teacher.", "inner.0.")
    assert first["config"] == {
        "hidden": 4, "limit": float("inf"), "labels": {"0": "a"}, "kinds": ["a", "b"], "architectures": ["Pretrained"]
    }  # fmt: skip
    assert first["tied"] == ["head.weight"] and first["adapters"] is None and first["generation_config"] is None
    assert describe_models(nn.Linear(1, 1)) is None and describe_models(Pretrained())[0]["prefix"] == ""


def test_a_weight_that_a_model_ties_by_itself_is_written_once():
    names = ["m.head.weight", "m.inner.weight", "m.other"]
    first = {"m.head.weight": "x", "m.inner.weight": "x", "m.other": "x"}
    assert model_names(names, "m.", first, ["head.weight"]) == {"m.inner.weight": "inner.weight", "m.other": "other"}
    assert model_names(names[:1], "m.", first, ["head.weight"]) == {"m.head.weight": "head.weight"}


def test_adapters_have_peft_names_and_unusual_ones_are_refused():
    names = [
        "m.base_model.model.q.base.weight",
        "m.base_model.model.q.lora_A.default.weight",
        "m.q.lora_B.other.weight",
    ]
    names += ["m.base_model.model.e.lora_embedding_A.default", "m.base_model.model.s.modules_to_save.default.bias"]
    found = adapter_names(names, "m.", "default", {"peft_type": "LORA", "bias": "none"})
    assert list(found.values()) == [
        "base_model.model.q.lora_A.weight", "base_model.model.e.lora_embedding_A", "base_model.model.s.bias"
    ]  # fmt: skip
    assert adapter_names(names, "m.", "other", {"peft_type": "LORA"}) == {names[2]: "base_model.model.q.lora_B.weight"}
    for config in ({"peft_type": "IA3"}, {"peft_type": "LORA", "bias": "all"}, {"peft_type": "LORA", "use_dora": True}):
        with pytest.raises(CheckpointError, match="only plain LoRA can be written in peft's format: export with"):
            adapter_names(names, "m.", "default", config)


def test_several_models_get_folders_and_what_belongs_to_none_is_named():
    tensors = [OutTensor(n, n, (2,), torch.float32) for n in ("a.w", "b.c.w", "head")]
    models = [{"prefix": p, "config": {"x": 1}} for p in ("a.", "b.c.")]
    folders, left_out = hf_folders(tensors, models, None)
    assert [(f.name, f.files[0].tensors[0].name) for f in folders] == [("a", "w"), ("b.c", "w")]
    assert left_out == ["head"] and json.loads(folders[0].texts["config.json"]) == {"x": 1, "dtype": "float32"}
    for name in ("..", "a/b", "", ".hidden"):
        with pytest.raises(CheckpointError, match="is not a name that a folder can have"):
            hf_folders(tensors, [{"prefix": f"{name}.", "config": {}}, models[0]], None)


def test_files_are_cut_in_the_models_order_and_a_large_tensor_is_alone():
    tensors = [OutTensor(str(i), str(i), (n,), torch.uint8) for i, n in enumerate((3, 4, 9, 1, 1))]
    folder = make_folder(tensors, 7)
    assert [[t.name for t in f.tensors] for f in folder.files] == [["0", "1"], ["2"], ["3", "4"]]
    with pytest.raises(CheckpointError, match="'z' is torch.complex128, which the safetensors format does not have"):
        assert make_folder([OutTensor("z", "z", (1,), torch.complex128)], None).files[0].header
