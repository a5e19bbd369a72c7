"""The config has no faults, batches are what the model takes, and training makes it better than guessing."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import load_config

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture
def config():
    return load_config(PROJECT / "config.yaml")


def test_a_batch_is_what_the_model_takes(config):
    data, module = config.data.build(), config.module.build()
    data.setup("fit")
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (config.data.argument("batch_size"), module.features)
    assert module.model(x).shape == (len(y), module.classes)
    assert len(data.train) + len(data.validation) == len(data.rows)
    assert sorted(set(y.tolist())) == list(range(module.classes))


def test_the_model_sees_standardised_columns(config):
    data = config.data.build()
    data.setup("fit")
    mean, std = data.train_mean_and_std()
    x = (data.train.tensors[0] - mean) / std
    torch.testing.assert_close(x.mean(0), torch.zeros(x.shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(x.shape[1]), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")  # of Lightning, on such short runs
def test_training_beats_the_commonest_class(config, tmp_path):
    torch.manual_seed(0)
    data, module = config.data.build(), config.module.build()
    module.optimizer_config = config.optimizer
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=5, default_root_dir=tmp_path, **quiet)
    trainer.fit(module, data)
    commonest = Counter(data.validation.tensors[1].tolist()).most_common(1)[0][1] / len(data.validation)
    assert trainer.callback_metrics["val/accuracy"] > commonest + 0.2


def test_a_value_that_is_no_number_is_named_with_its_line(config, tmp_path):
    (tmp_path / "own.csv").write_text("height,kind\n1.5,a\ntall,b\n")
    data = type(config.data.build())(path=str(tmp_path / "own.csv"), target="kind")
    with pytest.raises(MisconfigurationException, match=r"own\.csv:3: .*'tall'"):
        data.setup("fit")
