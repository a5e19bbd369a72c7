"""Misuse of weights and gradients is an error that names what went wrong, never a wrong number."""

import copy

import pytest
import torch
from harness import run_ranks
from loops import build, check_released, group, optimizer_of, plans, rows
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.window import StepResult
from shardlight.strategies.errors import CollectiveError, GradientError, StrategyError
from test_engine_uses import Blocks
from torch import nn


def start(plan, rank, world, make=Blocks, **options):
    model = build(make)
    opt = optimizer_of(model)
    engine = Engine(model, PLANS[plan], group(world), **options)
    engine.take_optimizer(opt)
    return model, opt, engine


def on_two_ranks(body, **kwargs):
    run_ranks(body, 2, timeout_s=30, **kwargs)


class Caching(nn.Module):
    """Keeps a view of its weight; `saved` also lets autograd save the weight itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7))
        self.keep = self.cached = None

    def forward(self, x):
        self.cached = self.weight.detach()[2:5] if self.keep == "detached" else self.weight[2:5]
        if self.keep is None:
            self.cached = None
        return x * self.weight * self.weight + self.weight.sin()


class CachingPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Caching(), Caching()])

    def forward(self, x):
        return self.parts[1](self.parts[0](x))


def check_kept_view(rank, world_size):
    for keep in ("view", "detached"):
        model, _, engine = start("zero3", rank, world_size, CachingPair)
        model.parts[1].keep = keep
        x = rows(0, rank).requires_grad_()
        with pytest.raises(StrategyError, match=r"a view of a weight of unit 'parts\.1' is still held .*clone\(\)"):
            with engine.forward():
                model(x)
        assert model.parts[1].cached.isfinite().all()  # what the user holds was not freed under the view


def test_view_kept_in_an_attribute_names_the_unit():
    on_two_ranks(check_kept_view)


def check_late(rank, world_size):
    for plan in plans(world_size):
        for reduce in ("micro_batch", "window"):
            model, opt, engine = start(plan, rank, world_size, reduce=reduce)
            with engine.forward():
                first, late = model(rows(0, rank)).sum(), model(rows(1, rank), (0,)).sum()
            engine.backward(first)
            engine.close_window()
            engine.backward(late)
            engine.close_window()
            whole = build(Blocks)
            for r in range(world_size):
                ((whole(rows(0, r)).sum() + whole(rows(1, r), (0,)).sum()) / world_size).backward()
            for (name, parameter), p in zip(model.named_parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(engine.gradient(parameter), p.grad, msg=lambda m: f"{plan} {name}: {m}")
            assert engine.step(opt) is StepResult.STEPPED
            with pytest.raises(GradientError, match=r"arrived by a backward that the strategy does not know of"):
                with engine.forward():
                    model(rows(0, rank)).sum().backward()


def test_backward_after_final_gradients_adds_to_them_and_a_raw_one_is_an_error():
    on_two_ranks(check_late)


def check_released_parameter(rank, world_size):
    model, _, engine = start("zero3", rank, world_size)
    weight, bias = model.blocks[1][0].weight, model.shift
    for parameter, shape in ((weight, (9, 7)), (bias, (5,))):
        assert (
            tuple(parameter.shape) == shape == tuple(parameter.size())
            and parameter.numel() == torch.Size(shape).numel()
        )
        assert parameter.dtype == torch.float64 and parameter.dim() == parameter.ndim == len(shape)
        assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None and len(parameter) == shape[0]
        assert isinstance(parameter, nn.Parameter) and "sharded" in repr(parameter)
        assert torch.zeros_like(parameter).shape == shape and parameter.device.type == "cpu"
        with torch._C.DisableTorchFunctionSubclass():
            assert parameter.detach().shape == shape and parameter.detach().isnan().all()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Blocks().parameters())
    x = rows(0, rank)
    uses = [
        lambda: model.blocks[1](x),
        lambda: torch.ones(5) + bias,
        lambda: weight.sum(),
        lambda: weight[0],
        lambda: bias[0].item(),
        lambda: weight.clone(),
        lambda: bias.data,
        lambda: bias.tolist(),
        lambda: weight.copy_(weight),
    ]
    for use in uses:
        with pytest.raises(
            StrategyError, match=r"'(shift|blocks\.1\.0\.(weight|bias))' is sharded \(zero3\).*gathered"
        ):
            use()
        check_released(engine)
        with engine.gathered(), torch.no_grad():
            use()
        check_released(engine)
    with pytest.raises(StrategyError, match="is sharded"):
        copy.deepcopy(model)
    with engine.gathered(model.blocks[1]):
        assert weight.isfinite().all()
        with pytest.raises(StrategyError, match="'shift' is sharded"):
            bias.sum()


@pytest.mark.case("C038")
def test_released_parameter_answers_shape_and_refuses_values():
    on_two_ranks(check_released_parameter)


def check_in_place(rank, world_size):
    for plan in plans(world_size):
        model, opt, engine = start(plan, rank, world_size)
        x = rows(0, rank)
        with engine.forward():
            hidden = model.blocks[0](x)
            loss = model.head(hidden).square().sum()
        hidden.detach().mul_(2)
        with pytest.raises((RuntimeError, GradientError), match=r"in.?place"):
            engine.backward(loss)
        model, opt, engine = start(plan, rank, world_size)
        with engine.forward():
            early, loss = model(x).square().sum(), model(x).sum()
        engine.backward(loss)
        assert engine.step(opt) is StepResult.STEPPED
        with pytest.raises((RuntimeError, GradientError), match=r"in.?place"):
            engine.backward(early)


def test_change_between_forward_and_backward_is_detected():
    on_two_ranks(check_in_place)


def check_two_optimizers(rank, world_size):
    """A step of one optimizer leaves graphs over the other's parameters as they are."""
    for plan in plans(world_size):
        model = build(Blocks)
        first, second = (torch.optim.SGD(model.blocks[n].parameters(), 0.1) for n in (0, 1))
        engine = Engine(model, PLANS[plan], group(world_size))
        engine.take_optimizer(first), engine.take_optimizer(second)
        want = build(Blocks)
        for ranks_x in [rows(0, r) for r in range(world_size)]:
            (want.blocks[0](ranks_x).square().mean() / world_size).backward()
            (want.blocks[1](ranks_x).square().mean() / world_size).backward()
        x = rows(0, rank)
        with engine.forward():
            losses = [model.blocks[n](x).square().mean() for n in (0, 1)]
        for loss, optimizer in zip(losses, (first, second), strict=True):
            engine.backward(loss)
            engine.step(optimizer)
        with engine.gathered(), torch.no_grad():
            for n in (0, 1):
                for got, p in zip(model.blocks[n].parameters(), want.blocks[n].parameters(), strict=True):
                    torch.testing.assert_close(got, p - 0.1 * p.grad, msg=lambda m: f"{plan}: {m}")


