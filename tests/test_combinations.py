"""Options together: whatever is switched on beside it, a precision gives the same bits under every strategy."""

import itertools
import warnings

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies import STRATEGIES, MixedFP16, ShardedEMA
from test_lightning_fit import make_trainer
from test_precision import weights_of
from torch.utils.data import DataLoader

SETTINGS = {
    "precision": ("32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    "accumulate": (1, 2),
    "reduce": ("window", "micro_batch"),
    "recompute": ("no", "blocks"),
    "shard_group": (None, 1),
    "compile": ("no", "blocks"),
    "defer": (True, False),
    "keep_gathered": ("no", "backward", "window", "auto"),
    "keep_small": (0, 36),
    "clip": (None, 0.5),
}
"""Of these only precision, accumulate, clip and reduce may change numbers: each choice of them has a run under ddp."""


class Late(pl.LightningModule):
    """Builds its model in configure_model, where construction can be deferred."""

    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(0)
            self.model = TinyGPT()

    def training_step(self, batch, batch_idx):
        return token_loss(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def pairwise(settings):
    """Rows of values in which every pair of values of two settings comes up."""
    wanted, bits, rows = 0, {}, []
    for a, b in itertools.combinations(range(len(settings)), 2):
        for pair in itertools.product(*[range(len(list(settings.values())[n])) for n in (a, b)]):
            bits[a, b, *pair] = 1 << len(bits)
            wanted |= bits[a, b, *pair]
    # By row: the bits of its pairs.
    masks = {(): 0}
    for b, values in enumerate(settings.values()):
        masks = {
            (*row, y): mask | sum(bits[a, b, x, y] for a, x in enumerate(row))
            for row, mask in masks.items()
            for y in range(len(values))
        }
    while wanted:
        best = max(masks, key=lambda row: (wanted & masks[row]).bit_count())
        wanted &= ~masks[best]
        rows.append({n: settings[n][x] for n, x in zip(settings, best, strict=True)})
    return rows


def quiet():
    # torch.compile looks at `grad` of every tensor that it traces.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def run(rank, world_size, folder, name, precision, accumulate, clip=None, **options):
    fp16 = precision == "16-mixed"
    ema = ShardedEMA(decay=0.5)
    if options.get("compile") == "blocks":
        options["compile_backend"] = "aot_eager"
    chosen = {"precision": None, "plugins": MixedFP16()} if fp16 else {"precision": precision}
    trainer = make_trainer(
        STRATEGIES[name](**options, **({"loss_scale": 256.0} if fp16 else {})),
        world_size,
        folder,
        callbacks=ema,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        **chosen,
    )
    module = Late()
    data = [token_batch(1000 * m + rank, 4, torch.float32) for m in range(2 * accumulate)]
    trainer.fit(module, DataLoader(data, batch_size=None))
    weights = weights_of(trainer.strategy.engine)
    with ema.averaged(trainer):
        return weights | {f"ema {n}": t for n, t in weights_of(trainer.strategy.engine).items()}


def combine(rank, world_size, folder, rows):
    quiet()
    wants = {}
    for row in rows:
        where, row = str(row), dict(row)
        name = row.pop("strategy")
        if name == "ddp":
            row["shard_group"] = None
        if name != "zero3":
            del row["keep_gathered"], row["keep_small"]
        # In shard groups of one, ranks add micro-batches up before they add to each other, as `window` does.
        order = "window" if row["shard_group"] == 1 else row["reduce"]
        key = row["precision"], row["accumulate"], row["clip"], order
        if key not in wants:
            wants[key] = run(rank, world_size, folder, "ddp", *key[:3], reduce=key[3])
        got = run(rank, world_size, folder, name, **row)
        for n, want in wants[key].items():
            assert torch.equal(got[n], want), f"{where}: {n} is off by {(got[n] - want).abs().max():.2g}"


@pytest.mark.parametrize("keep", [("no", "window"), pytest.param(SETTINGS["keep_gathered"], marks=pytest.mark.long)])
def test_options_together_change_nothing(keep, tmp_path):
    rows = pairwise({"strategy": ("zero1", "zero2", "zero3"), **SETTINGS, "keep_gathered": keep})
    run_ranks(combine, 2, init=False, folder=str(tmp_path), rows=rows, timeout_s=200)


@pytest.mark.long
def test_all_options_together_change_nothing(tmp_path):
    settings = {
        "strategy": ("ddp", "zero1", "zero2", "zero3"),
        **SETTINGS,
        "keep_gathered": ("no",),
        "keep_small": (0,),
    }
    rows = [dict(zip(settings, row, strict=True)) for row in itertools.product(*settings.values())]
    run_ranks(combine, 2, init=False, folder=str(tmp_path), rows=rows, timeout_s=3000)
