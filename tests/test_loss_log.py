"""The exact loss of every step, from the start of training on, is a part of a checkpoint."""

import pytest
import torch
from harness import run_ranks
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.trainer_state import load_trainer
from shardlight.strategies.loss_log import LossLog
from test_data_position import Module, Rows, alone, losses
from test_lightning_fit import make_trainer
from torch.utils.data import DataLoader


class SometimesInf(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.returned = [*getattr(self, "returned", []), loss.item()]
        return loss * float("inf") if self.trainer.global_step == 1 else loss


def check_losses(rank, world_size, folder):
    with pytest.warns(UserWarning, match="a step was skipped"):
        trainer, module = alone(folder, DataLoader(Rows(8), 2), module=SometimesInf(), max_epochs=1)
    trainer.save_checkpoint(f"{folder}/inf")
    kept = losses(f"{folder}/inf")
    assert kept.dtype == torch.float64 and kept.shape == (4,) and kept[1].isnan()
    assert [kept[n].item() for n in (0, 2, 3)] == [module.returned[n] for n in (0, 2, 3)]

    trainer = make_trainer("zero1", 1, folder)
    trainer.validate(Module(), DataLoader(Rows(2)), ckpt_path=f"{folder}/inf", verbose=False)
    trainer.save_checkpoint(f"{folder}/validated")
    assert "losses" not in load_trainer(CheckpointReader(f"{folder}/validated"))

    class OwnLosses(Module):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["losses"] = [1.0, 2.0]

    trainer, _ = alone(folder, DataLoader(Rows(8), 2), module=OwnLosses(), max_epochs=1)
    with pytest.warns(UserWarning, match="its key 'losses' was taken in on_save_checkpoint"):
        trainer.save_checkpoint(f"{folder}/own")
    assert losses(f"{folder}/own") == [1.0, 2.0]


def test_the_loss_of_every_step_is_kept(tmp_path):
    run_ranks(check_losses, 1, init=False, folder=str(tmp_path))


def test_a_million_losses_cost_eight_bytes_each():
    log = LossLog()
    for n in range(10):
        log.add(float(n))
    before = log.tensor()
    log.add(float("nan"))
    assert before.tolist() == list(range(10)) and len(log) == 11
    other = LossLog()
    other.take_from({"losses": log.tensor()})
    assert torch.equal(other.tensor().nan_to_num(-1.0), log.tensor().nan_to_num(-1.0))
    other.take_from({})
    assert other.tensor().shape == (0,)
