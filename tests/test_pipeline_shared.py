"""What several stages of a pipeline hold: weights tied between blocks, and state of modules that run more than once."""

import warnings

import pytest
import torch
import torchmetrics
from harness import run_ranks
from shardlight.strategies import Pipeline, Single, read_state_dict
from test_cases_pipeline import Layers, fitted, rows
from torch import nn


class Crossed(Layers):
    """Two tied weights of one shape; the second stage meets them in the other order than the first."""

    def __init__(self):
        super().__init__(layers=4)
        self.layers[3].weight = self.layers[0].weight
        self.layers[2].weight = self.layers[1].weight
        blocks = self._modules.pop("layers")
        self.first = nn.Linear(7, 7, bias=False).double()  # its first name is none of a block
        self.first.weight = blocks[2].weight
        self.layers = blocks

    def validation_step(self, batch, batch_idx):
        self.loss(batch)


def crossed_body(rank, world, folder, zero=1):
    module = Crossed()
    strategy = Pipeline(stages=world, micro_batches=4, zero=zero) if world > 1 else Single()
    kwargs = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    fit = fitted(module, strategy, world, folder, [rows(n) for n in range(4)], [rows(9)], **kwargs)
    fit.save_checkpoint(f"{folder}/saved{world}")
    return module.norms, set(fit.strategy.engine.table.names)


def test_weights_tied_between_blocks_of_stages_get_their_own_gradients(tmp_path):
    settings = {"timeout_s": 60, "init": False, "folder": str(tmp_path)}
    (expected,) = run_ranks(crossed_body, 1, **settings)
    ranks = run_ranks(crossed_body, 2, **settings)
    for norms, _ in ranks:
        torch.testing.assert_close(norms, expected[0], rtol=1e-10, atol=1e-13)
    # Optimizer state is found by these names, whichever strategy saved it.
    assert ranks[0][1] | ranks[1][1] == expected[1]
    state, there = (read_state_dict(tmp_path / f"saved{world}") for world in (2, 1))
    assert state.keys() == there.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, there[name], rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


class Counting(Layers):
    """Before its blocks: a module with statistics, and a metric."""

    def __init__(self):
        super().__init__(layers=4)
        blocks = self._modules.pop("layers")
        self.before = nn.BatchNorm1d(7).double()
        self.layers = blocks
        self.seen = torchmetrics.SumMetric()

    def loss(self, batch):
        self.seen.update(batch[0].sum())
        return super().loss((self.before(batch[0]), batch[1]))

    def on_train_epoch_end(self):
        self.log("seen", self.seen.compute(), sync_dist=True)


def counting_body(rank, world, folder, schedule=None):
    """Micro-batches of two rows, and as many batches in one process."""
    module = Counting()
    strategy = Pipeline(stages=world, micro_batches=4, schedule=schedule) if world > 1 else Single()
    data = [rows(n) for n in range(3)]
    if world == 1:
        data = [part for x, keep in data for part in zip(x.split(2), keep.split(2), strict=True)]
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    fit = fitted(module, strategy, world, folder, data, accumulate_grad_batches=1 if world > 1 else 4)
    return module.norms, module.before.running_var.clone(), float(fit.callback_metrics["seen"])


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b"])
def test_what_is_before_the_blocks_counts_once_where_a_rank_has_several_stages(schedule, tmp_path):
    settings = {"timeout_s": 60, "init": False, "folder": str(tmp_path)}
    (expected,) = run_ranks(counting_body, 1, **settings)
    ranks = run_ranks(counting_body, 2, **settings, schedule=schedule)
    torch.testing.assert_close(ranks[0][1], expected[1], rtol=1e-10, atol=1e-13)
    for norms, _, seen in ranks:
        torch.testing.assert_close(norms, expected[0], rtol=1e-10, atol=1e-13)
        assert seen == pytest.approx(expected[2], rel=1e-6)
