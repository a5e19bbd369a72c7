"""What users do with models that are cut: dropout, precision, recomputation, hooks, losses of their own; what is sent."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from models import TinyGPT, token_batch
from shardlight.framework import TrainingModule
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.engine.transforms.tensor.plan import tensor_plan
from shardlight.strategies.engine.transforms.tensor.sharded import Sharded
from shardlight.strategies.errors import StrategyError, TensorError
from tensor_parity import check_equal, cut, gradients, part, same_gradients, tensor_group
from test_tensor_models import VOCAB, WIDTH, Derived, Grouped, Model, double, on_tokens, sequential
from torch import nn
from torch.autograd import Function


def gpt(**options):
    return double(Model, Derived, sequential, **options)


# --- recomputation, precision, dropout


def recomputed(rank, size):
    group = tensor_group()
    for norms in ("whole", "sharded"):
        for kind in ("plain", "reentrant"):
            check_equal(gpt(recompute=kind), on_tokens, group, norms=norms)


def test_blocks_are_recomputed():
    run_ranks(recomputed, 2)


def autocast_step(model):
    with torch.autocast("cpu", torch.bfloat16):
        return on_tokens(model)


def mixed(rank, size):
    group = tensor_group()
    for norms in ("whole", "sharded"):
        model = gpt().float()
        # As accurate as one process is, against fp32.
        exact = copy.deepcopy(model)
        on_tokens(exact).backward()
        alone = copy.deepcopy(model)
        autocast_step(alone).backward()
        mine, plan = cut(model, group, norms=norms)
        autocast_step(mine).backward()
        assert not group.gathered
        for name, gradient in gradients(mine).items():
            assert gradient.dtype == torch.float32
            expected = part(plan, name, gradients(exact)[name], rank)
            allowed = (gradients(alone)[name] - gradients(exact)[name]).abs().max().item()
            assert (gradient - expected).abs().max() <= 3 * allowed, name


def test_autocast():
    run_ranks(mixed, 2)


class KeptMask(nn.Dropout):
    """Keeps what it has left."""

    def forward(self, x):
        out = super().forward(x)
        self.mask = (out != 0).detach()
        return out


def dropped():
    """Dropout on what is whole, and on what is divided."""
    model = TinyGPT(heads=12)
    for block in model.blocks:
        block.out, block.down = nn.Sequential(block.out, KeptMask(0.5)), nn.Sequential(KeptMask(0.5), block.down)
    return model


def masks(rank, size):
    group = tensor_group()
    model, plan = cut(double(dropped), group)
    assert plan.layers["blocks.0.down.1"].how == "row"
    torch.manual_seed(7)
    on_tokens(model).backward()
    after = torch.rand(1)
    assert (group.collectives.gather_small(after, "generator") == after).all()
    divided = [block.down[0].mask.local for block in model.blocks]
    for block in model.blocks:
        assert type(block.out[1].mask) is torch.Tensor
        rows = group.collectives.gather_small(block.out[1].mask.flatten().to(torch.uint8), "masks")
        assert (rows == rows[0]).all()
        rows = group.collectives.gather_small(block.down[0].mask.local.flatten().to(torch.uint8), "masks")
        assert not (rows[1:] == rows[0]).all(1).any()
        assert 0.3 < (rows != 0).float().mean() < 0.7
    torch.manual_seed(7)
    on_tokens(model)
    assert all(torch.equal(a, b.down[0].mask.local) for a, b in zip(divided, model.blocks, strict=True))


def test_dropout_has_one_mask_where_tensors_are_whole_and_different_ones_where_they_are_divided():
    run_ranks(masks, 3)


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def repeated(rank, size):
    """Dropout that is recomputed draws the same: the gradient is that of the forward that was run."""
    group = tensor_group()
    found = []
    for recompute in (False, True):
        model, _ = cut(double(lambda: nn.Sequential(Attended(), Attended())), group)
        torch.manual_seed(1)
        x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(2)
        for block in model:
            y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        y.square().sum().backward()
        found.append(gradients(model) | {"x": x.grad})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=0, atol=1e-12)


def test_dropout_is_recomputed_alike():
    run_ranks(repeated, 2)


# --- modules of PyTorch


def encoders(rank, size):
    group = tensor_group()
    for options in ({}, {"norm_first": True, "activation": "gelu"}, {"batch_first": False}):
        settings = {
            "d_model": WIDTH,
            "nhead": 12,
            "dim_feedforward": 30,
            "dropout": 0.0,
            "batch_first": True,
            **options,
        }
        model = double(
            lambda s=settings: nn.TransformerEncoder(nn.TransformerEncoderLayer(**s), 2, enable_nested_tensor=False)
        )
        x = torch.randn(3, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        causal = nn.Transformer.generate_square_subsequent_mask(
            5 if settings["batch_first"] else 3, dtype=torch.float64
        )
        padding = torch.zeros(x.shape[:2] if settings["batch_first"] else (5, 3), dtype=torch.bool)
        padding[0, -1] = True
        for mask, padded in ((None, None), (causal, None), (None, padding), (causal.isinf(), padding)):
            for norms in ("whole", "sharded"):
                check_equal(
                    model, lambda m, mask=mask, padded=padded: m(x, mask, padded).square().sum(), group, norms=norms
                )
        mine, _ = cut(model, group)
        with torch.no_grad():
            torch.testing.assert_close(mine.eval()(x), model.eval()(x))
    attention = double(nn.MultiheadAttention, WIDTH, 12, batch_first=True)
    y = torch.randn(3, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for average in (True, False):

        def step(m, average=average):
            out, weights = m(x, y, y, average_attn_weights=average)
            return out.square().sum() + weights.pow(3).sum()

        check_equal(attention, step, group)
    for keys, values in ((18, WIDTH), (WIDTH, 15), (18, 15)):
        other = double(nn.MultiheadAttention, WIDTH, 12, kdim=keys, vdim=values, batch_first=True)
        plan = check_equal(other, lambda m, k=keys, v=values: m(x, y[..., :k], y[..., :v])[0].square().sum(), group)
        assert list(plan.layers) == [""] and not plan.whole


@pytest.mark.parametrize("size", [2, 3])
def test_modules_of_pytorch(size):
    run_ranks(encoders, size)


# --- what a user's code does


class Squared(Function):
    """A function that the table of operations does not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.sum(-1, keepdim=True) + (gradient * x).sum(-1, keepdim=True)


