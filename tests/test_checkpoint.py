"""A run that stops and resumes is the run that never stopped, to the last bit; exports are the bare module's weights."""

import json
import math
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import run_ranks
from loops import IN_MEMORY
from omegaconf import OmegaConf
from safetensors.torch import load_file
from shardlight.strategies import STRATEGIES
from shardlight.strategies.checkpoint import export_safetensors
from shardlight.strategies.checkpoint.codec import decode, encode
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import CheckpointError
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(7, generator=g), torch.randn(3, generator=g)


class Module(pl.LightningModule):
    """Dropout, BatchNorm, a tied weight, a frozen one, an empty one, and a scheduler: all that has state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.save_hyperparameters({"width": 7, "shape": (1, 2), "conf": OmegaConf.create({"a": [1, 2]})})
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.5)) for _ in range(2)]
        )
        self.tied, self.frozen, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.tied.weight = self.blocks[0][0].weight
        self.frozen.requires_grad_(False)
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        loss = nn.functional.mse_loss(self.head(self.tied(self.frozen(x))) * self.scalar, batch[1]) + self.empty.sum()
        self.seen.append(loss.item())
        return loss

    def test_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        groups = [{"params": list(self.blocks.parameters()), "weight_decay": 0.1}]
        groups.append({"params": [*self.head.parameters(), self.tied.bias, self.scalar, self.empty], "lr": 0.02})
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class StopAfter(pl.Callback):
    """Saves after a step; `calls` is plain callback state that has to come back."""

    def __init__(self, step, path):
        self.step, self.path, self.calls = step, path, 0

    def on_train_batch_end(self, trainer, *args):
        self.calls += 1
        if trainer.global_step == self.step and self.path:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def run(strategy, world, folder, stop=None, path=None, resume=None, epochs=2):
    module, callback = Module(), StopAfter(stop, path)
    torch.manual_seed(11)
    trainer = make_trainer(
        strategy, world, folder, precision="32-true", max_epochs=epochs, use_distributed_sampler=True,
        callbacks=[callback], accumulate_grad_batches=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(), batch_size=3, shuffle=True), ckpt_path=resume)
    with trainer.strategy.gathered():
        weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
    optimizer = trainer.optimizers[0]
    moments = [s[k].clone() for s in optimizer.state.values() for k in ("step", "exp_avg", "exp_avg_sq")]
    rates = [g["lr"] for g in optimizer.param_groups]
    return module.seen, weights, moments, rates, callback.calls, trainer.global_step


def resume_equals(rank, world_size, folder):
    per_epoch = 24 // 3 // world_size
    for strategy in [s for s in IN_MEMORY if s != "single" or world_size == 1]:
        whole = run(strategy, world_size, folder)
        assert whole[5] == 2 * per_epoch
        for stop in (per_epoch - 1, per_epoch, per_epoch + 2):
            path = f"{folder}/{strategy}-{stop}"
            first = run(strategy, world_size, folder, stop=stop, path=path)
            assert first[0] == whole[0][:stop]
            second = run(strategy, world_size, folder, resume=path)
            where = f"{strategy} stopped after step {stop}"
            assert second[0] == whole[0][stop:], f"{where}: losses {second[0]} instead of {whole[0][stop:]}"
            assert second[3:] == whole[3:], f"{where}: learning rates, callback state or steps differ"
            for name, value in whole[1].items():
                assert torch.equal(second[1][name], value), f"{where}: {name} differs"
            for a, b in zip(second[2], whole[2], strict=True):
                assert torch.equal(a, b), f"{where}: optimizer state differs"
            if rank == 0:
                out = f"{folder}/{strategy}-{stop}.safetensors"
                assert export_safetensors(path, out) == len(first[1])
                exported = load_file(out)
                assert exported.keys() == Module().state_dict().keys()
                for name, value in first[1].items():
                    assert torch.equal(exported[name], value) and exported[name].dtype == value.dtype, name


@pytest.mark.conformance("D1")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_resume_is_bit_equal_to_the_run_that_never_stopped(world_size, tmp_path):
    run_ranks(resume_equals, world_size, init=False, folder=str(tmp_path), timeout_s=120)


def cross(rank, world_size, folder, strategy, resume):
    run_of = run(
        strategy, world_size, folder, stop=None if resume else 3, path=None if resume else f"{folder}/c", resume=resume
    )
    return run_of[5], [v.double().sum().item() for v in run_of[1].values()]


def test_pieces_are_stored_by_name_and_range_so_that_any_strategy_reads_them(tmp_path):
    run_ranks(cross, 2, init=False, folder=str(tmp_path), strategy="zero3", resume=None)
    reader = CheckpointReader(tmp_path / "c")
    for name, parameter in Module().named_parameters():
        assert reader.read(f"model/{name}").shape == parameter.shape
        if parameter.requires_grad and parameter.numel() and parameter.dim():
            assert reader.read(f"optimizer/0/{name}/exp_avg").shape == parameter.shape
    assert {"exp_avg", "exp_avg_sq", "step"} <= reader.content["optimizers"][0]["states"]["scalar"]["scalars"].keys()
    resumed = {
        s: run_ranks(cross, 2, init=False, folder=str(tmp_path), strategy=s, resume=str(tmp_path / "c"))
        for s in ("zero3", "ddp", "zero1")
    }
    assert resumed["zero3"][0][0] == 8 and resumed["ddp"] == resumed["zero1"] == resumed["zero3"]


def order(rank, world_size, folder):
    class Seen(Module):
        def training_step(self, batch, batch_idx):
            self.rows = [*getattr(self, "rows", []), *batch[0][:, 0].tolist()]
            return super().training_step(batch, batch_idx)

    for strategy in IN_MEMORY:
        module = Seen()
        trainer = make_trainer(strategy, 1, folder, precision="32-true", use_distributed_sampler=True)
        trainer.fit(module, DataLoader(Rows(), batch_size=3))
        assert module.rows == [Rows()[i][0][0].item() for i in range(24)], strategy


def test_one_process_sees_its_data_in_the_order_of_its_loader(tmp_path):
    run_ranks(order, 1, init=False, folder=str(tmp_path))


def on_fewer_ranks(rank, world_size, folder):
    with pytest.warns(
        UserWarning, match="was saved by 2 ranks and goes on with 1: weights and optimizer state are the same"
    ):
        assert run("zero2", world_size, folder, resume=f"{folder}/two", epochs=1)[5] > 3


def test_going_on_with_other_ranks_says_what_is_not_the_same(tmp_path):
    run_ranks(cross, 2, init=False, folder=str(tmp_path), strategy="zero3", resume=None)
    (tmp_path / "c").rename(tmp_path / "two")
    run_ranks(on_fewer_ranks, 1, init=False, folder=str(tmp_path))


def wrong_uses(rank, world_size, folder):
    path = f"{folder}/good"
    run("zero3", world_size, folder, stop=2, path=path)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in Path(path).iterdir())

    class Unwritable(StopAfter):
        def state_dict(self):
            return {"calls": object()}

    module = Module()
    trainer = make_trainer("zero3", world_size, folder, precision="32-true", callbacks=[Unwritable(2, path)])
    with pytest.raises(CheckpointError, match=r"the checkpoint was not written.*callbacks.*is a builtins.object"):
        trainer.fit(module, DataLoader(Rows(), batch_size=3))
    assert sorted((p.name, p.stat().st_mtime_ns) for p in Path(path).iterdir()) == before

    class Wider(Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(7, 4)
            self.extra = nn.Linear(1, 1)

    trainer = make_trainer("zero3", world_size, folder, precision="32-true")
    with pytest.raises(CheckpointError, match=r"missing there: 'extra.weight' \(.*\), 'extra.bias' \("):
        trainer.test(Wider(), DataLoader(Rows()), ckpt_path=path)


def test_a_failed_save_leaves_what_was_there_and_a_misfit_is_named(tmp_path):
    run_ranks(wrong_uses, 2, init=False, folder=str(tmp_path))


def save_on_one_rank(rank, world_size, folder, strategy):
    class Alone(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.is_global_zero:
                trainer.save_checkpoint(f"{folder}/alone")

    trainer = make_trainer(
        STRATEGIES[strategy](timeout_s=5), world_size, folder, precision="32-true", callbacks=[Alone()]
    )
    trainer.fit(Module(), DataLoader(Rows(), batch_size=3))


@pytest.mark.case("C005")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_save_on_one_rank_ends_with_an_error_that_says_so(strategy, tmp_path):
    with pytest.raises(
        AssertionError, match=r"(?s)save_checkpoint alone.*(every rank has to make this call|call it on all ranks)"
    ):
        run_ranks(save_on_one_rank, 2, init=False, folder=str(tmp_path), strategy=strategy, timeout_s=40)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        CheckpointReader(tmp_path / "alone")


PLAIN = {
    "int": 3, "float": 0.1, "inf": math.inf, "text": "a", "none": None, "flag": True, "list": [1, [2.5]],
    "tuple": (1, ("x",)), "keys": {1: "a", (2, 3): "b"}, "set": {1, 2}, "path": Path("a/b"), "dtype": torch.bfloat16,
    "device": torch.device("cpu"), "tensor": torch.arange(3), "nested": {"t": torch.tensor(1.5)}, "tag": {"__kind__": 1},
}  # fmt: skip


def test_plain_state_survives_json():
    tensors = {}
    data = json.loads(json.dumps(encode(PLAIN, "s", tensors), allow_nan=False))
    back = decode(data, tensors)
    assert torch.equal(back.pop("tensor"), torch.arange(3)) and torch.equal(back["nested"].pop("t"), torch.tensor(1.5))
    assert back == {k: v for k, v in PLAIN.items() if k not in ("tensor", "nested")} | {"nested": {}}
    array = decode(encode(np.arange(3), "a", tensors), tensors)
    assert isinstance(array, np.ndarray) and array.tolist() == [0, 1, 2]
    assert encode(np.float32(0.5), "n", {}) == 0.5 and math.isnan(decode(encode(math.nan, "n", {}), {}))


def test_two_tensors_with_one_path_are_two():
    tensors = {}
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "c": np.arange(2), "c'": torch.tensor(3)}
    back = decode(json.loads(json.dumps(encode(value, "s", tensors))), tensors)
    assert (int(back["a.b"]), int(back["a"]["b"]), back["c"].tolist(), int(back["c'"])) == (1, 2, [0, 1], 3)


@pytest.mark.parametrize(
    "data",
    [
        {"__kind__": "tuple", "value": 3}, {"__kind__": "set", "value": [[1]]}, {"__kind__": "dict", "value": [[1]]},
        {"__kind__": "device", "value": "no such"}, {"__kind__": "dtype", "value": ["float32"]},
        {"__kind__": "dtype", "value": "load"}, {"__kind__": "path", "value": 1}, {"__kind__": "tensor", "value": [1]},
        {"__kind__": ["tensor"], "value": "x"}, {"__kind__": "array", "value": "bf16"},
    ],
)  # fmt: skip
def test_what_encode_never_gives_is_refused(data):
    with pytest.raises(CheckpointError, match=r"cannot be read|is not a kind"):
        decode([data], {"bf16": torch.zeros(1, dtype=torch.bfloat16)})


def test_what_is_not_plain_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"^callbacks.x.1 is a builtins.function, which cannot be written"):
        encode({"x": [1, lambda: 0]}, "callbacks", {})
    with pytest.raises(CheckpointError, match="'code' is not a kind of value"):
        decode({"__kind__": "code", "value": "x"}, {})
    with pytest.raises(CheckpointError, match="the tensor 'gone' is missing"):
        decode({"__kind__": "tensor", "value": "gone"}, {})
