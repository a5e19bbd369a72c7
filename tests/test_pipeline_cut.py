"""A model cut into stages computes what the uncut one does, and what cannot be cut is refused by name."""

import copy
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from shardlight.strategies.engine.deferred.tensors import deferred_init, is_deferred, materialise
from shardlight.strategies.engine.pipeline.placeholders import Foreign
from shardlight.strategies.engine.pipeline.taint import Tainted
from shardlight.strategies.engine.transforms.compile import compile_blocks, is_compiled
from shardlight.strategies.engine.transforms.recompute import recompute
from shardlight.strategies.errors import PipelineError
from staged import (
    GPT,
    WIDTH,
    Block,
    Staged,
    batches,
    build,
    check_equal_to_uncut,
    refused,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt(stages, schedule, tied):
    check_equal_to_uncut(build(tied=tied), step, batches(), stages, schedule)


class Between(GPT):
    """Code between the blocks, before and behind each."""

    def around(self, block, x, idx):
        return block(x * 0.9) * 0.5 + torch.arange(x.shape[1])[:, None] * 0.1


class Residual(GPT):
    """The residual is outside of the blocks: what a stage receives is used twice."""

    def around(self, block, x, idx):
        return x + block(x)


class InPlace(GPT):
    """The loop writes into what a stage receives, behind the block."""

    class block(Block):
        def forward(self, x):
            return super().forward(x + 0)

    def around(self, block, x, idx):
        x += block(x)
        return x


class WritingBlock(Block):
    """Writes into its input."""

    def forward(self, x):
        x += super().forward(x + 0)
        return x.mul_(0.5)


class Writing(GPT):
    block = WritingBlock


@pytest.mark.parametrize("kind", [Between, Residual, InPlace, Writing])
@pytest.mark.parametrize("stages", [2, 4])
def test_code_between_blocks(kind, stages):
    check_equal_to_uncut(build(kind), step, batches(), stages)


@dataclass
class State:
    hidden: torch.Tensor
    number: int
    nothing: None = None


class RichBlock(Block):
    """Extras as arguments and keywords; a tuple as output."""

    def forward(self, x, mask, number, *, tables=None, scale=1.0, nothing=None):
        assert nothing is None and not mask.is_floating_point()
        cos, sin = tables
        return super().forward(x * cos + sin * scale + mask[..., None] * number), number + 1, None, mask


class Rich(GPT):
    block = RichBlock

    def forward(self, idx):
        x, number, mask = self.embed(idx), 1, idx > 2
        angles = torch.arange(idx.shape[1], dtype=torch.float64)[:, None] * 0.1
        for block in self.blocks:
            x, number, nothing, mask = block(x, mask, number, tables=(angles.cos(), angles.sin()), nothing=None)
            assert nothing is None
        assert number == len(self.blocks) + 1
        return self.head(self.norm(x))


class StateBlock(Block):
    def forward(self, state=None):
        return State(super().forward(state.hidden), state.number + 1)


class Stateful(GPT):
    """A dataclass goes in and out, as a keyword."""

    block = StateBlock

    def forward(self, idx):
        state = State(self.embed(idx), 0)
        for block in self.blocks:
            state = block(state=state)
        assert state.number == len(self.blocks)
        return self.head(self.norm(state.hidden))


class KeywordBlock(Block):
    def forward(self, mask=None, x=None, other=None):
        return super().forward(mask) * other[..., None]


class Keywords(GPT):
    """Keywords alone: the first of the signature is the hidden state, in whatever order they come."""

    block = KeywordBlock

    def around(self, block, x, idx):
        return block(other=idx.double(), mask=x)


class SequentialGPT(GPT):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def forward(self, idx):
        return self.head(self.norm(self.blocks(self.embed(idx))))


@pytest.mark.parametrize("kind", [Rich, Stateful, Keywords, SequentialGPT])
def test_what_blocks_take_and_return(kind):
    check_equal_to_uncut(build(kind), step, batches(), 3)


def test_frozen_parts_need_no_gradient():
    model = build()
    for part in (model.tok, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    model.pos.requires_grad_(False)
    staged = check_equal_to_uncut(model, step, batches(), 4)
    _, edges = staged.forward(batches()[0])
    assert [hidden.requires_grad for hidden, _ in edges] == [False, False, True]
    model.blocks[3].requires_grad_(False)
    check_equal_to_uncut(model, step, batches(), 4)


def test_a_rank_with_two_virtual_stages():
    staged = check_equal_to_uncut(build(Between), step, batches(), 4, ranks=2)
    assert {n.split(".")[1] for n, _ in staged.models[0].named_parameters() if n.startswith("blocks")} == {"0", "2"}
    assert staged.cuts[0].mine == (0, 2)


class Halving(GPT):
    """Blocks that return another shape than they are given."""

    class block(Block):
        def forward(self, x):
            return super().forward(x)[:, ::2]

    def forward(self, idx):
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x).repeat_interleave(2, 1)
        return self.head(self.norm(x))[:, : idx.shape[1]]


@pytest.mark.parametrize("kind, learnt", [(GPT, [2, 2]), (Rich, [2, 2]), (Halving, [5, 3])])
def test_batches_of_changing_length(kind, learnt, monkeypatch):
    """That a block returns what looks like its input is learnt of two lengths."""
    calls = []
    learn = Foreign._learn
    monkeypatch.setattr(Foreign, "_learn", lambda self, *args: calls.append(self) or learn(self, *args))
    lengths = [batches(1, length)[0] for length in (5, 7, 3, 6, 4, 5, 3)]
    staged = check_equal_to_uncut(build(kind), step, lengths, 2)
    assert [calls.count(foreign) for foreign in staged.cuts[1]._foreign] == [*learnt, 0, 0]


class Dropped(GPT):
    """Random numbers before the blocks, in them, and behind them."""

    class block(Block):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, self.training)

    def embed(self, idx):
        x = F.dropout(self.tok(idx) + self.pos[:, : idx.shape[1]], 0.5, self.training)
        self.noise = torch.rand(idx.shape[1], 1)
        return x

    def around(self, block, x, idx):
        return block(x) + self.noise