def losses(rank, size):
    group = tensor_group()
    model = double(TinyGPT, heads=12)
    idx, labels = token_batch(1, 3, torch.float64)
    labels[0, :4] = -100
    seen = []

    def with_hook(m):
        logits = m(idx)
        logits.register_hook(lambda g: seen.append(tuple(g.shape)))
        return F.cross_entropy(logits.transpose(1, 2), labels)

    divided = {
        "mean": lambda m: F.cross_entropy(m(idx).view(-1, VOCAB), labels.view(-1)),
        "sum of floats": lambda m: F.cross_entropy(
            m(idx)[:, 2:].flatten(0, 1) / 0.7, labels[:, 2:].flatten(), reduction="sum"
        ),
        "smoothed": lambda m: F.cross_entropy(m(idx).flatten(0, 1), labels.flatten(), label_smoothing=0.1),
        "each": lambda m: F.cross_entropy(m(idx).flatten(0, 1), labels.flatten(), reduction="none").square().sum(),
        "shifted": lambda m: nn.CrossEntropyLoss(ignore_index=3)(
            m(idx)[..., :-1, :].reshape(-1, VOCAB), labels[:, 1:].abs().clamp(max=16).reshape(-1)
        ),
        "one word": lambda m: F.cross_entropy(m(idx)[0, 0], labels[1, 1]),
        "hook": with_hook,
        "token_loss": lambda m: TrainingModule().token_loss(m(idx), labels, unit="bits"),
        "masked": lambda m: F.cross_entropy(m(idx)[labels != -100], labels[labels != -100]),
    }
    for step in divided.values():
        check_equal(model, step, group)
    assert seen == [(3, VOCAB, 10)] * 2 or seen == [(3, 10, VOCAB)] * 2
    whole = {
        "log_softmax": (lambda m: F.log_softmax(m(idx), -1)[..., 0].sum(), {"log_softmax"}),
        "weighted": (
            lambda m: F.cross_entropy(m(idx).flatten(0, 1), labels.flatten(), weight=torch.arange(17.0).double()),
            {"cross_entropy"},
        ),
        "penalty": (
            lambda m: F.cross_entropy(m(idx).flatten(0, 1), labels.flatten()) + m(idx).logsumexp(-1).square().mean(),
            {"logsumexp"},
        ),
        "own function": (lambda m: Squared.apply(m(idx)).square().sum(), set()),
        "weights": (lambda m: m.head.weight.square().sum() + m.blocks[0].up.weight.abs().mean() + m(idx).sum(), set()),
    }
    for step, gathers in whole.values():
        check_equal(model, step, group, 1e-9, gathers=gathers)


