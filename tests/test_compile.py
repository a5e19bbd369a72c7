"""Compiled blocks and compiled models: the numbers of the plain loop, no compilation after the first steps."""

import copy
import gc
import importlib
import shutil
import warnings
from functools import partial

import pytest
import torch
from harness import run_ranks
from loops import build, check_equal, check_released, group, optimizer_of, plain, plans, rows, sharded
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies import STRATEGIES
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.errors import StrategyError
from test_engine_uses import GPT, USES, Blocks, gpt_batch, square, tokens
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor


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
        assert first > 0 and later == [first, first], f"{plan} {options}: {counting.graphs}"


KINDS = ("no", "blocks", "blocks_reentrant")
CASES = {
    1: [("single", {"compile_backend": "eager", "recompute": "blocks"}), ("zero3", {"recompute": "blocks_reentrant"})],
    2: [
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


class UserCompiles(nn.Module):
    """A model that the user compiled in one of the ways there are."""

    def __init__(self, make, how, backend):
        super().__init__()
        self.model = make()
        if how == "whole":
            self.model = torch.compile(self.model, backend=backend)
        elif how == "in place":
            self.model.compile(backend=backend)
        elif how == "each block":
            self.model.blocks = nn.ModuleList([torch.compile(b, backend=backend) for b in self.model.blocks])
        elif how == "each block in place":
            for block in self.model.blocks:
                block.compile(backend=backend)

    def forward(self, *args):
        return self.model(*args)


WAYS = ("whole", "in place", "each block", "each block in place")


def check_users(rank, world_size, cases):
    start()
    for (make, losses, batch), backend, way, plan in cases:
        want = plain(partial(UserCompiles, make, None, backend), losses, world_size, batch=batch)
        forget()
        counting = Counting(losses)
        got = sharded(partial(UserCompiles, make, way, backend), counting, plan, rank, world_size, 3, batch)
        check_equal(got, want, f"{way} {backend} {plan} on {world_size} ranks")  # under the same names, too
        # torch 2.11 compiles nothing of PyTorch's own containers between two gathers.
        some = losses is not tokens or counting.graphs[1] > 0
        assert some and counting.graphs[1] == counting.graphs[2], f"{way} {backend} {plan}: {counting.graphs}"


GPT_CASE = (partial(GPT, None), tokens, gpt_batch)
TIED_CASE = (*USES["unused, tied, non-contiguous, frozen"], rows)


@pytest.mark.case("C028")
@pytest.mark.conformance("A12")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_that_the_user_compiled_gives_the_plain_numbers(world_size):
    cases = [(GPT_CASE, "eager", "whole", "zero3"), (TIED_CASE, "aot_eager", "in place", "zero3")]
    if world_size == 2:
        cases = [(GPT_CASE, "eager", "each block", "zero3"), (TIED_CASE, "aot_eager", "whole", "zero3")]
        cases += [(GPT_CASE, "eager", "in place", "zero1")]
    run_ranks(check_users, world_size, cases=cases, timeout_s=300)


@pytest.mark.long
@pytest.mark.conformance("A12")
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_way_to_compile_under_every_strategy(world_size):
    cases = [
        (case, backend, way, plan)
        for case in (GPT_CASE, TIED_CASE)
        for backend in ("eager", "aot_eager")
        for way in WAYS
        for plan in plans(world_size)
    ]
    run_ranks(check_users, world_size, cases=cases, timeout_s=900)


class Numbered(nn.Module):
    """A block that knows its number, as those of transformers do; it also breaks the graph and has a dropout."""

    def __init__(self, number):
        super().__init__()
        self.number, self.linear, self.dropout = number, nn.Linear(7, 7), nn.Dropout(0.5)

    def forward(self, x):
        x = x + self.dropout(self.linear(x)) / (1 + self.number)
        torch._dynamo.graph_break()
        return x.tanh()


class Stack(nn.Module):
    def __init__(self, block, layers):
        super().__init__()
        self.blocks = nn.ModuleList([block(i) for i in range(layers)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def plain_block(number):
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh())


def seeded(losses):
    def run(model, batch, step, rank):
        torch.manual_seed(7 * step + rank)
        return losses(model, batch, step, rank)

    return run


class Flagged(nn.Module):
    """A block that checkpoints itself when it is told to, as those of transformers."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.gradient_checkpointing = nn.Linear(7, 7), False
        self._gradient_checkpointing_func = None

    def forward(self, x):
        if self.gradient_checkpointing:
            return self._gradient_checkpointing_func(self.run, x)
        return self.run(x)

    def run(self, x):
        return x + self.linear(x).tanh()


def count_graphs(rank, world_size):
    start()
    counts = {}
    cases = [("alike", plain_block, 5, kind) for kind in KINDS]
    cases += [("flagged", Flagged, 5, "blocks"), ("numbered", Numbered, 10, "no"), ("numbered", Numbered, 2, "blocks")]
    for name, block, layers, kind in cases:
        make = partial(Stack, block, layers)
        forget()
        transforms = compiled(compile_backend="eager", recompute=kind)
        got = sharded(make, seeded(square), "zero3", rank, world_size, steps=2, transforms=transforms)
        check_equal(got, plain(make, seeded(square), world_size, steps=2), f"{name} {kind}")
        counts[name, kind] = graphs()
    return counts


@pytest.mark.case("C076")
@pytest.mark.conformance("A11", "A12")
def test_like_blocks_share_a_compilation_and_numbered_ones_are_all_compiled():
    (counts,) = run_ranks(count_graphs, 1, timeout_s=300)
    # The first block's input asks for no gradient; reentrant recomputation runs once without gradients.
    assert counts["alike", "no"] == counts["alike", "blocks"] == counts["flagged", "blocks"] == 2
    assert counts["alike", "blocks_reentrant"] <= 4
    assert counts["numbered", "no"] == 20
    assert counts["numbered", "blocks"] == 4


def live_bytes(rank, world_size, recompute):
    start()
    model = build(partial(TinyGPT, layers=2))
    engine = Engine(model, PLANS["zero3"], group(world_size), transforms=compiled(recompute=recompute))
    optimizer = optimizer_of(model)
    engine.take_optimizer(optimizer)
    gc.freeze()  # what the libraries made is slow to look through
    seen = []
    for step in range(4):
        with engine.forward():
            loss = token_loss(model, token_batch(step, 4, torch.float64))
        check_released(engine, turning=True)
        between = tensor_bytes()
        engine.backward(loss)
        check_released(engine)
        del loss
        engine.step(optimizer)
        seen.append((between, tensor_bytes()))
    return seen[2:]


def tensor_bytes() -> int:
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and type(o) is not FakeTensor]
    with torch._C.DisableTorchFunctionSubclass():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}
    return sum(storages.values())


@pytest.mark.parametrize("recompute", ["no", "blocks"])
def test_compiled_blocks_keep_no_weights_between_forward_and_backward(recompute):
    smallest = min(p.numel() * 8 for p in build(partial(TinyGPT, layers=2)).parameters())
    for one, other in run_ranks(live_bytes, 2, recompute=recompute, timeout_s=120):
        # Scalars come and go with the garbage collector; no weight is as small as they are.
        assert one == pytest.approx(other, rel=0, abs=smallest // 2)


def copies(rank, world_size):
    start()
    for recompute in KINDS:
        model = build(partial(TinyGPT, layers=2))
        before = model.blocks[0].forward
        engine = Engine(
            model, PLANS["ddp"], group(world_size), transforms=compiled(compile_backend="eager", recompute=recompute)
        )
        other, batch = copy.deepcopy(model), token_batch(0, 4, torch.float64)
        with torch.no_grad():
            for parameter in other.blocks.parameters():
                parameter.zero_()
        assert token_loss(other, batch) != token_loss(model, batch), "the copy runs the weights of the original"
        engine.detach()
        assert model.blocks[0].forward == before


def test_a_deep_copy_of_a_compiled_and_recomputed_model_runs_its_own_weights():
    run_ranks(copies, 1)


def refusals(rank, world_size):
    start()
    for option in ("compile", "recompute"):
        with pytest.raises(StrategyError, match=f"{option}='blocks': the model has no blocks .*strategy.units"):
            Engine(
                nn.Sequential(nn.Linear(7, 5), nn.ReLU()),
                PLANS["zero3"],
                group(world_size),
                transforms=BlockTransforms(**{option: "blocks"}),
            )
    with pytest.raises(StrategyError, match="compile_backend='inducter' is not a backend of torch.compile: use one of"):
        Engine(build(Blocks), PLANS["ddp"], group(world_size), transforms=compiled(compile_backend="inducter"))
    inductor = importlib.import_module("torch._inductor.config")
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(StrategyError, match="Install g\\+\\+"):
        Engine(build(Blocks), PLANS["ddp"], group(world_size), transforms=compiled(compile_backend="inductor"))

    model = build(Blocks)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    engine = Engine(model, PLANS["zero3"], group(world_size))
    with engine.forward(), pytest.raises(Exception, match="shardlight gathers sharded weights here.*compile: blocks"):
        whole(rows(0, 0))

    hooked = nn.Sequential(torch.compile(nn.Linear(7, 7), backend="eager"))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(StrategyError, match="a hook is registered on torch.compile's wrapper of Linear"):
        Engine(hooked, PLANS["ddp"], group(world_size))


def test_what_cannot_be_compiled_is_refused_before_the_first_step():
    run_ranks(refusals, 1)
    with pytest.raises(StrategyError, match="compile='all' is not an option of zero3: use 'no' or 'blocks'"):
        STRATEGIES["zero3"](compile="all")


@pytest.mark.long
@pytest.mark.conformance("A12")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU, and there is no g++")
def test_blocks_compiled_by_inductor_give_the_plain_numbers(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    run_ranks(check_inductor, 2, timeout_s=600)


def check_inductor(rank, world_size):
    warnings.simplefilter("default")  # inductor's own files warn as they are imported
    make = partial(GPT, None)
    want = plain(make, tokens, world_size, batch=gpt_batch)
    transforms = BlockTransforms(compile="blocks", recompute="blocks")
    got = sharded(make, tokens, "zero3", rank, world_size, batch=gpt_batch, transforms=transforms)
    check_equal(got, want, "zero3 by inductor")
