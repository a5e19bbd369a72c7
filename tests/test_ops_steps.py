"""Optimizer steps of compiled code against torch.optim, their PyTorch references and fp64."""

from functools import partial

import pytest
import torch
from devices import VERSIONS, use_version
from shardlight.ops.adagrad import adagrad_step
from shardlight.ops.adam import adam_step
from shardlight.ops.lion import Lion, lion_step
from shardlight.ops.rmsprop import rmsprop_step
from shardlight.ops.sgd import sgd_step
from shardlight.ops.steps import Batch
from torch import library
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

LENGTHS = [*range(70), 127, 255, 257, 1023, 1024, 1025, 2049]
STEPS = 4


def rates(step):
    return 1e-2 / (1 + step)


def adam_like(kind, **options):
    given = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **options}
    amsgrad = given.pop("amsgrad", False)
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    ours = partial(adam_step, **given, decoupled=kind is AdamW)
    return partial(kind, **given, amsgrad=amsgrad), ours, names


def sgd_like(**options):
    given = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, **options}
    return partial(SGD, **given), partial(sgd_step, **given), ("momentum_buffer",) if given["momentum"] else ()


def rmsprop_like(centered=False, **options):
    given = {"alpha": 0.9, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, **options}
    names = ("square_avg", "momentum_buffer" if given["momentum"] else None, "grad_avg" if centered else None)
    return partial(RMSprop, **given, centered=centered), partial(rmsprop_step, **given), names


