"""Models cut over tensor groups give the numbers of whole ones, with no edit to their code."""

import pytest
import torch
from harness import run_ranks
from models import TinyGPT, token_batch, token_loss
from tensor_parity import check_equal, tensor_group


def double(make):
    torch.manual_seed(0)
    return make().double()


def on_tokens(model):
    return token_loss(model, token_batch(1, 3, torch.float64))


def gpt(rank, size):
    group = tensor_group()
    for norms in ("whole", "sharded"):
        for tied in (True, False):
            check_equal(double(lambda: TinyGPT(tied=tied, heads=12)), on_tokens, group, norms=norms)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gpt_is_cut(size):
    run_ranks(gpt, size)
