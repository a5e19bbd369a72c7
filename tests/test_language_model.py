"""The language model example: its text, its model, two steps of training under stock Lightning, its config."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from shardlight.framework.optim import OptimizerConfig

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the example is a project of its own, whose root is the repository's

from examples.language_model.data import (  # noqa: E402
    StandardLibraryText,
    split_by_file,
    standard_library_files,
    unigram_bits,
)
from examples.language_model.model import GPT, LanguageModel, rotate  # noqa: E402


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library, and a cache folder of its own."""
    root = tmp_path / "library"
    for index in range(40):
        file = root / ("package" if index % 2 else ".") / f"module{index}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x = %d\n" % index * 20)
    for left_out in ("site-packages/a.py", "package/test/b.py", "package/c.txt"):
        (root / left_out).parent.mkdir(parents=True, exist_ok=True)
        (root / left_out).write_text("nothing to read")
    (root / "empty.py").touch()
    (root / "broken.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("SHARDLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return root


def test_standard_library_files_are_sorted_and_leave_out_tests_and_packages(library):
    files = standard_library_files(library)
    paths = [path for path, _ in files]
    assert len(paths) == 40
    assert paths == sorted(paths)
    assert dict(files)["package/module7.py"] == b"x = 7\n" * 20


def test_split_is_by_file_and_another_file_moves_none(library):
    files = standard_library_files(library)
    train, validation = split_by_file(files, 0.25, 10**6, 10**6)
    for path, content in files:
        assert (content in train) != (content in validation), path
    assert 0.1 < len(validation) / (len(train) + len(validation)) < 0.4
    more_train, more_validation = split_by_file([*files, ("new.py", b"new")], 0.25, 10**6, 10**6)
    assert len(more_train) + len(more_validation) == len(train) + len(validation) + len(b"\nnew")
    assert all((content in train) == (content in more_train) for _, content in files)


def test_validation_is_the_middle_of_every_file_and_train_is_cut():
    files = [("a", b"0123456789"), ("b", b"xy"), ("c", b"abcdefgh")]
    assert split_by_file(files, 1.0, 10**6, 12) == (b"", b"3456" + b"xy" + b"cdef")
    assert split_by_file(files, 0.0, 12, 10**6) == (b"0123456789\nx", b"")


@pytest.mark.parametrize(("text", "bits"), [(b"aaaa", 0), (b"abab", 1), (b"abcd", 2), (b"aab", 0.9182958340544896)])
def test_unigram_bits(text, bits):
    assert unigram_bits(text) == pytest.approx(bits, abs=1e-12)


def test_data_module_gives_batches_and_writes_each_file_once(library, tmp_path):
    data = StandardLibraryText(sequence_length=16, batch_size=4, validation_share=0.25)
    data.prepare_data()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    assert len(written) == 2
    other_rank = StandardLibraryText(sequence_length=16, batch_size=4, validation_share=0.25)
    other_rank.setup("fit")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")} == written
    assert other_rank.paths == data.paths
    batch = next(iter(other_rank.train_dataloader()))
    assert batch["tokens"].shape == batch["labels"].shape == (4, 16)
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    validation = split_by_file(standard_library_files(library), 0.25, 10**6, 10**6)[1]
    assert data.unigram_bpb == unigram_bits(validation)
    first = next(iter(data.val_dataloader()))["tokens"][0]
    assert bytes(first.tolist()) == validation[:16]


def test_other_text_has_other_files(library, tmp_path):
    data = StandardLibraryText(sequence_length=16, validation_share=0.25)
    data.prepare_data()
    (library / "module0.py").write_text("changed = True\n")
    changed = StandardLibraryText(sequence_length=16, validation_share=0.25)
    changed.prepare_data()
    assert not set(data.paths.values()) & set(changed.paths.values())


def test_the_real_library_is_read():
    files = dict(standard_library_files(Path(os.__file__).parent))
    assert b"def makedirs" in files["os.py"]
    assert not any(path.startswith(("site-packages/", "test/")) for path in files)


def small(**options):
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 256, "width": 32, "depth": 2, "heads": 2, **options})


def test_logits_do_not_depend_on_later_tokens():
    model = small()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    logits, changed_logits = model(tokens), model(changed)
    assert logits.shape == (2, 16, 256)
    torch.testing.assert_close(logits[:, :9], changed_logits[:, :9])
    assert not torch.allclose(logits[:, 9:], changed_logits[:, 9:])


def test_a_fresh_model_knows_nothing():
    module = LanguageModel(width=32, depth=2, heads=2)
    tokens = torch.randint(256, (8, 16))
    bits = module.token_loss(module.model(tokens), torch.randint(256, (8, 16)), unit="bits").item()
    assert bits == pytest.approx(8.7, abs=0.3)  # logits of variance 1 cost half a nat more than none


def test_rotated_dot_products_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 8).double()
    rotated_q, rotated_k = (rotate(x.expand(1, 1, 12, 8)) for x in (q, k))
    scores = (rotated_q @ rotated_k.transpose(-1, -2))[0, 0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert scores[0, 0].item() == pytest.approx((q @ k).item(), rel=1e-6)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(1, 1, 12), rtol=1e-6, atol=0)


def test_the_shipped_size_is_about_three_million_parameters():
    assert 2.5e6 < sum(param.numel() for param in LanguageModel().parameters()) < 3.5e6


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_it_trains_and_reports_bits_per_byte_under_stock_lightning(library, tmp_path):
    torch.manual_seed(0)
    module = LanguageModel(width=32, depth=2, heads=2)
    module.optimizer_config = OptimizerConfig(name="adamw", lr=3e-3)
    data = StandardLibraryText(sequence_length=16, batch_size=4, validation_share=0.25)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        max_epochs=5,
        limit_train_batches=30,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.validate(module, data, verbose=False)
    before = trainer.callback_metrics["val/bpb"].item()
    trainer.fit(module, data)
    after = trainer.callback_metrics["val/bpb"].item()
    assert before == pytest.approx(8.7, abs=0.5)
    assert after < data.unigram_bpb < before
    assert math.isfinite(trainer.callback_metrics["train/loss"].item())
