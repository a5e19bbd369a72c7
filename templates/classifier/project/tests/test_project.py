"""The config has no faults, batches are what the model takes, folders of images are read, and training helps."""

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


def images(config, **changed):
    data = config.data.target(**{**config.data.arguments, **changed})
    data.setup("fit")
    return data


def test_a_batch_is_what_the_model_takes(config):
    data, module = images(config), config.module.build()
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (data.batch_size, data.channels, data.size, data.size)
    assert x.min() >= -1 and x.max() <= 1
    assert module.model(x).shape == (len(y), module.classes)


def test_every_image_is_for_training_or_validation_and_every_class_in_both(config):
    data = images(config)
    train, validation = data.train.indices, data.validation.indices
    assert sorted([*train, *validation]) == list(range(len(data.images)))
    for part in (train, validation):
        assert {data.images.labels[i] for i in part} == set(range(len(data.images.classes)))


def test_folders_of_images_are_read(config, tmp_path):
    from PIL import Image

    for kind, colour in (("dark", 0), ("light", 255)):
        (tmp_path / kind).mkdir()
        for i in range(5):
            Image.new("RGB", (20, 12), (colour, colour, colour)).save(tmp_path / kind / f"{i}.png")
    data = images(config, folder=str(tmp_path), size=16, channels=3)
    assert data.images.classes == ["dark", "light"] and len(data.train) == 8
    x, label = data.images[9]
    assert x.shape == (3, 16, 16) and label == 1
    torch.testing.assert_close(x, torch.ones(3, 16, 16))
    (tmp_path / "light" / "9.png").write_text("no image")
    with pytest.raises(MisconfigurationException, match=r"9\.png is no image"):
        images(config, folder=str(tmp_path)).images[10]


def test_a_folder_without_images_is_named(config, tmp_path):
    with pytest.raises(MisconfigurationException, match="has no folders with images"):
        images(config, folder=str(tmp_path))


@pytest.mark.filterwarnings("ignore")  # of Lightning, on such short runs
def test_training_beats_guessing_by_far(config, tmp_path):
    torch.manual_seed(0)
    data, module = config.data.build(), config.module.build()
    module.optimizer_config = config.optimizer
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(module, data)
    assert trainer.callback_metrics["val/accuracy"] > 3 / module.classes
