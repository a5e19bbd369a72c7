"""What else is done with a transformers model around its training: generation, saving, loading, questions about it."""

import pytest
import torch
from harness import run_ranks
from hf import PAD, batch, build
from loops import check_equal
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
        want = Recorded(build(name), beams).run(name, rank, world_size)
        module = Sampled(build(name), beams)
        trainer = make_trainer(strategy, world_size, folder, val_check_interval=1)
        loader = DataLoader(Steps(name, rank), batch_size=None)
        trainer.fit(module, loader, DataLoader([0], batch_size=None))
        assert len(want) == STEPS + 1
        for got, text in zip(module.texts, want, strict=True):
            assert torch.equal(got, text), f"{name} {strategy}: {got.tolist()} and {text.tolist()}"
            assert (text[:, -1] == EOS).all()
        numbers = fit(Tuned(build(name)), strategy, name, rank, world_size, folder)
        check_equal(numbers, plain(build(name), name, world_size), f"{name} {strategy}")
        with trainer.strategy.gathered():
            for n, p in module.model.named_parameters():
                torch.testing.assert_close(p.detach(), numbers.weights[n], rtol=1e-10, atol=1e-10)


@pytest.mark.case("C016")
def test_ranks_that_end_at_different_lengths_generate_the_tokens_of_one_process(tmp_path):
    cases = [("llama", "zero3", 1), ("t5", "zero3", 2), ("gpt2", "zero2", 1)]
    run_ranks(generates, 2, init=False, timeout_s=240, folder=str(tmp_path), cases=cases)
