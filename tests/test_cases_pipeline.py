"""Faults known from other frameworks' pipelines; each test is a row of that list."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from harness import RanksFailedError, run_ranks
from shardlight.framework import TrainingModule
from shardlight.strategies import Pipeline, Single, deferred_init, read_state_dict
from shardlight.strategies.errors import MeshError, ScheduleError
from test_pipeline import Module, batch, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Layers(TrainingModule):
    """Six layers; a plain mean, or a mean over tokens that differ in number from row to row."""

    def __init__(self, weighted=False, layers=6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(layers)]).double()
        self.weighted_loss = weighted
        self.gradients, self.norms, self.logged = [], [], []

    def loss(self, batch):
        x, keep = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if not self.weighted_loss:
            return (x - 1).square().mean()
        return self.weighted(((x - 1).square().mean(-1) * keep).sum(), keep.sum())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        strategy = self.trainer.strategy
        self.gradients.append({n: strategy.gradient(p).clone() for n, p in self.named_parameters()})
        self.norms.append(float(strategy.gradient_norm()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.logged.append(float(self.trainer.callback_metrics["train"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(number, count=8):
    g = torch.Generator().manual_seed(number)
    return torch.randn(count, 7, generator=g, dtype=torch.float64), (torch.rand(count, generator=g) < 0.6).double()


def fitted(module, strategy, world, folder, data, val=(), **kwargs):
    fit = trainer(strategy, world, folder, **kwargs)
    fit.fit(module, DataLoader(data, batch_size=None), DataLoader(list(val), batch_size=None) if val else None)
    return fit


def scale_body(rank, world, folder, weighted):
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    data, val = [rows(n) for n in range(4)], [rows(9), rows(10, 5)]
    found = {}
    for accumulate in (1, 2):
        for parts in (1, 2, 4, 8):
            module = Layers(weighted)
            options = {"stages": 2, "schedule": "1f1b" if parts < 8 else "gpipe", "micro_batches": parts}
            fit = fitted(module, Pipeline(**options), world, folder, data, val, accumulate_grad_batches=accumulate)
            metrics = {k: float(v) for k, v in fit.callback_metrics.items()}
            found[accumulate, parts] = module.gradients, module.norms, module.logged, metrics
    return found


def plain_body(rank, world, folder, weighted):
    found = {}
    for accumulate in (1, 2):
        module = Layers(weighted)
        data, val = [rows(n) for n in range(4)], [rows(9), rows(10, 5)]
        fit = fitted(module, Single(), 1, folder, data, val, accumulate_grad_batches=accumulate)
        metrics = {k: float(v) for k, v in fit.callback_metrics.items()}
        found[accumulate] = module.gradients, module.norms, module.logged, metrics
    return found


@pytest.mark.case("C032")
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_norms_and_losses_do_not_depend_on_micro_batches(weighted, tmp_path):
    (expected,) = run_ranks(plain_body, 1, timeout_s=60, init=False, folder=str(tmp_path), weighted=weighted)
    ranks = run_ranks(scale_body, 2, timeout_s=120, init=False, folder=str(tmp_path), weighted=weighted)
    for found in ranks:
        for (accumulate, parts), (gradients, norms, logged, metrics) in found.items():
            note = f"{parts} micro-batches, accumulation {accumulate}"
            plain_gradients, plain_norms, plain_logged, plain_metrics = expected[accumulate]
            assert 0 < len(gradients[0]) < len(plain_gradients[0])
            for here, there in zip(gradients, plain_gradients, strict=True):
                for name, gradient in here.items():
                    torch.testing.assert_close(gradient, there[name], rtol=1e-10, atol=1e-13)
            assert norms == pytest.approx(plain_norms, rel=1e-10), note
            assert logged == pytest.approx(plain_logged, rel=1e-10), note
            assert metrics == pytest.approx(plain_metrics, rel=1e-6), note


class Twice(pl.LightningModule):
    """The same weight on the first stage, times 2, and on the last one, times 3."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False).double()
        self.blocks = nn.ModuleList([Pass() for _ in range(2)])
        self.last = nn.Linear(1, 1, bias=False).double()
        self.last.weight = self.first.weight
        nn.init.ones_(self.first.weight)
        self.gradients, self.norms = [], []

    def training_step(self, batch, batch_idx):
        x = self.first.weight.view(()) * 2 + batch.mean() * 0
        x = x.expand(len(batch), 1)
        for block in self.blocks:
            x = block(x)
        return (x + self.last.weight * 3).mean()

    def on_before_optimizer_step(self, optimizer):
        strategy = self.trainer.strategy
        self.gradients.append(float(strategy.gradient(self.last.weight)))
        self.norms.append(float(strategy.clip_by_norm(optimizer, 1e9)))

    def configure_optimizers(self):
        return torch.optim.SGD([self.first.weight], lr=0.0)


