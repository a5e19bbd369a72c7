"""The config has no faults, text is split as it should be, the model sees no future, and training helps."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import load_config

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture
def config():
    small = ["module.width=32", "module.depth=2", "module.heads=2", "data.sequence_length=32", "data.batch_size=8"]
    return load_config(PROJECT / "config.yaml", small)


@pytest.fixture
def text(config, tmp_path, monkeypatch):
    """Makes the data module of some files."""
    monkeypatch.setenv("SHARDLIGHT_CACHE", str(tmp_path / "cache"))

    def make(files):
        for name, content in files.items():
            (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "text" / name).write_bytes(content)
        data = config.data.target(**{**config.data.arguments, "folder": str(tmp_path / "text"), "pattern": "*.txt"})
        data.prepare_data()
        data.setup("fit")
        return data, {name: bytes(np.load(path)) for name, path in data.paths.items()}

    return make


def test_no_file_is_in_both_parts(text):
    files = {f"{i % 7}/{i}.txt": f"file {i:03d} ".encode() * 50 for i in range(200)}
    _, parts = text({**files, "other.md": b"not this one"})
    for content in files.values():
        start = content[:9]
        assert (start in parts["train"]) != (start in parts["validation"])
    assert b"not this" not in parts["train"] + parts["validation"]


def test_of_one_file_the_end_is_for_validation(text):
    content = bytes(range(97, 123)) * 200
    _, parts = text({"one.txt": content})
    cut = len(content) - round(len(content) * 0.05)
    assert parts == {"train": content[:cut] + b"\n", "validation": content[cut:] + b"\n"}


def test_changed_text_is_read_anew(text):
    first, _ = text({"one.txt": b"abcd" * 300})
    second, parts = text({"one.txt": b"efgh" * 300})
    assert first.paths != second.paths and b"abcd" not in parts["train"]


def test_the_unigram_model_of_four_equal_bytes_needs_two_bits(text):
    data, _ = text({"one.txt": b"abcd" * 5000})
    assert data.unigram_bpb == pytest.approx(2, abs=0.02)  # and a line break


def test_a_folder_without_text_is_named(text):
    with pytest.raises(MisconfigurationException, match=r"has no file \*\.txt"):
        text({"one.md": b"text"})


def test_logits_do_not_depend_on_later_bytes(config):
    module = config.module.build()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    logits, changed_logits = module.model(tokens), module.model(changed)
    torch.testing.assert_close(logits[:, :9], changed_logits[:, :9])
    assert not torch.allclose(logits[:, 9:], changed_logits[:, 9:])


def test_a_sample_goes_on_as_the_model_expects(config):
    sample = importlib.import_module(config.module.class_path.partition(".")[0] + ".sample").sample
    model = config.module.build().model
    tokens = sample(model, torch.tensor([[100, 101, 102]]), 5, temperature=0)
    assert tokens.shape == (1, 8) and tokens[0, :3].tolist() == [100, 101, 102]
    assert torch.equal(model(tokens)[:, 2:-1].argmax(-1), tokens[:, 3:])


@pytest.mark.filterwarnings("ignore")  # of Lightning, on such short runs
def test_training_beats_the_model_without_context(config, text, tmp_path):
    torch.manual_seed(0)
    data, _ = text({"one.txt": b"the quick brown fox jumps over the lazy dog. " * 400})
    module = config.module.build()
    module.optimizer_config = config.optimizer
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(module, data)
    assert trainer.callback_metrics["val/bpb"] < data.unigram_bpb / 2
