"""Tensors without values have the shapes that real ones have, and values are refused by the name of their source."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from shardlight.strategies.engine.pipeline.taint import Source, Tainted, learning, running, tainted
from shardlight.strategies.errors import PipelineError
from torch import nn
from torch.utils.checkpoint import checkpoint

SOURCE = Source("'tok.weight', which is on stage 0", "tok")
CPU = torch.device("cpu")


def make(*shape, dtype=torch.float32):
    return tainted(shape, dtype, CPU, SOURCE)


ids = torch.tensor([[0, 2, 1], [1, 1, 0]])
mask = torch.tensor([[True, False, True], [False, False, True]])
linear, norm = nn.Linear(4, 6), nn.LayerNorm(4)

FUNCTIONS = {
    "embedding": lambda w: F.embedding(ids, w),
    "rows": lambda w: w[ids],
    "slice": lambda w: w[None, 1:3, ..., ::2],
    "linear": linear,
    "norm": norm,
    "tied head": lambda w: torch.ones(2, 4) @ w.T,
    "add": lambda w: w + torch.ones(3, 1, 1),
    "number": lambda w: 2 * w.half() + 1.5,
    "integer times float": lambda w: w.long() * 0.5,
    "compare": lambda w: (w > 0) & ~torch.ones(5, 4, dtype=torch.bool),
    "cat": lambda w: torch.cat([torch.zeros(2, 4), w]),
    "chunk": lambda w: w.chunk(2, -1)[1],
    "split": lambda w: torch.stack(w.unbind(0)[1:]),
    "topk": lambda w: w.topk(2).indices,
    "max": lambda w: w.max(0)[0],
    "reduce": lambda w: w.sum(),
    "attention": lambda w: F.scaled_dot_product_attention(*[w[None, None].expand(2, 3, 5, 4)] * 3, is_causal=True),
    "dropout": lambda w: F.dropout(w, 0.5),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "where": lambda w: torch.where(torch.ones(5, 4) > 0, w, -torch.inf),
    "transposed": lambda w: w.T.contiguous().view(2, -1),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach().clone(),
    "to": lambda w: w.to(device="cpu", dtype=torch.float64),
    "mask": lambda w: F.embedding(ids, w)[mask],
    "masked_fill": lambda w: w.masked_fill(torch.ones(5, 1, dtype=torch.bool), 0.0),
    "custom module": nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)),
    "rotary": lambda w: torch.cat([-w[..., 2:], w[..., :2]], -1) * torch.ones(4).cos(),
    "cross entropy": lambda w: F.cross_entropy(w, torch.tensor([0, 1, 2, 3, -100])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_look_like_real_ones(name):
    function = FUNCTIONS[name]
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, got = function(torch.randn(5, 4)), function(make(5, 4))
            again = function(make(5, 4))
        for result in (got, again):
            assert type(result) is Tainted and result.source is SOURCE
            assert result.shape == expected.shape and result.dtype == expected.dtype, name
            assert result.stride() == expected.stride() and result.device == expected.device
            assert not result.requires_grad and result.grad_fn is None


READS = {
    "item": lambda w: w.sum().item(),
    "_local_scalar_dense": lambda w: float(w.mean()),
    "bool": lambda w: bool(w.sum() > 0),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.numpy(),
    "data_ptr": lambda w: w.data_ptr(),
    "nonzero": lambda w: w.nonzero(),
    "mask as index": lambda w: w[w > 0],
    "masked_select": lambda w: w.masked_select(w > 0),
    "unique": lambda w: w.unique(),
    "equal": lambda w: torch.equal(w, w),
    "allclose": lambda w: torch.allclose(w, w),
    "format": lambda w: f"{w.mean():.2f}",
    "backward": lambda w: w.sum().backward(),
    "index": lambda w: [1, 2][w.long()[0, 0]],
    "contains": lambda w: 3 in w,
}


@pytest.mark.parametrize("name", READS)
def test_values_are_refused_by_the_name_of_their_source(name):
    with pytest.raises(PipelineError, match=r"'tok.weight', which is on stage 0.*strategy.everywhere: \[tok\]"):
        READS[name](make(5, 4))


WRITES = {
    "copy_": lambda real, w: real.copy_(w),
    "add_": lambda real, w: real.add_(w),
    "item": lambda real, w: operator.setitem(real, slice(0, 2), w[:2]),
    "view": lambda real, w: real[1:3].mul_(w[1:3]),
    "out": lambda real, w: torch.add(w, w, out=real),
    "index_add_": lambda real, w: real.index_add_(0, torch.arange(5), w),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_real_tensor_is_not_overwritten(name):
    real = torch.ones(5, 4)
    with pytest.raises(PipelineError, match=r"shape \(\d, 4\) is overwritten .*'tok.weight'"):
        WRITES[name](real, make(5, 4))
    assert torch.equal(real, torch.ones(5, 4))


def test_writing_into_a_tainted_tensor_keeps_it():
    w = make(5, 4)
    before = id(w)
    w += 1
    w.mul_(torch.ones(4)).clamp_(min=0)
    w[1:3] = torch.zeros(2, 4)
    assert id(w) == before and type(w) is Tainted
    with pytest.raises(PipelineError, match="changes the shape in place"):
        w.t_()


def test_what_needs_no_values_is_answered():
    w = make(5, 4)
    assert len(w) == 5 and w.numel() == 20 and w.dim() == 2 and w.is_floating_point() and w.element_size() == 4
    assert w.grad is None and w.is_leaf and w.requires_grad_() is w and not w.requires_grad
    w.register_hook(lambda gradient: gradient).remove()
    assert repr(w) == "Tainted(shape=(5, 4), dtype=torch.float32, source='tok.weight', which is on stage 0)" == f"{w}"
    other = copy.deepcopy(w)
    assert type(other) is Tainted and other is not w and other.source is SOURCE


@pytest.mark.parametrize(
    "name", ["zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "rand_like", "new_tensor"]
)
def test_new_tensors_of_its_kind_are_real(name):
    """Masks are made so."""
    calls = {"full_like": (2.0,), "new_zeros": ((5, 4),), "new_full": ((5, 4), 2.0), "new_tensor": ([1.0],)}
    for like in (torch.zeros(5, 4, dtype=torch.float64), make(5, 4, dtype=torch.float64)):
        function = getattr(like, name) if name.startswith("new_") else lambda *args: getattr(torch, name)(like, *args)
        made = function(*calls.get(name, ()))
        assert type(made) is torch.Tensor and made.dtype is torch.float64 and made.is_contiguous()
        assert made.shape == ((1,) if name == "new_tensor" else (5, 4)) and made.isfinite().all()


def test_real_parameters_get_no_gradient_from_it():
    real = nn.Linear(4, 4)
    out = real(make(5, 4)) + real(torch.ones(5, 4))
    assert type(out) is Tainted and not out.requires_grad
    (real(torch.ones(5, 4))).sum().backward()
    assert real.weight.grad is not None


def test_random_numbers_are_drawn_as_with_values():
    states = []
    for w in (torch.randn(5, 4), make(5, 4)):
        torch.manual_seed(0)
        F.dropout(w, 0.5)
        w.clone().normal_()
        torch.bernoulli(w.clone().fill_(0.5))
        torch.randn_like(w)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_value_takes_the_place_of_the_tensor():
    w, value = make(5, 4), torch.randn(5, 4, requires_grad=True)
    held = {"w": [w]}
    w.value = value * 1
    assert torch.equal(held["w"][0] + 1, value + 1) and (w @ torch.ones(4)).requires_grad
    assert torch.cat([w, w]).shape == (10, 4) and f"{w.sum():.3f}" == f"{value.sum():.3f}"
    w += 1
    assert torch.equal(w, value + 1)
    w.sum().backward()
    assert torch.equal(value.grad, torch.ones(5, 4))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_function_that_would_lose_the_gradient_of_a_value_is_refused():
    w = make(5, 4)
    w.value = torch.randn(5, 4, requires_grad=True) * 1
    for argument in (w, w + 0):
        with torch.no_grad():
            assert argument.mean().isfinite()
        if argument is w:
            with pytest.raises(PipelineError, match="torch.autograd.Function"):
                checkpoint(torch.sin, argument, use_reentrant=True)
        else:
            assert checkpoint(torch.sin, argument, use_reentrant=True).requires_grad


def test_learning_reads_zeros_and_names_the_block():
    block = Source("block 'blocks.0', which is on stage 0")
    w = make(5, 4)
    with learning(block):
        assert w.sum().item() == 0.0 and w.tolist() == torch.zeros(5, 4).tolist() and not (w > 0).any()
        assert w.nonzero().shape == (0, 2) and w.unique().shape == (1,) and w[w > 0].shape == (0,)
        fresh = torch.zeros(5, 4)
        fresh.index_add_(0, torch.arange(5), w)
        assert fresh.source is block and (w + 1).source is block
    assert type(torch.zeros(3)) is torch.Tensor and (w + 1).source is SOURCE


def test_tensors_know_the_run_that_they_are_made_in():
    w, first = make(5, 4), object()
    with running(first):
        made = w + 1
    assert w.run is None and made.run is first and (made * 2).run is first


def test_custom_functions_run_without_values():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            return gradient, gradient

    weight = nn.Parameter(torch.ones(4))
    assert type(Double.apply(make(5, 4), weight)) is Tainted