def test_step_of_one_optimizer_does_not_touch_the_others_graph():
    on_two_ranks(check_two_optimizers)


def check_lost_change(rank, world_size):
    model, _, engine = start("zero3", rank, world_size)
    changes = (
        lambda p: p.mul_(2),
        lambda p: p.copy_(torch.ones(5)),
        lambda p: setattr(p, "data", torch.ones(5, dtype=p.dtype)),
    )
    for change in changes:
        with pytest.raises(StrategyError, match=r"'shift' was changed inside a step .*gathered"):
            with engine.forward():
                model(rows(0, rank))
                with torch.no_grad():
                    change(model.shift)
        with engine.gathered():
            assert model.shift.tolist() == pytest.approx(torch.linspace(0, 1, 5).tolist())
    with engine.gathered(), torch.no_grad():
        model.shift.mul_(2)
    with engine.gathered():
        assert model.shift.tolist() == pytest.approx(torch.linspace(0, 2, 5).tolist())


def test_change_of_a_gathered_weight_in_a_step_is_not_lost_in_silence():
    on_two_ranks(check_lost_change)


def check_step_in_between(rank, world_size):
    """Weights gathered before a step are not used after it; a step inside `gathered` would be lost."""
    for plan in plans(world_size):
        model, opt, engine = start(plan, rank, world_size)
        want = build(Blocks)
        opt_want = optimizer_of(want)
        for x in [rows(0, r) for r in range(world_size)]:
            (want(x).square().mean() / world_size).backward()
        opt_want.step()
        with engine.forward():  # as in manual optimization: everything inside one training_step
            engine.backward(model(rows(0, rank)).square().mean())
            with torch.no_grad():
                model(rows(1, rank))
            engine.step(opt)
            with torch.no_grad():
                torch.testing.assert_close(model(rows(1, rank)), want(rows(1, rank)), msg=lambda m: f"{plan}: {m}")
            loss = model(rows(1, rank)).square().mean()
        engine.backward(loss)
        if plan == "zero3":
            with pytest.raises(StrategyError, match=r"an optimizer step inside .*gathered"), engine.gathered():
                engine.step(opt)


