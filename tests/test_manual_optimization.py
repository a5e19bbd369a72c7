"""Manual optimization: which backward synchronises does not matter, and two optimizers may take turns."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from shardlight.strategies import STRATEGIES
from test_cases_training import Scalar, batches, strategies, tokens
from test_lightning_fit import make_trainer
from torch import nn


class Manual(Scalar):
    def __init__(self, pattern):
        super().__init__(None)
        self.automatic_optimization = False
        self.pattern = pattern

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for number, sync in enumerate(self.pattern):
            loss = self.w * (number + 1) * (1 + self.trainer.global_rank) + self.w**2
            if sync:
                self.manual_backward(loss / 4)
            else:
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(loss / 4)
        optimizer.step()
        optimizer.zero_grad()


def check_manual(rank, world_size, folder):
    for strategy in strategies(world_size):
        for pattern in ((1, 0, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 1)):
            for reduce in ("micro_batch", "window"):
                module = Manual(pattern)
                trainer = make_trainer(STRATEGIES[strategy](reduce=reduce), world_size, folder)
                trainer.fit(module, batches(*[tokens(1, 0.0)] * 3))
                # Mean slope over 4 micro-batches and ranks at w: 2.5 * 1.5 + 2 w.
                w = 0.0
                for _ in range(3):
                    w -= 0.1 * (2.5 * (1 + world_size) / 2 + 2 * w)
                assert module.weight() == pytest.approx(w, abs=1e-12), f"{strategy} {pattern} {reduce}"
                calls = trainer.strategy.engine.collectives.calls["reduce_scatter"]
                expected = 3 * (4 if reduce == "micro_batch" else 1) if world_size > 1 else 0
                assert calls == expected, f"{strategy} {pattern} {reduce}"


@pytest.mark.case("C083")
def test_gradients_do_not_depend_on_which_backward_synchronises(tmp_path):
    run_ranks(check_manual, 2, init=False, folder=str(tmp_path))


class Adversarial(pl.LightningModule):
    """Two optimizers in manual optimization: one graph for both, a step between their backwards."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(2, 2), nn.Linear(2, 1)
        nn.init.ones_(self.maker.weight), nn.init.ones_(self.judge.weight)

    def configure_optimizers(self):
        return torch.optim.SGD(self.maker.parameters(), 0.1), torch.optim.SGD(self.judge.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        self.manual_backward(-self.judge(self.maker(batch)).square().mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(self.judge(self.maker(batch).detach()).square().mean())
        second.step()
        self.untoggle_optimizer(second)


def check_adversarial(rank, world_size, folder):
    x = [torch.arange(6, dtype=torch.float64).view(3, 2) / (4 + r) for r in range(world_size)]
    torch.manual_seed(0)
    want = Adversarial().double()
    for _ in range(3):
        for n, part in enumerate((want.maker, want.judge)):
            for mine in x:
                hidden = want.maker(mine) if n == 0 else want.maker(mine).detach()
                (want.judge(hidden).square().mean() * (-1, 1)[n] / world_size).backward()
            with torch.no_grad():
                for p in part.parameters():
                    p -= 0.1 * p.grad
            want.zero_grad()
    for strategy in strategies(world_size):
        torch.manual_seed(0)
        module = Adversarial()
        trainer = make_trainer(strategy, world_size, folder)
        trainer.fit(module, batches(*[x[rank]] * 3))
        with trainer.strategy.gathered(), torch.no_grad():
            for (name, p), q in zip(module.named_parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10, msg=lambda m: f"{strategy} {name}: {m}")


def test_two_optimizers_in_turn(tmp_path):
    run_ranks(check_adversarial, 2, init=False, folder=str(tmp_path))
