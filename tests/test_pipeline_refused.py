"""What a stage of a pipeline holds, and what cannot be cut: refused by the name of where it comes from."""

import copy
import gc
import weakref

import pytest
import torch
from shardlight.strategies.engine.pipeline.chain import find_chain, stage_parameters
from shardlight.strategies.engine.pipeline.cut import Cut
from shardlight.strategies.engine.pipeline.taint import Tainted
from shardlight.strategies.errors import PipelineError
from staged import (
    GPT,
    VOCAB,
    WIDTH,
    Block,
    Staged,
    batches,
    build,
    check_equal_to_uncut,
    even,
    refused,
    step,
)
from torch import nn

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


def test_a_penalty_on_all_weights_misses_none_in_silence():
    def penalised(model, idx):
        return step(model, idx) + sum(p.square().sum() for p in model.parameters())

    refused(build(), "the step returned depends on 'pos', which is on stage 0", penalised)
    names = [n for n, _ in build().named_parameters()]

    def counting(model, idx):
        assert {n for n, _ in model.named_parameters()} == set(names)
        assert next(model.blocks[0].parameters()).device == idx.device
        return step(model, idx) + model.head.weight.square().sum()

    whole = build()
    staged = Staged(build(), 2, counting)
    staged.train(batches(1))
    assert sum(len(list(cut.model.parameters())) for cut in staged.cuts) == len(list(whole.parameters()))


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
