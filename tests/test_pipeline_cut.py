"""A model cut into stages computes what the uncut one does, and what cannot be cut is refused by name."""

import copy
import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from shardlight.strategies.engine.deferred.tensors import deferred_init, is_deferred, materialise
from shardlight.strategies.engine.pipeline.chain import find_chain, stage_parameters
from shardlight.strategies.engine.pipeline.cut import Cut
from shardlight.strategies.engine.pipeline.taint import Tainted
from shardlight.strategies.engine.transforms.recompute import recompute
from shardlight.strategies.errors import PipelineError
from staged import Staged, check_equal_to_uncut, even
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def test_batches_of_changing_length():
    staged = check_equal_to_uncut(build(), step, [*batches(1), *batches(1, 7), *batches(1, 3)], 2)
    assert all(c.chain.name == "blocks" for c in staged.cuts)


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


# What a stage holds.


def test_names_are_those_of_the_bare_model():
    model = build(tied=True)
    whole = set(model.state_dict())
    staged = Staged(model, 3, step)
    states = [set(m.state_dict()) for m in staged.models]
    assert set.union(*states) == whole and states[0] & states[1] == set()
    assert states[0] & states[2] == {"tok.weight", "head.weight"}
    assert {"tok.weight", "pos"} <= states[0] and {"norm.weight", "norm.bias"} <= states[2]
    for model, cut, state in zip(staged.models, staged.cuts, states, strict=True):
        assert {n for n, _ in model.named_parameters(remove_duplicate=False)} == state
        assert set(cut.dropped) == whole - state
    assert staged.cuts[1].dropped["tok.weight"] == ((VOCAB, WIDTH), torch.float64)
    assert isinstance(staged.models[1].tok.weight, Tainted) and not isinstance(staged.models[0].tok.weight, Tainted)


def test_dropped_parameters_are_freed():
    model = build()
    gone = weakref.ref(model.blocks[3].up.weight)
    chain = find_chain(model)
    cut = Cut(model, chain, even(4, 2), [0], stage_parameters(model, chain, even(4, 2))[0])
    gc.collect()
    assert gone() is None
    cut.undo()
    assert not hasattr(model.head, "weight")
    assert model.blocks[0](torch.ones(1, 2, WIDTH).double()).shape == (1, 2, WIDTH)


def test_weights_that_a_module_lists_are_dropped_too():
    class Recurrent(GPT):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, idx):
            x = self.embed(idx)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(self.rnn(x)[0]))

    staged = check_equal_to_uncut(build(Recurrent), step, batches(), 2)
    assert all(isinstance(w, Tainted) for w in staged.models[0].rnn._flat_weights)


def test_the_largest_list_is_the_chain():
    model = build()
    model.few = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
    chain = find_chain(model)
    assert chain.name == "blocks" and chain.names == [f"blocks.{i}" for i in range(4)]
    assert find_chain(model, "few").names == ["few.0", "few.1"]
    with pytest.raises(PipelineError, match=r"strategy.blocks: 'block' .* mean 'blocks'\?"):
        find_chain(model, "block")
    model.decoder = copy.deepcopy(model.blocks)
    with pytest.raises(PipelineError, match=r"'blocks' \(4 blocks\), 'decoder' \(4 blocks\).*strategy.blocks: blocks"):
        find_chain(model)
    with pytest.raises(PipelineError, match="no list of like blocks"):
        find_chain(nn.Linear(2, 2))


def test_unknown_names_and_ranges_are_refused():
    model = build()
    chain = find_chain(model)
    with pytest.raises(PipelineError, match=r"'tik'\. Did you mean 'tok'\?"):
        stage_parameters(model, chain, even(4, 2), ["tik"])
    for ranges in ([range(0, 2)], [range(0, 4), range(4, 4)], [range(0, 3), range(2, 4)]):
        with pytest.raises(PipelineError, match="do not fit the 4 blocks of 'blocks'"):
            stage_parameters(model, chain, ranges)


# What is refused, by name.


class X0(GPT):
    class block(Block):
        def forward(self, x, x0):
            return super().forward(x) + 0.1 * x0

    def forward(self, idx):
        x = x0 = self.embed(idx)
        for block in self.blocks:
            x = block(x, x0)
        return self.head(self.norm(x))


