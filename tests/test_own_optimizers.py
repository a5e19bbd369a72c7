"""Lamb against its formula in NumPy, MuonAdamW against the two optimizers of torch that it is made of."""

import copy

import numpy as np
import pytest
import torch
from shardlight.ops.lamb import Lamb
from shardlight.ops.muon_adamw import MuonAdamW
from torch import nn
from torch.optim import AdamW, Muon


def lamb_by_the_paper(x, gradients, rates, beta1, beta2, eps, decay, adapt):
    """Algorithm 2 of You et al. 2020, in fp64."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        u = r + decay * x
        size, step = np.sqrt((x**2).sum()), np.sqrt((u**2).sum())
        x = x - lr * (size / step if adapt and size > 0 and step > 0 else 1.0) * u
    return x


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.05)]
)
def test_lamb_is_algorithm_2(dtype, tolerance):
    random = np.random.default_rng(0)
    for shape in ((5, 3), (7,), (), (0, 3), (1,)):
        for options in ({}, {"decay": 0.0, "adapt": False}, {"beta1": 0.5, "beta2": 0.0, "eps": 0.1, "decay": 0.3}):
            chosen = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "decay": 0.01, "adapt": True, **options}
            for start in (random.standard_normal(shape), np.zeros(shape)):
                gradients = [random.standard_normal(shape) for _ in range(4)]
                gradients[2] = np.zeros(shape)
                rates = [0.1, 0.05, 0.1, 0.02]
                want = lamb_by_the_paper(start, gradients, rates, **chosen)
                parameter = nn.Parameter(torch.tensor(start, dtype=dtype))
                betas, decay = (chosen["beta1"], chosen["beta2"]), chosen["decay"]
                optimizer = Lamb([parameter], 9.0, betas, chosen["eps"], decay, chosen["adapt"])
                for gradient, rate in zip(gradients, rates, strict=True):
                    optimizer.param_groups[0]["lr"] = (
                        rate if gradient is not gradients[1] else torch.tensor(rate, dtype=torch.float64)
                    )
                    parameter.grad = torch.tensor(gradient, dtype=dtype)
                    optimizer.step()
                found = parameter.detach().double().numpy()
                np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance, err_msg=f"{shape} {options}")


def test_lamb_first_step_is_the_rate_times_the_norm_of_the_weight():
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([1.0, 1.0])
    Lamb([parameter], lr=0.1, weight_decay=0.0, eps=0.0).step()
    # The update is (1, 1), of norm sqrt(2), and the weight has norm 5.
    torch.testing.assert_close(parameter.detach(), torch.tensor([3.0, 4.0]) - 0.5 / 2**0.5)


def test_lamb_says_what_it_does_not_take():
    weight = nn.Parameter(torch.ones(2))
    for options, text in (({"lr": -1}, "lr is -1"), ({"eps": -1}, "eps is -1"), ({"betas": (0.9, 1.0)}, "betas is")):
        with pytest.raises(ValueError, match=text):
            Lamb([weight], **options)
    weight.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="dense real gradients"):
        Lamb([weight]).step()
    unused = nn.Parameter(torch.ones(2))
    optimizer = Lamb([unused])
    assert optimizer.step(lambda: 3) == 3 and not optimizer.state


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s)) for s in ((4, 6), (6, 3), (5,), ())]


def set_gradients(params, step):
    g = torch.Generator().manual_seed(step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=g)


def test_muon_adamw_is_torchs_muon_and_adamw():
    ours, theirs = parameters(), parameters()
    muon_options = {"lr": 0.02, "weight_decay": 0.2, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}
    both = MuonAdamW(
        [
            {"params": ours[:2], "kind": "muon", **muon_options},
            {"params": ours[2:3], "lr": 0.1, "betas": (0.8, 0.9)},
            {"params": ours[3], "kind": "adamw"},
        ]
    )
    apart = [Muon(theirs[:2], **muon_options), AdamW(theirs[2:3], lr=0.1, betas=(0.8, 0.9)), AdamW(theirs[3:])]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (both, *apart)]
    for step in range(6):
        if step == 3:
            # Through a state dict, as any optimizer's.
            saved = copy.deepcopy(both.state_dict())
            schedules[0] = None
            both = MuonAdamW([{"params": ours[:2], "kind": "muon"}, {"params": ours[2:3]}, {"params": ours[3:]}])
            both.load_state_dict(saved)
            schedules[0] = torch.optim.lr_scheduler.StepLR(both, 2, 0.5, last_epoch=step - 1)
        for params in (ours, theirs):
            set_gradients(params, step)
        for optimizer in (both, *apart):
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), step
    rates = [g["lr"] for o in apart for g in o.param_groups]
    assert [g["lr"] for g in both.param_groups] == rates and rates[0] == 0.02 / 8


def test_muon_adamw_says_what_a_group_cannot_be():
    weight, bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    for options, text in (
        ({"params": [weight], "kind": "sgd"}, "kind is 'sgd'; choose one of muon, adamw"),
        ({"params": [weight], "kind": "muon", "betas": (0.9, 0.9)}, "betas is not an option of Muon"),
        ({"params": [weight], "momentum": 0.9}, "momentum is not an option of AdamW"),
        ({"params": [bias], "kind": "muon"}, "only supports 2D"),
        ({"params": [bias], "lr": -1.0}, "Invalid learning rate"),
    ):
        with pytest.raises(ValueError, match=text):
            MuonAdamW([options])