def adagrad_like(**options):
    given = {"lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10, **options}
    return partial(Adagrad, **given), partial(adagrad_step, **given), ("sum",)


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, line by line."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p))
                update = torch.sign(b1 * m + (1 - b1) * p.grad)
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                m.copy_(b2 * m + (1 - b2) * p.grad)


def lion_like(**options):
    given = {"betas": (0.9, 0.99), "weight_decay": 0.0, **options}
    return partial(PlainLion, **given), partial(lion_step, **given), ("momentum",)


CASES = {
    "adamw": adam_like(AdamW),
    "adamw amsgrad": adam_like(AdamW, amsgrad=True),
    "adam": adam_like(Adam, weight_decay=0.0),
    "adam decay": adam_like(Adam, betas=(0.3, 0.5), eps=1e-4),
    "adam amsgrad": adam_like(Adam, amsgrad=True),
    "sgd": sgd_like(),
    "sgd decay": sgd_like(weight_decay=0.1),
    "sgd momentum": sgd_like(momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd nesterov": sgd_like(momentum=0.9, nesterov=True),
    "adagrad": adagrad_like(),
    "adagrad decay": adagrad_like(lr_decay=0.1, weight_decay=0.1, eps=1e-5),
    "rmsprop": rmsprop_like(),
    "rmsprop centered": rmsprop_like(centered=True, weight_decay=0.1, eps=1e-2),
    "rmsprop momentum": rmsprop_like(momentum=0.9),
    "rmsprop centered momentum": rmsprop_like(alpha=0.4, centered=True, momentum=0.9, eps=1e-2),
    "lion": lion_like(),
    "lion decay": lion_like(betas=(0.95, 0.98), weight_decay=0.1),
}


def tensors(dtype, seed, device="cpu", lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device) for n in lengths]


def given(dtype, device, lengths=LENGTHS):
    made = [tensors(dtype, seed, device, lengths) for seed in range(STEPS + 1)]
    return made[0], made[1:]


def run_torch(kind, params, gradients, maximize=False):
    params = [torch.nn.Parameter(p.clone()) for p in params]
    options = {"maximize": True} if maximize else {}
    optimizer = kind(params, lr=1.0, **options)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rates(step)
        for p, g in zip(params, gradients[step], strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.data for p in params]


def run_ours(ours, names, params, gradients, state_dtype=None, scale=1.0, clip=1.0, copies=None):
    params = [p.clone() for p in params]
    states = tuple(None if n is None else [torch.zeros_like(p, dtype=state_dtype) for p in params] for n in names)
    for step in range(STEPS):
        numbers = [step + 1.0] * len(params)
        grads = gradients[step]
        batch = Batch(params=params, grads=grads, states=states, numbers=numbers, scale=scale, clip=clip, copies=copies)
        ours(batch, lr=rates(step))
    return params, states


def errors(found, true):
    return torch.cat([(f.double() - t).abs() for f, t in zip(found, true, strict=True)]).cpu()


@pytest.fixture(params=VERSIONS)
def device(request, monkeypatch):
    return use_version(request.param, monkeypatch)


@pytest.fixture(params=VERSIONS[::2])
def native_device(request, monkeypatch):
    return use_version(request.param, monkeypatch)


@pytest.mark.case("C029")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_torchs_for_every_option_and_length(name, dtype, device):
    kind, ours, names = CASES[name]
    params, gradients = given(dtype, device)
    wide = [[g.double() for g in gs] for gs in gradients]
    true = run_torch(kind, [p.double() for p in params], wide)
    found, _ = run_ours(ours, names, params, gradients)
    of_torch = run_torch(kind, params, gradients)
    assert [f.dtype for f in found] == [dtype] * len(LENGTHS)
    of_ours, of_theirs = errors(found, true), errors(of_torch, true).nan_to_num(nan=torch.inf)  # fp16 has no 1e-8
    rounding = torch.finfo(dtype).eps * torch.cat(true).abs().cpu()
    # For Lion a sign that rounding turns is a whole step apart, with torch's operations as with ours.
    turned = 2 * rates(0) * (of_theirs > rates(0)) if "lion" in name else 0
    if dtype != torch.float64:
        assert (of_ours <= 2 * of_theirs.max() + rounding + turned).all()
        assert (
            of_ours.mean() <= (1.05 if device == "cpu" else 2.0) * of_theirs.mean()
        )  # CUDA's have fused multiply-adds
    if dtype in (torch.float32, torch.float64):
        assert errors(found, of_torch).max() <= (1e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("name", ["adamw amsgrad", "sgd nesterov", "adagrad", "rmsprop centered momentum"])
def test_uphill_is_a_negative_scale(name, device):
    kind, ours, names = CASES[name]
    params, gradients = given(torch.float32, device)
    found, _ = run_ours(ours, names, params, gradients, scale=-1.0)
    assert errors(found, run_torch(kind, params, gradients, maximize=True)).max() <= 1e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_threads_and_cuts_change_no_bit(name, threads, native_device, monkeypatch):
    _, ours, names = CASES[name]
    (whole,), gradients = given(torch.float32, native_device, [200_001])
    (want,), _ = run_ours(ours, names, [whole], gradients)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cuts = [1, 70_000, 7, 130_000 - 8, 1]  # which leaves most of them unaligned
    found, _ = run_ours(ours, names, list(whole.split(cuts)), [list(g.split(cuts)) for (g,) in gradients])
    assert torch.equal(torch.cat(found), want)


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "rmsprop", "lion"])
def test_scale_clip_and_copy_are_what_passes_of_their_own_would_do(name, device):
    _, ours, names = CASES[name]
    params, gradients = given(torch.float32, device)
    by_hand = [[(g * 0.37).mul_(0.61) for g in gs] for gs in gradients]
    want, kept = run_ours(ours, names, params, by_hand)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        copies = [torch.zeros_like(p, dtype=dtype) for p in params]
        copies[5] = None
        found, states = run_ours(ours, names, params, gradients, scale=0.37, clip=0.61, copies=copies)
        assert torch.equal(torch.cat(found), torch.cat(want))
        assert all(torch.equal(torch.cat(a), torch.cat(b)) for a, b in zip(states, kept, strict=True) if a is not None)
        assert all(torch.equal(c, p.to(dtype)) for c, p in zip(copies, found, strict=True) if c is not None)


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adam amsgrad", "sgd momentum", "adagrad", "rmsprop momentum", "lion"])
def test_mixed_dtypes_give_what_the_reference_gives(name, states, grads, native_device, monkeypatch):
    _, ours, names = CASES[name]
    params = tensors(torch.float32, 0, native_device)
    _, gradients = given(grads, native_device)
    results = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr("shardlight.ops.registry.Op.native", lambda op, device: False)
        copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
        found, kept = run_ours(ours, names, params, gradients, state_dtype=states, copies=copies)
        assert all(t.dtype == states for ts in kept if ts is not None for t in ts)
        assert all(torch.equal(c, p.bfloat16()) for c, p in zip(copies, found, strict=True))
        results.append(torch.cat(found).double())
    # Where a rounding of a state falls the other way, the steps differ by its size.
    loose = 1e-6 if states == torch.float32 else 0.1 * rates(0)
    apart = (results[0] - results[1]).abs()
    assert apart.max() <= (2.5 * rates(0) if name == "lion" else loose) and apart.mean() <= loose / 2