def refused(model, match, step=step, stages=2, **options):
    with pytest.raises(PipelineError, match=match) as caught:
        Staged(model, stages, step, **options).train(batches(1))
    return caught.value


def test_x0_residuals_are_refused_and_work_with_the_embedding_everywhere():
    refused(build(X0), r"argument 'x0' of block 'blocks.2'.*'tok.weight', which is on stage 0.*everywhere: \[tok\]")
    refused(build(X0), r"'pos', which is on stage 0.*everywhere: \[pos\]", everywhere=["tok"])
    check_equal_to_uncut(build(X0), step, batches(), 4, everywhere=["tok", "pos"])


def test_unet_skips_are_refused():
    class UNet(X0):
        def forward(self, idx):
            x, skips = self.embed(idx), []
            for i, block in enumerate(self.blocks):
                half = len(self.blocks) // 2
                x = block(x, x if i < half else skips.pop())
                if i < half:
                    skips.append(x)
            return self.head(self.norm(x))

    error = refused(build(UNet), "argument 'x0' of block 'blocks.3'")
    assert "block 'blocks.0', which is on stage 0" in str(error)


def test_losses_over_all_blocks_are_refused():
    class Routed(GPT):
        """Each block leaves a part of the loss behind, as mixtures of experts do."""

        class block(Block):
            def forward(self, x):
                x = super().forward(x)
                self.balance = x.mean()
                return x

    def with_balance(model, idx):
        return step(model, idx) + sum(block.balance for block in model.blocks)

    refused(build(Routed), "the step returned depends on block 'blocks.0', which is on stage 0", with_balance)

    def with_log(model, idx):
        loss = step(model, idx)
        staged.cuts[1].check({"balance": model.blocks[1].balance}, "the logged value 'balance'")
        return loss

    staged = Staged(build(Routed), 2, with_log)
    with pytest.raises(PipelineError, match="the logged value 'balance' depends on block 'blocks.1'"):
        staged.train(batches(1))


def test_hooks_in_foreign_blocks_see_taint_each_time():
    model = build()
    seen = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, args, output: seen.append(output.mean()))
    calls = 0

    def collecting(model, idx):
        nonlocal calls
        calls += 1
        seen.clear()
        loss = step(model, idx)
        return loss + sum(seen) if calls > 4 else loss

    staged = Staged(model, 2, collecting)
    staged.train(batches(2))
    with pytest.raises(PipelineError, match="block 'blocks.0'"):
        staged.train(batches(1))


def test_a_loss_from_dropped_parameters_is_refused():
    def tied(model, idx):
        return step(model, idx) + model.tok.weight.pow(2).sum()

    refused(build(), "the step returned depends on 'tok.weight', which is on stage 0", tied)

    def read(model, idx):
        model.tok(idx).mean().item()
        return step(model, idx)

    refused(build(), "'item' asks for the values of .*'tok.weight', which is on stage 0", read)


class Order(GPT):
    order = (0, 1, 2, 3)

    def forward(self, idx):
        x = self.embed(idx)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    "order, match",
    [
        ((0, 2, 1, 3), "block 'blocks.2' is called out of order: 'blocks.1' is next"),
        ((0, 0, 1, 2, 3), "block 'blocks.0' is called out of order: 'blocks.1' is next"),
        ((0, 1, 2), "without calling block 'blocks.3'"),
        ((0, 1, 2, 3, 3), "block 'blocks.3' is called out of order: all have run"),
    ],
)
def test_blocks_out_of_order_are_refused(order, match):
    model = build(Order)
    model.order = order
    refused(model, match)


def test_a_step_that_catches_everything_is_refused():
    def bare(model, idx):
        try:
            return step(model, idx)
        except:  # noqa: E722
            return torch.zeros(())

    refused(build(), "bare 'except:'", bare)


def test_blocks_run_in_steps_only():
    staged = Staged(build(), 2, step)
    with pytest.raises(PipelineError, match="'blocks.0' is called outside of training_step"):
        staged.models[0](batches()[0])


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
