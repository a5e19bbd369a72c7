"""What hooks do to gradients and weights has the effect it has in plain PyTorch, or is an error; it is never lost."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from loops import IN_MEMORY
from models import OddMLP, regression_batch, regression_loss
from shardlight.strategies.errors import GradientError, StrategyError
from test_lightning_fit import make_trainer
from torch.utils.data import DataLoader, Dataset

STEPS = 3


def parameters(module):
    return list(module.model.parameters())


def scale(module):
    for p in parameters(module):
        if p.grad is not None:
            p.grad.mul_(0.5)


def scale_data(module):
    for p in parameters(module):
        p.grad.data.mul_(0.5)


def scale_view(module):
    for p in parameters(module):
        p.grad.view(-1)[:2] *= 0.5


def clip_norm(module):
    torch.nn.utils.clip_grad_norm_(parameters(module), 0.05)


def clip_value(module):
    torch.nn.utils.clip_grad_value_(parameters(module), 0.01)


def replace(module):
    for p in parameters(module):
        p.grad = p.grad * 0.25


def drop(module):
    parameters(module)[0].grad = None


def read_only(module):
    assert sum(float(p.grad.norm()) for p in parameters(module)) > 0


def grow(module):
    for p in parameters(module):
        p.grad.mul_(10)


CHANGES = [scale, scale_data, scale_view, clip_norm, clip_value, replace, drop, read_only, grow]


class Rows(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return STEPS

    def __getitem__(self, m):
        return regression_batch(1000 * m + self.rank, 4, torch.float64)


class Module(pl.LightningModule):
    def __init__(self, change, hook):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.change, self.hook = OddMLP().double(), change, hook

    def training_step(self, batch, batch_idx):
        return regression_loss(self.model, batch)

    def on_after_backward(self):
        if self.hook == "on_after_backward":
            self.change(self)

    def on_before_optimizer_step(self, optimizer):
        if self.hook == "on_before_optimizer_step":
            self.change(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def plain(change, world, clip):
    module = Module(change, None)
    optimizer = module.configure_optimizers()
    for m in range(STEPS):
        for rank in range(world):
            (regression_loss(module.model, Rows(rank)[m]) / world).backward()
        change(module)
        if clip:
            torch.nn.utils.clip_grad_norm_(module.model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in module.model.named_parameters()}


def check(rank, world_size, folder, hook, clip):
    for change in CHANGES:
        want = plain(change, world_size, clip)
        for strategy in [s for s in IN_MEMORY if s != "single" or world_size == 1]:
            module = Module(change, hook)
            trainer = make_trainer(strategy, world_size, folder, gradient_clip_val=clip)
            trainer.fit(module, DataLoader(Rows(rank), batch_size=None))
            with trainer.strategy.gathered():
                for n, p in module.model.named_parameters():
                    where = f"{change.__name__} in {hook} under {strategy}: {n}: "
                    torch.testing.assert_close(
                        p.detach(), want[n], rtol=1e-10, atol=1e-10, msg=lambda m, w=where: w + m
                    )


@pytest.mark.conformance("B2")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("hook,clip", [("on_after_backward", None), ("on_before_optimizer_step", 0.2)])
def test_changed_gradients_are_the_ones_that_are_used(world_size, hook, clip, tmp_path):
    run_ranks(check, world_size, init=False, folder=str(tmp_path), hook=hook, clip=clip, timeout_s=120)


class WritesWeights(Module):
    def __init__(self, write):
        super().__init__(None, None)
        self.write = write

    def training_step(self, batch, batch_idx):
        loss = regression_loss(self.model, batch)
        self.write(parameters(self)[0])
        return loss


def in_place(p):
    with torch.no_grad():
        p.mul_(0.5)


def through_data(p):
    p.data.mul_(0.5)


def other_data(p):
    p.data = p.data * 0.5


def check_writes(rank, world_size, folder):
    for write in (through_data, other_data):
        results = []
        for strategy in ("ddp", "zero1", "zero2"):
            module = WritesWeights(write)
            trainer = make_trainer(strategy, world_size, folder)
            trainer.fit(module, DataLoader(Rows(rank), batch_size=None))
            results.append([p.detach().clone() for p in parameters(module)])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), write.__name__


def check_lost_write(rank, world_size, folder, number):
    write = (in_place, through_data, other_data)[number]
    trainer = make_trainer("zero3", world_size, folder)
    trainer.fit(WritesWeights(write), DataLoader(Rows(rank), batch_size=None))


def test_weights_written_in_a_step_are_kept_where_they_are_replicated(tmp_path):
    run_ranks(check_writes, 2, init=False, folder=str(tmp_path))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_weights_written_in_a_step_are_an_error_where_they_are_sharded(number, tmp_path):
    lost = "'model.layers.0.weight' was changed inside a step|was changed in place after forward"
    with pytest.raises(AssertionError, match=lost):
        run_ranks(check_lost_write, 2, init=False, folder=str(tmp_path), number=number)


class SetsUnused(Module):
    def __init__(self):
        super().__init__(None, None)
        self.unused = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def on_before_optimizer_step(self, optimizer):
        self.unused.grad = torch.ones(3, dtype=torch.float64)


def check_refusals(rank, world_size, folder):
    for strategy in ("ddp", "zero2"):
        with pytest.raises(GradientError, match="'unused'.grad was set, but no rank has a gradient for it"):
            make_trainer(strategy, world_size, folder).fit(SetsUnused(), DataLoader(Rows(rank), batch_size=None))

    class Keeps(Module):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.global_step == 0:
                self.kept = parameters(self)[0].grad
                assert "Gradient(sharded, shape=(5, 7)" in repr(self.kept) and self.kept.shape == (5, 7)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.trainer.strategy.engine.open_window()
                self.kept.norm()

    with pytest.raises(StrategyError, match="a gradient of an earlier step was used"):
        make_trainer("zero2", world_size, folder).fit(Keeps(None, None), DataLoader(Rows(rank), batch_size=None))


def test_what_cannot_have_an_effect_is_refused(tmp_path):
    run_ranks(check_refusals, 2, init=False, folder=str(tmp_path))


class Counts(Module):
    def __init__(self):
        super().__init__(None, None)
        self.gathers = []

    def on_before_optimizer_step(self, optimizer):
        engine = self.trainer.strategy.engine
        before = engine.collectives.calls["all_gather"]
        read_only(self)
        read_only(self)
        self.gathers.append((engine.collectives.calls["all_gather"] - before, len(engine.buffers)))


def count_gathers(rank, world_size, folder):
    for strategy in ("zero1", "zero2", "zero3"):
        module = Counts()
        make_trainer(strategy, world_size, folder).fit(module, DataLoader(Rows(rank), batch_size=None))
        assert all(gathers == buffers for gathers, buffers in module.gathers), (strategy, module.gathers)


def test_looking_at_all_gradients_gathers_each_buffer_once(tmp_path):
    run_ranks(count_gathers, 2, init=False, folder=str(tmp_path))