def test_inf_and_nan_stay_what_they_are(device):
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, 1e15, 1.0] * 3, device=device)
    ones = torch.ones(24, device=device)
    for name, (kind, ours, names) in CASES.items():
        gradients = [[special.roll(s)] for s in range(STEPS)]
        (want,) = run_torch(kind, [ones], gradients)
        (found,), _ = run_ours(ours, names, [ones], gradients)
        if "lion" in name:
            # PyTorch's sign of NaN is 0: here one step shows what came.
            (want,), _ = run_ours(ours, names, [ones], [[special.nan_to_num(nan=1.0)]] * STEPS)
            want[special.isnan()] = torch.nan
            (found,), _ = run_ours(ours, names, [ones], [[special]] * STEPS)
        assert torch.equal(found.isnan(), want.isnan()), name
        assert torch.allclose(found, want, rtol=1e-5, atol=1e-6, equal_nan=True), name


def test_other_layouts_and_complex_numbers(device):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 8, generator=generator).to(device)
    makers = {
        "transposed": lambda t: t.clone().t(),
        "strided": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
        "complex": lambda t: torch.view_as_complex(t.view(6, 4, 2).clone()),
        "complex, transposed": lambda t: torch.view_as_complex(t.view(6, 4, 2).clone()).t(),
    }
    for name, (kind, ours, names) in CASES.items():
        for layout, make in makers.items():
            if "complex" in layout and "lion" in name:
                continue  # PyTorch has no sign of a complex number; ours takes that of both parts
            gradients = [[make(wide.roll(s))] for s in range(1, STEPS + 1)]
            (want,) = run_torch(kind, [make(wide)], gradients)
            kept = [make(wide)]
            (found,), _ = run_ours(ours, names, kept, gradients)
            assert torch.allclose(found, want, atol=1e-6), (name, layout)


def test_a_step_is_a_change_that_autograd_sees(device):
    for _, ours, names in CASES.values():
        weight = torch.nn.Parameter(torch.ones(5, device=device))
        loss = weight.square().sum()
        states = tuple(None if n is None else [torch.ones(5, device=device)] for n in names)
        ours(Batch(params=[weight], grads=[torch.ones(5, device=device)], states=states, numbers=[2.0]), lr=0.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


OPERATORS = {
    "adam_step": (([0.5], [1.0], [0.0], [0.0], [], [0.0]), (0.1, 0.9, 0.99, 1e-8, 0.1, True)),
    "sgd_step": (([0.5], [1.0], [0.0], []), (0.1, 0.9, 0.0, 0.1, False)),
    "adagrad_step": (([0.5], [1.0], [0.0], []), (0.1, 0.0, 0.1, 1e-10)),
    "rmsprop_step": (([0.5], [1.0], [0.0], [], [], []), (0.1, 0.9, 1e-8, 0.1, 0.0)),
    "lion_step": (([0.5], [1.0], [0.0], []), (0.1, 0.9, 0.99, 0.1)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_steps_are_operators_of_pytorch(name, device):
    lists, options = OPERATORS[name]
    operator = getattr(torch.ops.shardlight, name).default

    def arguments():
        return [[torch.full((5,), v, device=device) for v in values] for values in lists]

    plain = arguments()
    library.opcheck(operator, (*plain, [1.0], *options))
    plain, compiled = arguments(), arguments()
    operator(*plain, [1.0], *options)
    torch.compile(lambda lists: operator(*lists, [1.0], *options), backend="aot_eager", fullgraph=True)(compiled)
    assert not torch.equal(plain[0][0], torch.full_like(plain[0][0], 0.5))
    assert all(torch.equal(a, b) for p, c in zip(plain, compiled, strict=True) for a, b in zip(p, c, strict=True))


def test_lion_is_an_optimizer_as_those_of_torch():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([param], lr=0.1, weight_decay=0.5)
    param.grad = torch.tensor([2.0, -2.0, 0.0])
    assert optimizer.step(lambda: 7) == 7
    assert torch.allclose(param.data, torch.tensor([0.85, 1.05, 0.95]))
    other = Lion([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    (state,) = other.state.values()
    assert torch.allclose(state["momentum"], torch.tensor([0.02, -0.02, 0.0])) and other.param_groups[0]["lr"] == 0.1
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.5)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="must be"):
            Lion([param], **options)
