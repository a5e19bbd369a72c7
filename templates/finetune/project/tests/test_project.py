"""The config has no faults, only responses have labels, bad lines are named, and training helps, with LoRA as well."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import load_config

PROJECT = Path(__file__).resolve().parents[1]
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[dev]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning on short runs, and of transformers and peft


@pytest.fixture
def config():
    return load_config(PROJECT / "config.yaml", ["module.width=32", "module.depth=1", "data.batch_size=4"])


def instructions(config, **changed):
    data = config.data.target(**{**config.data.arguments, **changed})
    data.setup("fit")
    return data


def chat(config, **changed):
    torch.manual_seed(0)
    return config.module.target(**{**config.module.arguments, **changed})


def bits_after(config, module, data, folder, **length):
    module.optimizer_config = config.optimizer
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": folder}
    trainer = Trainer(accelerator="cpu", devices=1, **length, **quiet)
    trainer.fit(module, data)
    return trainer.callback_metrics["val/bpb"]


def test_only_the_response_and_its_end_have_labels(config):
    data = instructions(config)
    sample = data.encode("What is 1 + 1?", "It is 2.")
    kept = sample["labels"] != -100
    assert data.tokenizer.decode(sample["input_ids"][kept]) == "It is 2." + data.tokenizer.eos_token
    assert "What is 1 + 1?" in data.tokenizer.decode(sample["input_ids"][~kept])
    assert torch.equal(sample["labels"][kept], sample["input_ids"][kept])
    assert sample["bytes"] == len("It is 2.")


def test_padding_has_neither_mask_nor_labels(config):
    data = instructions(config)
    batch = data.collate([data.encode("a", "short"), data.encode("a", "much longer")])
    padded = batch["attention_mask"] == 0
    assert padded.sum() == len("much longer") - len("short") and not padded[1].any()
    assert (batch["labels"][padded] == -100).all()


def test_padding_and_prompts_do_not_change_the_loss(config):
    data, module = instructions(config), chat(config).eval()
    short, long = data.encode("a", "short"), data.encode("a long instruction", "much longer")

    def loss_sum(samples):
        logits, labels = module.logits_and_labels(data.collate(samples))
        return module.token_loss(logits, labels) * (labels != -100).sum()

    torch.testing.assert_close(loss_sum([short, long]), loss_sum([short]) + loss_sum([long]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'instruction': 1}", "no JSON: Expecting property name"),
        ("[1, 2]", "a line has to be an object"),
        ('{"instruction": "a"}', "'response' is missing; there are ['instruction']"),
        ('{"instruction": "a", "response": 3}', "'response' is 3"),
        ('{"instruction": "", "response": "b"}', "'instruction' is \"\""),
    ],
)
def test_a_bad_line_is_named(config, tmp_path, line, said):
    good = json.dumps({"instruction": "a", "response": "b"})
    (tmp_path / "bad.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(MisconfigurationException) as caught:
        instructions(config, path=str(tmp_path / "bad.jsonl"))
    assert "bad.jsonl:3: " in str(caught.value) and said in str(caught.value)


def test_an_answer_is_what_the_model_says_after_the_prompt(config):
    answer = importlib.import_module(config.module.class_path.partition(".")[0] + ".answer").answer
    data, module = instructions(config), chat(config).eval()
    tokens = data.encode("What is 1 + 1?", "x")["input_ids"][:-2].unsqueeze(0)
    first = module.model(input_ids=tokens).logits[0, -1].argmax()
    assert answer(module, "What is 1 + 1?", max_new_tokens=1) == data.tokenizer.decode([first])


def test_training_beats_the_model_without_context(config, tmp_path):
    data = instructions(config)
    assert bits_after(config, chat(config), data, tmp_path, max_epochs=2) < data.unigram_bpb


def test_a_model_from_a_folder_starts_as_it_is_and_lora_trains_adapters_alone(config, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[dev]'")
    first = chat(config)
    first.model.save_pretrained(tmp_path / "base")
    instructions(config).tokenizer.save_pretrained(tmp_path / "base")
    data = instructions(config, model=str(tmp_path / "base"))
    module = chat(config, model=str(tmp_path / "base"), lora=True)
    batch = data.collate(data.validation)
    torch.testing.assert_close(module.logits_and_labels(batch)[0], first.logits_and_labels(batch)[0])
    start = {name: param.detach().clone() for name, param in module.named_parameters()}
    before = module.token_loss(*module.logits_and_labels(data.collate(data.train[:16])))
    bits_after(config, module, data, tmp_path, max_epochs=1, limit_train_batches=10)
    after = module.token_loss(*module.logits_and_labels(data.collate(data.train[:16])))
    assert after < before
    moved = {name for name, param in module.named_parameters() if not torch.equal(param, start[name])}
    assert moved and all("lora" in name for name in moved)