@pytest.mark.parametrize("size", [2, 3])
def test_losses(size):
    run_ranks(losses, size)


def evaluated(rank, size):
    """Without gradients a parameter is whole inside forwards, and this rank's part outside, whatever a forward ended by."""

    class Left(BaseException):
        pass

    group = tensor_group()
    whole = gpt()
    mine, plan = cut(whole, group)
    idx, _ = token_batch(1, 3, torch.float64)
    handle = mine.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(Left()))
    with pytest.raises(Left):
        mine(idx)
    handle.remove()
    with torch.no_grad():
        assert type(mine.tokens.weight * 1.0) is torch.Tensor
        out = mine(idx)
        assert type(out) is Sharded
        torch.testing.assert_close(out + 0.0 * torch.ones(VOCAB), whole(idx), rtol=0, atol=1e-10)
        mine.tokens.weight.mul_(2.0)
    torch.testing.assert_close(
        mine.tokens.weight.detach(), part(plan, "tokens.weight", 2.0 * whole.tokens.weight, rank)
    )


def test_evaluation():
    run_ranks(evaluated, 2)


def faults(rank, size):
    model, _ = cut(double(TinyGPT, heads=12), tensor_group())
    idx, labels = token_batch(1, 3, torch.float64)
    labels[1, 1] = VOCAB
    with pytest.raises(IndexError, match="Target 17 is out of bounds"):
        F.cross_entropy(model(idx).flatten(0, 1), labels.flatten())
    idx[1, 1] = VOCAB
    with pytest.raises(IndexError, match="out of range in self"):
        model(idx)


def test_words_that_are_not_there_are_errors():
    run_ranks(faults, 2)


def in_place(rank, size):
    group = tensor_group()

    class Changed(Derived):
        def forward(self, x):
            y = self.c_attn(x)
            y *= 2.0
            y.add_(1.0).clamp_(min=-3.0)
            y[..., 3] = 0.5
            q, k, v = y.split(WIDTH, dim=2)
            return self.c_proj(F.relu(q + k, inplace=True) * v)

    check_equal(double(Model, Changed, sequential), on_tokens, group, gathers={"__setitem__"})


def test_in_place_operations():
    run_ranks(in_place, 2)


# --- what is sent


def sent(rank, size):
    group = tensor_group()
    batch, length, layers = 3, 12, 2
    idx = torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))
    for norms in ("whole", "sharded"):
        model, _ = cut(
            double(TinyGPT, width=24, heads=12, layers=layers, sequence=length, tied=False), group, norms=norms
        )
        hidden, calls = batch * length * 24 * 8, group.collectives.calls
        calls.clear()
        before = group.collectives.bytes_sent
        loss = F.cross_entropy(model(idx).flatten(0, 1), idx.flatten())
        loss.backward()
        total = group.collectives.bytes_sent - before
        share = (size - 1) / size
        # Per block 2 sums in forward and 2 in backward; the embedding's in forward, the head's in backward.
        sums = 4 * layers + 2
        numbers = 3 * batch * length * 8 * (size - 1)
        expected = 2 * share * hidden * sums + numbers
        if norms == "sharded":
            # Norms' gradients, and those of positions.
            norm_params = (2 * layers + 1) * 2
            biases = 2 * layers
            expected += 2 * share * 24 * 8 * (norm_params + biases) + share * length * 24 * 8
            # The inputs of queries and of up are divided: these gradients are of parts, their sums are the same.
        assert abs(total - expected) <= 0.01 * expected, (norms, total, expected, dict(calls))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_sent_are_those_of_the_formula(size):
    run_ranks(sent, size)


# --- plans


def grouped(heads):
    with torch.device("meta"):
        return Model(lambda: Grouped(heads), sequential)


def test_sizes_that_do_not_divide_are_refused_with_those_that_work():
    model = grouped(4)
    with pytest.raises(TensorError, match=r"12 heads \(4 of keys\), which do not divide by size 5") as caught:
        tensor_plan(model, 5)
    assert "Sizes that work: 1, 2, 3, 4, 6, 12." in str(caught.value)
    assert str(caught.value).count("blocks.0.attention") == 1


