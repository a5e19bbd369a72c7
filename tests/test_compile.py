"""Compiled blocks and compiled models: the numbers of the plain loop, no compilation after the first steps."""

import copy
import warnings
from functools import partial

import pytest
import torch
from harness import run_ranks
from loops import Outcome, build, check_all_plans, check_equal, group, optimizer_of, plain, plans, rows, sharded
from models import TinyGPT
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.engine.transforms.compile import compile_blocks
from shardlight.strategies.errors import StrategyError
from test_engine_uses import GPT, USES, Blocks, gpt_batch, square, tokens
from torch import nn
from torch._dynamo.utils import counters


def compiled(**options) -> BlockTransforms:
    return BlockTransforms(compile="blocks", **{"compile_backend": "aot_eager", **options})


def start() -> None:
    # Dynamo looks at `grad` of what goes into a block, and hides the warning in a way that "error" does not know.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    forget()


def forget() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Counting:
    """Losses of a training forward, after an evaluation on a short batch; how many graphs there are at each step."""

    def __init__(self, losses):
        self.losses, self.graphs = losses, []

    def __call__(self, model, batch, step, rank):
        self.graphs.append(graphs())
        with torch.no_grad():
            model.eval()
            self.losses(model, [b[:3] for b in batch] if isinstance(batch, tuple) else batch[:3], step, rank)
            model.train()
        return self.losses(model, batch, step, rank)


def check_blocks(rank, world_size, make, losses, batch, cases):
    start()
    want = plain(make, losses, world_size, steps=4, batch=batch)
    for plan, options in cases:
        forget()
        counting = Counting(losses)
        got = sharded(make, counting, plan, rank, world_size, 4, batch, transforms=compiled(**options))
        check_equal(got, want, f"{plan} {options} on {world_size} ranks")
        first, *later = counting.graphs[1:]
        assert 0 < first and later == [first, first], f"{plan} {options}: {counting.graphs}"


KINDS = ("no", "blocks", "blocks_reentrant")
CASES = {
    1: [("single", {"compile_backend": "eager", "recompute": "blocks"}), ("zero3", {"recompute": "blocks_reentrant"})],
    2: [
        ("ddp", {"compile_backend": "eager"}),
        ("zero1", {"recompute": "blocks"}),
        ("zero2", {"compile_backend": "eager", "recompute": "blocks_reentrant"}),
        ("zero3", {}),
        ("zero3", {"recompute": "blocks"}),
    ],
}


@pytest.mark.conformance("A11", "A12")
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_blocks_give_the_plain_numbers_and_are_compiled_once(world_size):
    gpt = partial(GPT, None)
    run_ranks(
        check_blocks, world_size, make=gpt, losses=tokens, batch=gpt_batch, cases=CASES[world_size], timeout_s=300
    )


@pytest.mark.long
@pytest.mark.conformance("A11", "A12")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_compiled_blocks_under_every_strategy_and_recomputation(world_size):
    cases = [
        (plan, {"compile_backend": backend, "recompute": kind})
        for plan in plans(world_size)
        for backend in ("eager", "aot_eager")
        for kind in KINDS
    ]
    run_ranks(
        check_blocks, world_size, make=partial(GPT, None), losses=tokens, batch=gpt_batch, cases=cases, timeout_s=900
    )
