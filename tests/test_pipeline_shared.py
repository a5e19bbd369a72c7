"""What several stages of a pipeline hold: weights tied between blocks, and state of modules that run more than once."""

import torch
from harness import run_ranks
from shardlight.strategies import Pipeline, Single, read_state_dict
from test_cases_pipeline import Layers, fitted, rows


class Crossed(Layers):
    """Two tied weights of one shape; the second stage meets them in the other order than the first."""

    def __init__(self):
        super().__init__(layers=4)
        self.layers[3].weight = self.layers[0].weight
        self.layers[2].weight = self.layers[1].weight

    def validation_step(self, batch, batch_idx):
        self.loss(batch)


def crossed_body(rank, world, folder, zero=1):
    module = Crossed()
    strategy = Pipeline(stages=world, micro_batches=4, zero=zero) if world > 1 else Single()
    kwargs = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    fit = fitted(module, strategy, world, folder, [rows(n) for n in range(4)], [rows(9)], **kwargs)
    fit.save_checkpoint(f"{folder}/saved{world}")
    return module.norms


def test_weights_tied_between_blocks_of_stages_get_their_own_gradients(tmp_path):
    settings = {"timeout_s": 60, "init": False, "folder": str(tmp_path)}
    (expected,) = run_ranks(crossed_body, 1, **settings)
    for norms in run_ranks(crossed_body, 2, **settings):
        torch.testing.assert_close(norms, expected, rtol=1e-10, atol=1e-13)
    state, there = (read_state_dict(tmp_path / f"saved{world}") for world in (2, 1))
    assert state.keys() == there.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, there[name], rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