def test_stages_draw_different_masks_in_blocks_and_the_same_before():
    model = build(Dropped, layers=2).train()
    staged = Staged(model, 2, step)
    found = []
    for seeds in ((1, 2), (1, 2), (1, 3)):
        # As on two ranks that start a step with one state of the generator.
        torch.manual_seed(5)
        state = torch.get_rng_state()
        out = staged.cuts[0].run(0, lambda: step(staged.models[0], batches()[0]), seed=seeds[0])
        torch.set_rng_state(state)
        loss = staged.cuts[1].run(1, lambda: step(staged.models[1], batches()[0]), out.hidden.detach(), seed=seeds[1])
        assert torch.equal(staged.models[0].noise, staged.models[1].noise)
        found.append((out.hidden, loss))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][0], found[2][0]) and not torch.equal(found[0][1], found[2][1])


class Recomputed(GPT):
    def around(self, block, x, idx):
        return checkpoint(block, x, use_reentrant=False)


class RecomputedFurther(Residual):
    """What is recomputed begins before the block and ends behind it."""

    def around(self, block, x, idx):
        return checkpoint(
            lambda x: super(RecomputedFurther, self).around(block, self.norm(x), idx), x, use_reentrant=False
        )


class RecomputedPairs(GPT):
    """What is recomputed goes over the edge of a stage."""

    def forward(self, idx):
        x = self.embed(idx)
        for i in range(0, len(self.blocks), 2):
            x = checkpoint(lambda x, i=i: self.blocks[i + 1](self.blocks[i](x)), x, use_reentrant=False)
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", [Recomputed, RecomputedFurther, RecomputedPairs])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_recomputation_by_the_users_code(kind, schedule):
    """`gpipe`: backward is of another micro-batch than the last forward."""
    model = build(kind)
    if kind is RecomputedFurther:
        model.norm.requires_grad_(False)
        everywhere = ("norm",)
    else:
        everywhere = ()
    check_equal_to_uncut(model, step, batches(3), 4, schedule, everywhere=everywhere)
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert top is None  # leaving the step from inside a checkpoint leaves no hooks behind


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_by_the_engine(reentrant):
    staged = Staged(build(Residual), 2, step)
    for cut in staged.cuts:
        recompute(cut.model, cut.chain.blocks, reentrant=reentrant)
    plain = Staged(build(Residual), 2, step)
    assert staged.train(batches(), "gpipe") == plain.train(batches(), "gpipe")
    expected = plain.gradients()
    assert all(torch.allclose(g, expected[n], rtol=1e-12) for n, g in staged.gradients().items())


def test_dropout_is_the_same_when_it_is_recomputed():
    class Both(Dropped):
        def around(self, block, x, idx):
            return checkpoint(block, x, use_reentrant=False) + self.noise

    gradients = []
    for kind in (Dropped, Both):
        staged = Staged(build(kind).train(), 2, step)
        torch.manual_seed(7)
        loss, edges = staged.forward(batches()[0], seeds=(1, 2))
        staged.backward(loss, edges)
        gradients.append(staged.gradients())
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_reentrant_checkpoint_around_blocks_is_refused():
    class Reentrant(GPT):
        def around(self, block, x, idx):
            return checkpoint(block, x, use_reentrant=True)

    with pytest.raises(PipelineError, match="use_reentrant=False"):
        Staged(build(Reentrant), 2, step).train(batches(1))


def test_received_tensors_are_not_kept():
    staged = Staged(build(Recomputed), 2, step)
    loss, edges = staged.forward(batches()[0])
    kept = weakref.ref(edges[0][1])
    staged.backward(loss, edges)
    del loss, edges
    assert kept() is None


def test_autocast():
    torch.manual_seed(0)
    model = GPT()

    def autocast_step(model, idx):
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, idx)

    check_equal_to_uncut(model, autocast_step, batches(), 2, tolerance=1e-6)


