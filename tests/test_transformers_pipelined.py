"""transformers models train under pipeline with no edit: the numbers of one process."""

from harness import run_ranks
from hf import CAUSAL, build, dtype_of, tolerance_of
from loops import check_equal, optimizer_of
from shardlight.framework import TrainingModule
from shardlight.strategies import Pipeline
from test_lightning_fit import make_trainer
from test_transformers import Steps, Tuned, plain
from torch.utils.data import DataLoader

CASES = [
    ("llama", {"schedule": "1f1b", "micro_batches": 3}),
    ("gpt2", {"schedule": "zb_h1", "micro_batches": 2, "zero": 3}),
    ("qwen3", {"schedule": "gpipe", "micro_batches": 2, "recompute": "blocks"}),
    ("mixtral", {"schedule": "1f1b", "micro_batches": 3}),
    ("bert_classifier", {"schedule": "zb_h1", "micro_batches": 3}),
]


class Weighted(TrainingModule):
    """The mean over a batch's labels, of which micro-batches have unequal numbers."""

    def __init__(self, model, causal):
        super().__init__()
        self.model, self.causal = model, causal
        self.seen = Tuned(model).seen

    def training_step(self, batch, batch_idx):
        loss, labels = self.model(**batch).loss, batch["labels"]
        count = ((labels[:, 1:] if self.causal else labels) != -100).sum()
        return self.weighted(loss * count, count)

    def on_before_optimizer_step(self, optimizer):
        self.seen.norms.append(float(self.trainer.strategy.gradient_norm()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.losses.append(self.trainer.strategy.window_loss)

    def configure_optimizers(self):
        return optimizer_of(self)


def check_pipelined(rank, world_size, folder, cases):
    for name, options in cases:
        want = plain(build(name), name, 1)
        module = Weighted(build(name), name in CAUSAL)
        precision = "64-true" if "float64" in str(dtype_of(name)) else "32-true"
        trainer = make_trainer(Pipeline(stages=2, **options), world_size, folder, precision=precision)
        trainer.fit(module, DataLoader(Steps(name, 0), batch_size=None))
        with trainer.strategy.gathered():
            got = module.seen
            got.weights = {n: p.detach().clone() for n, p in module.model.named_parameters()}
        want.weights = {n: value for n, value in want.weights.items() if n in got.weights}
        assert got.weights
        check_equal(got, want, f"{name} {options}", tolerance_of(name))


def test_unmodified_models_are_pipelined(tmp_path):
    run_ranks(check_pipelined, 2, init=False, timeout_s=200, folder=str(tmp_path), cases=CASES)
