"""All stages of a pipeline in one process: a copy of the model for each, cut, with hidden states passed by hand.

And the model that is cut.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from shardlight.strategies.engine.pipeline.chain import find_chain, stage_parameters
from shardlight.strategies.engine.pipeline.cut import Cut, Outgoing
from shardlight.strategies.errors import PipelineError
from torch import Tensor, nn


def even(blocks: int, stages: int) -> list[range]:
    edges = [blocks * s // stages for s in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


class Staged:
    """Args:
    model: a module, or a function that makes it for a stage.
    stages: virtual stages; rank r of `ranks` runs the stages s with s % ranks == r.
    step: (module, batch) -> loss.
    """

    def __init__(self, model, stages: int, step: Callable, ranks: int | None = None, everywhere=(), ranges=None):
        ranks = ranks or stages
        self.step, self.stages, self.ranks = step, stages, ranks
        self.models: list[nn.Module] = []
        self.cuts: list[Cut] = []
        for rank in range(ranks):
            mine = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
            chain = find_chain(mine)
            self.ranges = ranges or even(len(chain.blocks), stages)
            held = stage_parameters(mine, chain, self.ranges, everywhere)
            stages_of = range(rank, stages, ranks)
            self.cuts.append(Cut(mine, chain, self.ranges, stages_of, set().union(*(held[s] for s in stages_of))))
            self.models.append(mine)

    def forward(self, batch, seeds: Sequence[int] | None = None, around=None):
        """Returns the last stage's result, and (outgoing, received by the next stage) of each edge."""
        received, edges, result = None, [], None
        for stage in range(self.stages):
            rank = stage % self.ranks
            seed = None if seeds is None else seeds[stage]
            result = self.cuts[rank].run(stage, partial(self.step, self.models[rank], batch), received, seed=seed)
            if stage < self.stages - 1:
                assert isinstance(result, Outgoing)
                received = result.hidden.detach().requires_grad_(result.hidden.requires_grad)
                edges.append((result.hidden, received))
        return result, edges

    @staticmethod
    def backward(loss: Tensor, edges) -> None:
        if loss.requires_grad:
            loss.backward()
        for hidden, received in reversed(edges):
            if received.grad is not None:
                torch.autograd.backward(hidden, received.grad)

    def train(self, batches, schedule: str = "1f1b") -> list[float]:
        """Runs micro-batches; `gpipe`: all forwards first, backwards in the other order."""
        if schedule == "1f1b":
            losses = []
            for batch in batches:
                loss, edges = self.forward(batch)
                self.backward(loss, edges)
                losses.append(loss.item())
            return losses
        done = [self.forward(batch) for batch in batches]
        for loss, edges in reversed(done):
            self.backward(loss, edges)
        return [loss.item() for loss, _ in done]

    def gradients(self) -> dict[str, Tensor]:
        """Sums over the ranks, as tied parameters need it."""
        found: dict[str, Tensor] = {}
        for model in self.models:
            for name, p in model.named_parameters():
                if p.grad is not None:
                    found[name] = found[name] + p.grad if name in found else p.grad
        return found


def check_equal_to_uncut(model, step, batches, stages, schedule="1f1b", tolerance=1e-12, **options) -> Staged:
    """Asserts losses and gradients of the uncut model on the same batches."""
    staged = Staged(model, stages, step, **options)
    whole = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    expected = []
    for batch in batches:
        loss = step(whole, batch)
        loss.backward()
        expected.append(loss.item())
    got = staged.train(batches, schedule)
    assert torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=tolerance, atol=tolerance), (got, expected)
    gradients = staged.gradients()
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
    for name, gradient in wanted.items():
        worst = (gradients[name] - gradient).abs().max().item()
        assert worst <= tolerance * max(1.0, gradient.abs().max().item()), (name, worst)
    return staged


WIDTH, VOCAB, LENGTH, BATCH = 8, 11, 5, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """Learned positions as a bare parameter; `around` is what the user's code does in its loop."""

    block = Block

    def __init__(self, layers=4, tied=False):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Parameter(torch.randn(1, 2 * LENGTH, WIDTH))
        self.blocks = nn.ModuleList([self.block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, idx):
        x = self.embed(idx)
        for block in self.blocks:
            x = self.around(block, x, idx)
        return self.head(self.norm(x))

    def embed(self, idx):
        return F.dropout(self.tok(idx) + self.pos[:, : idx.shape[1]], 0.0, self.training)

    def around(self, block, x, idx):
        return block(x)


def build(kind=GPT, **options):
    torch.manual_seed(0)
    return kind(**options).double()


def batches(count=2, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (BATCH, length), generator=generator) for _ in range(count)]


def step(model, idx):
    logits = model(idx)
    return F.cross_entropy(logits.flatten(0, 1).double(), idx.flatten())


def refused(model, match, step=step, stages=2, **options):
    with pytest.raises(PipelineError, match=match) as caught:
        Staged(model, stages, step, **options).train(batches(1))
    return caught.value