def test_step_between_two_forwards():
    on_two_ranks(check_step_in_between)


def check_foreign_gradient(rank, world_size):
    for plan in plans(world_size):
        model, _, engine = start(plan, rank, world_size)
        with engine.forward():
            loss = model(rows(0, rank)).sum()
        engine.backward(loss)
        model.shift.grad = torch.ones(5, dtype=torch.float64)
        with pytest.raises(GradientError, match=r"'shift'\.grad was set outside of backward"):
            engine.close_window()

        model, _, engine = start(plan, rank, world_size)
        with engine.forward():
            weighted, bare = model(rows(0, rank)).sum(), model(rows(1, rank)).sum()
        engine.backward(weighted, weight=3.0)
        with pytest.raises(GradientError, match="one accumulation window holds weighted and plain losses"):
            engine.backward(bare)


def test_gradient_set_by_hand_names_the_parameter():
    on_two_ranks(check_foreign_gradient)


def check_points(rank, world_size):
    for plan in plans(world_size):
        _, _, engine = start(plan, rank, world_size)
        with pytest.raises(CollectiveError, match=r"different points: rank 0 is at 'gathered'; rank 1 is at 'end of "):
            if rank == 0:
                with engine.gathered():
                    pass
            else:
                engine.close_window()


def test_ranks_at_different_points_are_named():
    on_two_ranks(check_points)


def spoil_after_clipping(rank, world_size):
    for plan in plans(world_size):
        model, opt, engine = start(plan, rank, world_size)
        before = [engine.owned_piece(p)[1].clone() for p in engine.table.parameters]
        for spoilt in (False, True):
            with engine.forward():
                loss = model(rows(0, rank)).square().mean()
            engine.backward(loss)
            engine.clip(opt, 1e-3)
            if spoilt:
                # As a hook would, after the norm was found to be finite: in one element, that one rank owns.
                model.head.bias.grad[0] = float("inf")
            result = engine.step(opt)
            assert result is (StepResult.NOT_FINITE if spoilt else StepResult.STEPPED), f"{plan} {spoilt} {result}"
            after = [engine.owned_piece(p)[1].clone() for p in engine.table.parameters]
            if any(a.numel() for a in after):  # the model is so small that rank 0 owns it all
                assert spoilt == all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), plan
            before = after
            engine.open_window()


def test_a_gradient_that_is_spoilt_after_clipping_is_found():
    run_ranks(spoil_after_clipping, 1)
    on_two_ranks(spoil_after_clipping)


@pytest.mark.parametrize("asks_later", [False, True], ids=["looked at", "asked later, as on a GPU"])
def test_a_write_that_has_no_version_is_not_lost_in_silence(asks_later):
    model = build(Blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(model, PLANS["zero3"], None)
    engine.take_optimizer(optimizer)
    for buffer in engine.buffers:
        buffer.asks_later = asks_later

    def train():
        with engine.forward():
            loss = model.blocks[1](model.blocks[0](rows(0, 0))).square().mean()
        engine.backward(loss)
        engine.step(optimizer)

    train()

    def write(module, args, output):
        model.blocks[0][0].weight.data.mul_(2)

    handle = model.blocks[0][1].register_forward_hook(write)
    with pytest.raises(StrategyError, match=r"'blocks\.0.*' was changed inside a step .*gathered"):
        train()
    handle.remove()
    train()