class Pass(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return x * self.scale


def tied_body(rank, world, folder):
    module = Twice()
    data = [torch.zeros(8, 1, dtype=torch.float64) for _ in range(2)]
    fitted(module, Pipeline(stages=2, micro_batches=4, zero=1), world, folder, data)
    with deferred_init():
        module_on_meta = Module()
    places, place = world // 2, rank % (world // 2)
    fit = fitted(
        module_on_meta,
        Pipeline(stages=2, micro_batches=4, zero=1),
        world,
        folder,
        [batch(n * places + place) for n in range(3)],
        [batch(99)],
    )
    folder = f"{folder}/tied"
    fit.save_checkpoint(folder)
    copy = module_on_meta.model.head.weight.detach().clone()
    assert module_on_meta.model.head.weight is module_on_meta.model.tokens.weight
    return module.gradients, module.norms, copy


@pytest.mark.case("C053")
@pytest.mark.parametrize("world", [2, 4])
def test_a_weight_of_first_and_last_stage_gets_both_gradients_once(world, tmp_path):
    ranks = run_ranks(tied_body, world, timeout_s=120, init=False, folder=str(tmp_path))
    for gradients, norms, copy in ranks:
        assert gradients == [5.0, 5.0] and norms == [5.0, 5.0]
        torch.testing.assert_close(copy, ranks[0][2], rtol=0, atol=0)
    state = read_state_dict(tmp_path / "tied")
    torch.testing.assert_close(state["model.head.weight"], state["model.tokens.weight"], rtol=0, atol=0)


def tokens(number, rows, length):
    g = torch.Generator().manual_seed(number)
    return torch.randint(17, (rows, length), generator=g), torch.randint(17, (rows, length), generator=g)


SHAPES = [(6, 8), (6, 5), (6, 8), (4, 10), (2, 8), (1, 3), (6, 8)]


def shapes_body(rank, world, folder, strategy):
    module = Module(optimizer="sgd")
    kind = Pipeline(stages=2, micro_batches=4) if strategy == "pipeline" else Single()
    fit = fitted(module, kind, world, folder, [tokens(n, *shape) for n, shape in enumerate(SHAPES)], [tokens(50, 3, 7)])
    with fit.strategy.gathered():
        weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    return module.losses, module.norms, weights, float(fit.callback_metrics["val_loss"])


@pytest.mark.case("C055")
def test_batches_may_change_their_shape(tmp_path):
    (expected,) = run_ranks(shapes_body, 1, timeout_s=60, init=False, folder=str(tmp_path), strategy="single")
    ranks = run_ranks(shapes_body, 2, timeout_s=60, init=False, folder=str(tmp_path), strategy="pipeline")
    for losses, norms, weights, val in ranks:
        torch.testing.assert_close(losses, expected[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(norms, expected[1], rtol=1e-10, atol=1e-12)
        assert val == pytest.approx(expected[3], rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[2][name], rtol=1e-9, atol=1e-10)


class Shaped(Module):
    """Its blocks see as many positions as the batch says, which is no shape of the batch."""

    def training_step(self, batch, batch_idx):
        keep = int(batch[0][0, 0]) % 5 + 2
        return F.cross_entropy(self.model(batch[0][:, :keep]).flatten(0, 1), batch[1][:, :keep].flatten())


def other_shape_body(rank, world, folder):
    fitted(Shaped(), Pipeline(stages=2, micro_batches=1), world, folder, [batch(n) for n in range(6)], [batch(9)])


@pytest.mark.case("C055")
def test_an_activation_of_another_shape_for_equal_batches_is_an_error_with_both(tmp_path):
    with pytest.raises(RanksFailedError, match=r"stage 0 puts out float64 \(8, \d, 12\).*float64 \(8, \d, 12\) before"):
        run_ranks(other_shape_body, 2, timeout_s=60, init=False, folder=str(tmp_path))


def evaluated_body(rank, world, folder, strategy, evaluate, layers=5):
    torch.manual_seed(0)
    module = Module(layers=layers, optimizer="sgd")
    options = {"recompute": "blocks"}
    kind = Pipeline(stages=2, micro_batches=4, **options) if strategy == "pipeline" else Single(**options)
    data = [batch(n) for n in range(4)]
    val = [batch(20, 3), batch(21), batch(22, 6)]
    every = {"val_check_interval": 2} if evaluate else {"limit_val_batches": 0}
    fit = fitted(module, kind, world, folder, data, val, **every)
    with fit.strategy.gathered():
        weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    return module.losses, weights, {k: float(v) for k, v in fit.callback_metrics.items() if k == "val_loss"}


@pytest.mark.case("C056")
def test_an_evaluation_between_training_steps_changes_nothing(tmp_path):
    settings = {"timeout_s": 60, "init": False, "folder": str(tmp_path)}
    (expected,) = run_ranks(evaluated_body, 1, **settings, strategy="single", evaluate=True)
    with_it = run_ranks(evaluated_body, 2, **settings, strategy="pipeline", evaluate=True)
    without = run_ranks(evaluated_body, 2, **settings, strategy="pipeline", evaluate=False)
    assert {name for rank in with_it for name in rank[1]} == set(expected[1])
    for (losses, weights, metrics), (same_losses, same_weights, _) in zip(with_it, without, strict=True):
        assert losses == same_losses
        assert metrics == pytest.approx(expected[2], rel=1e-6)
        torch.testing.assert_close(losses, expected[0], rtol=1e-10, atol=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(value, same_weights[name], rtol=0, atol=0)
            torch.testing.assert_close(value, expected[1][name], rtol=1e-9, atol=1e-10)


def too_few_body(rank, world, folder):
    with pytest.raises(ScheduleError, match=r"3 blocks.*4 stages|4 stages.*3 blocks"):
        fitted(Module(layers=3), Pipeline(stages=4), world, folder, [batch(0)], [batch(1)])


@pytest.mark.case("C056")
def test_more_stages_than_blocks_are_refused(tmp_path):
    run_ranks(too_few_body, 4, timeout_s=60, init=False, folder=str(tmp_path))


def test_ranks_that_do_not_divide_into_stages_are_refused_with_the_arithmetic(tmp_path):
    with pytest.raises(MeshError, match="3 ranks do not divide into 2 pipeline stages. Start 2 or 4, or set stages"):
        trainer(Pipeline(stages=2), 3, str(tmp_path))
