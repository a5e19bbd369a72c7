"""What else is done with a transformers model around its training: generation, saving, loading, questions about it."""

from pathlib import Path

import pytest
import torch
from harness import run_ranks
from hf import PAD, VOCAB, batch, build, tolerance_of, transformers
from loops import check_equal
from shardlight.strategies.errors import StrategyError
from test_lightning_fit import make_trainer
from test_transformers import STEPS, Steps, Tuned, fit, plain
from torch.utils.data import DataLoader

EOS = 2
NEW = 8


class EndAt(torch.nn.Module):
    """A logits processor that makes the end of the sequence the only choice as its `count`-th new token."""

    def __init__(self, start, count):
        super().__init__()
        self.last = start + count - 1

    def forward(self, input_ids, scores):
        scores = scores.clone()
        if input_ids.shape[1] == self.last:
            scores[:, [n for n in range(scores.shape[1]) if n != EOS]] = -torch.inf
        else:
            scores[:, EOS] = -torch.inf
        return scores


def sample(model, rank, beams=1):
    """Two prompts, one of them padded on the left; rank 0 ends after 2 new tokens, rank 1 after 5."""
    prompt = torch.tensor([[PAD, 5 + rank, 9], [7, 30, 11 + rank]])
    start = 1 if model.config.is_encoder_decoder else prompt.shape[1]
    with torch.no_grad():
        return model.generate(
            input_ids=prompt,
            attention_mask=(prompt != PAD).long(),
            max_new_tokens=NEW,
            logits_processor=[EndAt(start, 2 + 3 * rank)],
            num_beams=beams,
            do_sample=False,
        )


class Sampled(Tuned):
    """Generates in validation and, as reinforcement learning does, in the training step."""

    def __init__(self, model, beams):
        super().__init__(model)
        self.beams, self.texts = beams, []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.texts.append(sample(self.model, self.global_rank, self.beams))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.texts.append(sample(self.model, self.global_rank, self.beams))


class Recorded(Sampled):
    """One process: the same, by hand."""

    def run(self, name, rank, world):
        optimizer = self.configure_optimizers()
        for step in range(STEPS):
            if step == 1:
                self.texts.append(sample(self.model, rank, self.beams))
            sum(self.model(**batch(name, step, r)).loss / world for r in range(world)).backward()
            optimizer.step()
            optimizer.zero_grad()
            self.model.eval()
            self.texts.append(sample(self.model, rank, self.beams))
            self.model.train()
        return self.texts


def generates(rank, world_size, folder, cases):
    for name, strategy, beams in cases:
        one = Recorded(build(name), beams)
        want = one.run(name, rank, world_size)
        module = Sampled(build(name), beams)
        trainer = make_trainer(strategy, world_size, folder, val_check_interval=1)
        loader = DataLoader(Steps(name, rank), batch_size=None)
        trainer.fit(module, loader, DataLoader([0], batch_size=None))
        assert len(want) == STEPS + 1
        for got, text in zip(module.texts, want, strict=True):
            assert torch.equal(got, text), f"{name} {strategy}: {got.tolist()} and {text.tolist()}"
            assert (text[:, -1] == EOS).all()
        with trainer.strategy.gathered():
            for n, p in module.model.named_parameters():
                torch.testing.assert_close(p.detach(), one.model.get_parameter(n).detach(), rtol=5e-7, atol=5e-7)


@pytest.mark.case("C016")
def test_ranks_that_end_at_different_lengths_generate_the_tokens_of_one_process(tmp_path):
    cases = [("llama", "zero3", 1), ("t5", "zero3", 2), ("gpt2", "zero2", 1)]
    run_ranks(generates, 2, init=False, timeout_s=240, folder=str(tmp_path), cases=cases)


def describe(model):
    """What a model says about itself without its values."""
    return {
        "parameters": model.num_parameters(),
        "trainable": model.num_parameters(only_trainable=True),
        "without embeddings": model.num_parameters(exclude_embeddings=True),
        "bytes": model.get_memory_footprint(),
        "dtype": model.dtype,
        "device": model.device,
        "cache": model.config.use_cache,
        "vocabulary": model.get_input_embeddings().num_embeddings,
        "shapes": {
            n: (p.shape, p.dtype, p.device, p.is_meta, p.is_floating_point()) for n, p in model.named_parameters()
        },
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }


class Described(Tuned):
    def training_step(self, batch, batch_idx):
        self.description = describe(self.model)
        return super().training_step(batch, batch_idx)


def life_of(rank, world_size, folder, strategy):
    """Load from a folder, resize, freeze a part, train, ask, save, load again."""
    here = Path(folder) / strategy
    if rank == 0:
        build("qwen3").save_pretrained(here / "start")
    torch.distributed.barrier()

    def load(where):
        model = transformers.Qwen3ForCausalLM.from_pretrained(where, dtype=torch.float64).train()
        model.config.use_cache = False
        return model

    def start():
        torch.manual_seed(1)
        model = load(here / "start")
        model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
        model.model.layers[0].requires_grad_(False)
        return model

    want, module = plain(start(), "qwen3", world_size), Described(start())
    before = describe(module.model.double())  # as precision 64-true does, buffers too
    assert before["vocabulary"] == VOCAB + 4 and before["tied"] and before["trainable"] < before["parameters"]
    trainer = make_trainer(strategy, world_size, folder)
    trainer.fit(module, DataLoader(Steps("qwen3", rank), batch_size=None))
    for described in (describe(module.model), module.description):
        assert described == before, {k: (v, described[k]) for k, v in before.items() if described[k] != v}
    if strategy == "zero3":
        with pytest.raises(StrategyError, match=r"is sharded \(zero3\) and its values were used outside"):
            module.model.save_pretrained(here / "torn")
    with trainer.strategy.gathered():
        if rank == 0:
            module.model.save_pretrained(here / "end")
    torch.distributed.barrier()
    again = load(here / "end")
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter.detach(), want.weights[name], rtol=5e-7, atol=5e-7)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    # Saved and loaded models go on as any other.
    check_equal(
        fit(Tuned(again), strategy, "qwen3", rank, world_size, folder),
        plain(load(here / "end"), "qwen3", world_size),
        strategy,
        tolerance_of("qwen3"),
    )


def lives(rank, world_size, folder, strategies):
    torch.distributed.init_process_group("gloo", init_method="env://")
    for strategy in strategies:
        life_of(rank, world_size, folder, strategy)


def test_loading_resizing_questions_and_saving(tmp_path):
    run_ranks(lives, 2, init=False, timeout_s=120, folder=str(tmp_path), strategies=["zero3", "zero2"])