def test_deferred_construction():
    def deferred():
        torch.manual_seed(0)
        with deferred_init():
            return GPT().double()

    whole = build()
    staged = Staged(deferred, 2, step)
    assert all(is_deferred(p) for m in staged.models for p in m.parameters())
    for model in staged.models:
        materialise(model)
        for name, p in model.named_parameters():
            assert torch.equal(p, whole.get_parameter(name)), name
    expected = step(whole, batches()[0])
    assert torch.allclose(staged.forward(batches()[0])[0], expected, rtol=1e-12)


# A loss over the whole batch.


@pytest.mark.parametrize("kind", [GPT, Rich])
def test_the_tail_runs_once_for_all_micro_batches(kind):
    model, parts = build(kind), batches(2)
    whole = copy.deepcopy(model)
    expected = step(whole, torch.cat(parts))
    expected.backward()
    staged = Staged(model, 2, step)
    last, edges, ends = staged.cuts[1], [], []
    for part in parts:
        out = staged.cuts[0].run(0, lambda: step(staged.models[0], part))
        received = out.hidden.detach().requires_grad_()
        end = last.run_blocks(1, lambda: step(staged.models[1], part), received)
        ends.append((end.hidden, end.hidden.detach().requires_grad_()))
        edges.append((out.hidden, received))
    loss = last.run_tail(lambda: step(staged.models[1], torch.cat(parts)), torch.cat([h for _, h in ends]))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for hidden, received in [*ends, *edges]:
        hidden.backward(received.grad)
    for name, gradient in staged.gradients().items():
        assert torch.allclose(gradient, whole.get_parameter(name).grad, rtol=1e-11, atol=1e-13), name


# What is around the blocks.


def test_hooks_of_the_engine_see_what_a_block_is_given_on_its_stage_alone():
    staged = Staged(build(), 4, step, ranks=2)
    seen = []

    def before(module, args, kwargs):
        assert not isinstance(args[0], Tainted)
        seen.append(("before", staged.cuts[0].chain.blocks.index(module)))

    def after(module, args, output):
        seen.append(("after", staged.cuts[0].chain.blocks.index(module)))

    before.__module__ = after.__module__ = "shardlight.strategies.engine.weights"
    for block in staged.cuts[0].chain.blocks:
        block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        block.register_forward_hook(after, always_call=True)
    staged.train(batches())
    assert seen == [(when, block) for _ in batches() for block in (0, 2) for when in ("before", "after")]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_are_compiled_after_the_cut():
    staged = Staged(build(Between), 4, step, ranks=2)
    assert not any(is_compiled(m) for m in staged.models)
    plain = check_equal_to_uncut(build(Between), step, batches(), 4, ranks=2).gradients()
    for cut in staged.cuts:
        compile_blocks(cut.chain.blocks, backend="eager")
    staged.train(batches())
    got = staged.gradients()
    assert all(torch.allclose(got[n], plain[n], rtol=1e-12) for n in plain)


def test_a_block_that_reads_its_values_is_met_without_them():
    class Reading(GPT):
        """As a mixture of experts: which rows go where is known from values alone."""

        class block(Block):
            def forward(self, x):
                flat, out = x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], WIDTH, dtype=x.dtype)
                large = flat.mean(-1) > 0
                for choice in large.unique().tolist():
                    rows = torch.where(large == choice)[0]
                    out.index_add_(0, rows, super().forward(flat[rows]) * (1.0 + choice))
                assert flat.isfinite().numel() == flat.numel()
                return out.view_as(x) + x * float(large.any())

    check_equal_to_uncut(build(Reading), step, batches(), 4)


def test_a_block_that_cannot_run_without_values_is_named():
    class Failing(GPT):
        class block(Block):
            def forward(self, x):
                if not x.abs().sum() > 0:
                    raise ValueError("all zero")
                return super().forward(x)

    refused(build(Failing), "block 'blocks.0', which is on stage 0, cannot run on tensors without.*all zero")


def test_buffers_of_foreign_blocks_are_left_alone():
    class Normed(GPT):
        class block(Block):
            def __init__(self):
                super().__init__()
                self.batch_norm = nn.BatchNorm1d(WIDTH)

            def forward(self, x):
                return super().forward(self.batch_norm(x.mT).mT)

    staged = check_equal_to_uncut(build(Normed), step, batches(), 2)
    norms = [[b.batch_norm for b in m.blocks] for m in staged.models]
    assert [n.num_batches_tracked.item() for n in norms[0]] == [2, 2, 0, 0]
    assert [n.running_mean.abs().sum().item() > 0 for n in norms[1]] == [False, False, True, True]


def test_evaluation_without_gradients():
    model = build(Residual)
    staged = Staged(model, 3, lambda model, idx: {"logits": model(idx), "size": idx.shape})
    with torch.no_grad():
        for batch in (*batches(1), *batches(1, 7)):
            out, _ = staged.forward(batch)
            assert torch.allclose(out["logits"], model(batch), rtol=1e-12) and out["size"] == batch.shape


def test_the_embedding_draws_as_many_numbers_as_where_it_is():
    staged, states = Staged(build(Dropped).train(), 2, step), []
    for model in staged.models:
        torch.manual_seed(0)
        model.embed(batches()[0])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