def test_plan_is_overridden_by_name():
    model = grouped(4)
    plan = tensor_plan(model, 2, {"blocks.0.*": "whole", "*.mlp.0": "row", "tokens": "whole"})
    assert not any(name.startswith("blocks.0.") for name in plan.layers)
    assert plan.layers["blocks.1.mlp.0"].how == "row" and "tokens" not in plan.layers
    assert plan.whole["blocks.0.attention.q_proj"] == plan.whole["tokens"] == "plan"
    with pytest.raises(
        TensorError, match=re.escape("no module is named 'block.*'. Layers: blocks.*.attention.k_proj, ")
    ):
        tensor_plan(model, 2, {"block.*": "whole"})
    with pytest.raises(TensorError, match="'norm' is a LayerNorm, which cannot be cut as 'column'"):
        tensor_plan(model, 2, {"norm": "column"})
    with pytest.raises(TensorError, match="a layer is column, row, vocab, whole"):
        tensor_plan(model, 2, {"norm": "colum"})


def overridden(rank, size):
    group = tensor_group()
    for overrides, gathers in (
        ({"*.o_proj": "whole"}, {"linear"}),
        ({"*.q_proj": "whole", "*.mlp.2": "whole"}, {"linear", "scaled_dot_product_attention"}),
        ({"*.mlp.0": "row", "*.mlp.2": "column"}, {"layer_norm"}),
        ({"blocks.0": "whole", "tokens": "whole"}, set()),
    ):
        model = double(Model, lambda: Grouped(12), sequential)
        mine, plan = cut(model, group, overrides=overrides)
        loss, expected = on_tokens(mine), on_tokens(model)
        loss.backward()
        model.zero_grad()
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-10
        same_gradients(gradients(mine), gradients(model), plan, group, 1e-9)
        assert set(group.gathered) <= gathers, group.gathered
        group.gathered.clear()


def test_any_plan_is_right():
    run_ranks(overridden, 3)


def test_table_says_what_is_whole_and_why():
    lines = tensor_plan(grouped(1), 4).table().splitlines()
    assert lines[0].split() == ["layer", "cut", "why"]
    assert any(
        line.split()[:3] == ["blocks.*.attention.k_proj", "x2", "shared"] and "1 heads of keys for 4" in line
        for line in lines
    )
    assert any(line.split() == ["blocks.*.norm1", "x2", "whole", "no", "matrix"] for line in lines)


# --- without values


def deferred(rank, size):
    group = tensor_group()
    whole = double(TinyGPT, heads=12)
    with torch.device("meta"):
        empty = TinyGPT(heads=12)
    mine, plan = cut(empty, group)
    assert all(p.is_meta for p in mine.parameters())
    assert {n: p.shape for n, p in mine.named_parameters()} == {
        n: part(plan, n, p, rank).shape for n, p in whole.named_parameters()
    }
    assert mine.head.weight is mine.tokens.weight


def test_models_without_values_are_cut():
    run_ranks(deferred, 2)


# --- compilation


def compiled(rank, size):
    group = tensor_group()
    with pytest.raises(TensorError, match="is compiled by torch.compile"):
        cut(torch.compile(gpt(), backend="eager"), group)
    mine, _ = cut(gpt(), group)
    with pytest.raises(StrategyError, match="compile='blocks': the model's matrices are cut"):
        BlockTransforms(compile="blocks").apply(mine, list(mine.blocks), nullcontext, None)


def test_compilation_is_refused():
    run_ranks(compiled, 2)


def shipped():
    model = nn.ModuleDict({"alpha": nn.Linear(6, 6), "beta": nn.Linear(6, 6), "gamma": nn.Linear(6, 6)})
    model._tp_plan = {"alpha": "colwise", "beta": "rowwise", "gamma": "moe_tp_experts"}
    return model


def test_the_plan_that_a_model_ships_is_taken():
    for prefix, model in (("", shipped()), ("inner.", nn.ModuleDict({"inner": shipped()}))):
        plan = tensor_plan(model, 2)
        assert {n: (x.how, x.why) for n, x in plan.layers.items()} == {
            f"{prefix}alpha": ("column", "the model's tp_plan"),
            f"{prefix}beta": ("row", "the model's tp_plan"),
        }
        assert list(plan.whole) == [f"{prefix}gamma"]
