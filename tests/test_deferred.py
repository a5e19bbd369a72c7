"""A module built without memory comes out, bit for bit, as the module built the ordinary way."""

import copy
import pickle
from contextlib import nullcontext

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import RanksFailedError, run_ranks
from loops import group, plans
from models import TinyGPT
from safetensors.torch import load_file, save_file
from shardlight.strategies import ZeRO3, deferred_init, materialise
from shardlight.strategies.engine.deferred.tensors import DeferredTensor, is_deferred, materialise_others
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from test_lightning_fit import make_trainer
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix


class Rows(nn.Module):
    """Ways in which constructors make values: buffers, views, `data`, numpy, values that decide, own generators."""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(4), persistent=False)
        frequency = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        angles = torch.outer(torch.arange(10).float(), frequency)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        sine, position = torch.zeros(6, 8), torch.arange(6).unsqueeze(1)
        sine[:, 0::2], sine[:, 1::2] = torch.sin(position * frequency), torch.cos(position * frequency)
        self.register_buffer("sine", sine)
        self.norm, self.halves = nn.BatchNorm1d(5), nn.Parameter(torch.full((3,), 0.5))
        self.old = nn.Parameter(torch.Tensor(3, 4))
        self.old.data.normal_()
        self.replaced = nn.Parameter(torch.zeros(3))
        self.replaced.data = torch.randn(3)
        self.outside, self.scalar = nn.Parameter(torch.from_numpy(np.arange(6.0))), nn.Parameter(torch.tensor(1.5))
        self.outside.data = torch.randn(2)
        self.words, self.vectors = nn.Embedding(5, 4), nn.Embedding(5, 4, padding_idx=1)
        self.words.weight.data = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4))).float()
        self.vectors.weight.data.copy_(torch.from_numpy(np.random.default_rng(1).normal(size=(5, 4))))
        self.vectors.weight.data[2].zero_()
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.words.weight
        self.copied = copy.deepcopy(self.tied)
        rates, first = [x.item() for x in torch.linspace(0, 0.1, 5)], torch.linspace(0, 1, 3).tolist()[1]
        self.rates = nn.Parameter(torch.ones(2) * rates[2] + first + float(torch.randn(3).numpy().sum()))
        self.coin = nn.Parameter(torch.rand(3) if torch.rand(1) > 0.5 else torch.ones(3))
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.randn(3, generator=own) + torch.empty(3).uniform_(generator=own))
        self.draws = nn.Parameter(torch.cat([torch.randperm(5).float(), torch.poisson(torch.rand(4) * 3)]))
        self.draws.data[:2] = torch.multinomial(torch.rand(9), 2).float()
        matrix = torch.randn(5, 5)
        self.picked = nn.Parameter(matrix[matrix > 0])
        matrix[matrix < 0.5] = 0
        self.masked, self.turned = nn.Parameter(matrix), nn.Parameter(torch.randn(4, 6).t())
        self.basis = nn.Parameter(torch.linalg.svd(torch.randn(5, 5))[0])
        self.numbers = nn.Parameter(torch.randint(0, 5, (3,)), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.like = nn.Parameter(torch.zeros(3, device=self.old.device) + torch.rand_like(self.halves).sum())
        self.plain, self.several = torch.randn(3), [torch.ones(2), torch.randn(2)]  # registered nowhere


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.trunc_normal_(module.bias, std=0.02)


def two_layers():
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9))


def initialised(name, module):
    getattr(nn.init, name)(module.weight, *([0.3] if name == "sparse_" else []))
    return module


BUILDERS = {
    "rows": Rows,
    "gpt": TinyGPT,
    "lstm": lambda: nn.LSTM(4, 6, 2, proj_size=3),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm(4)),
    "apply": lambda: two_layers().apply(initialise),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 5)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 5)),
    **{n: lambda n=n: initialised(n, nn.Linear(8, 6)) for n in ("sparse_", "eye_", "kaiming_normal_", "orthogonal_")},
    "dirac_": lambda: initialised("dirac_", nn.Conv1d(4, 4, 3)),
}
AFTER = {
    "apply": lambda m: m.apply(initialise),
    "to": lambda m: m.double().to("cpu").half(),
    "data": lambda m: m[0].weight.data[1:3].normal_(),
}
"""What is done to a module between its construction and its sharding."""


def state(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.case("C067")
@pytest.mark.parametrize("name,after", [*((n, None) for n in BUILDERS), *(("apply", a) for a in AFTER)])
def test_a_deferred_module_equals_the_ordinary_one_to_the_last_bit(name, after):
    torch.manual_seed(7)
    want = BUILDERS[name]()
    AFTER.get(after, lambda m: m)(want)
    left = torch.get_rng_state()
    torch.manual_seed(7)
    with deferred_init():
        got = BUILDERS[name]()
    AFTER.get(after, lambda m: m)(got)
    assert torch.equal(torch.get_rng_state(), left)
    waiting = [n for n, p in got.named_parameters() if is_deferred(p)]
    assert set(dict(want.named_parameters())) - set(waiting) <= {"outside", "scalar", "picked"}
    identity = {n: id(p) for n, p in got.named_parameters()}
    materialise(got)
    materialise_others()
    assert torch.equal(torch.get_rng_state(), left)
    for n, tensor in state(want).items():
        mine = state(got)[n]
        assert type(mine) is type(tensor) and mine.dtype == tensor.dtype and mine.device == tensor.device, n
        assert mine.requires_grad == tensor.requires_grad and torch.equal(mine, tensor), n
        assert identity.get(n, id(mine)) == id(mine), n
    if name == "rows":
        assert torch.equal(got.plain, want.plain) and torch.equal(got.several[1], want.several[1])
        assert got.tied.weight is got.words.weight and got.copied.weight is not got.tied.weight
    if name in ("gpt", "attention", "apply"):
        sum(p.sum() for p in got.parameters()).backward()
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in got.parameters())


def test_what_cannot_be_run_again_is_refused_by_name():
    table = torch.ones(3)
    with deferred_init():
        changed = nn.Linear(3, 3)
        changed.bias.data.copy_(table)
        before = nn.Linear(3, 3)
        before.bias.data.copy_(table)
        before.bias.data.add_(table)
        array = np.ones(3, np.float32)
        shared = nn.Linear(3, 3)
        shared.bias.data.copy_(torch.from_numpy(array))
    table.add_(1)
    array += 1
    with pytest.raises(StrategyError, match="'bias' cannot be initialised: a tensor .* was changed"):
        materialise(shared)
    for module in (changed, before):
        with pytest.raises(
            StrategyError, match=r"'bias' cannot be initialised: a tensor of shape \(3,\) .* was changed"
        ):
            Engine(module, PLANS["zero3"])
    with torch.device("meta"):
        bare = nn.Linear(3, 3)
    with pytest.raises(StrategyError, match=r"'weight' cannot be initialised: it is on the meta device.*defer"):
        Engine(bare, PLANS["zero3"])


def test_a_real_tensor_that_a_constructor_changes_later_counts_as_it_was():
    table = torch.ones(3)
    with deferred_init():
        layer = nn.Linear(3, 3)
        layer.bias.data.copy_(table)
        table.zero_()
        layer.weight.data[0] = table
    materialise(layer)
    assert layer.bias.tolist() == [1, 1, 1] and layer.weight[0].tolist() == [0, 0, 0]


def changed_in_two_contexts(context):
    torch.manual_seed(2)
    with context():
        first = two_layers()
        with context():
            first.append(nn.Linear(9, 3))
        first[2].weight.data.mul_(2)
    with context():
        first[0].weight.data.mul_(2)
        first[1].weight.data.copy_(first[1].weight.data + torch.randn(9, 5))
    first[0].bias.data.add_(first[1].weight.sum())
    return first


def test_contexts_inside_and_after_each_other_record_each_operation_once():
    want, got = changed_in_two_contexts(nullcontext), changed_in_two_contexts(deferred_init)
    materialise(got)
    for name, tensor in state(want).items():
        assert torch.equal(state(got)[name], tensor), name


def test_a_deferred_module_can_be_copied_and_saved_and_loaded_by_torch(tmp_path):
    torch.manual_seed(1)
    want = nn.TransformerEncoderLayer(8, 2, 16)
    save_file(want.state_dict(), tmp_path / "w.safetensors")
    torch.save(want.state_dict(), tmp_path / "w.pt")
    torch.manual_seed(1)
    with deferred_init():
        layer = nn.TransformerEncoderLayer(8, 2, 16)
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    assert is_deferred(copied.linear1.weight) and not is_deferred(pickled.linear1.weight)
    read = []
    with deferred_init():
        for state_of in (load_file(tmp_path / "w.safetensors"), torch.load(tmp_path / "w.pt", mmap=True)):
            read.append(nn.TransformerEncoderLayer(8, 2, 16))
            read[-1].load_state_dict(state_of)
    for module in (layer, copied, pickled, *read):
        assert isinstance(module.linear1.weight, nn.Parameter)
        materialise(module)
        for name, tensor in want.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor), name
            assert type(module.get_parameter(name)) is nn.Parameter


def test_metrics_and_modules_that_are_registered_nowhere_work_after_deferral():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.mean = MulticlassConfusionMatrix(3), MeanMetric()
            self.hidden = [nn.Linear(2, 2)]

    with deferred_init():
        holder = Holder()
    materialise(holder)
    materialise_others()
    holder.matrix.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    assert holder.matrix.compute().sum() == 2 and holder.mean(3.0) == 3
    holder.matrix.reset()
    assert holder.matrix.confmat.sum() == 0 and holder.hidden[0](torch.ones(2)).isfinite().all()


def test_an_error_while_a_module_is_built_deferred_says_how_to_do_without():
    with pytest.raises(ZeroDivisionError) as caught, deferred_init():
        nn.Parameter(torch.ones(3) * (1 / 0))
    assert "strategy.defer: false" in caught.value.__notes__[0]


def test_deferred_tensors_answer_as_the_tensors_they_will_be():
    with deferred_init():
        layer = nn.Linear(3, 2)
        assert (
            layer.weight.device.type == "cpu" and not layer.weight.is_meta and layer.weight.untyped_storage().nbytes()
        )
    assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, DeferredTensor)
    assert layer.weight.device.type == "cpu" and layer.weight.shape == (2, 3) and layer.weight.is_leaf
    assert repr(layer.weight) == "Parameter(deferred, shape=(2, 3), dtype=torch.float32, requires_grad=True)"
    calls = []
    layer.weight.register_hook(calls.append)
    materialise(layer)
    layer(torch.ones(1, 3)).sum().backward()
    assert len(calls) == 1 and type(layer.weight) is nn.Parameter


class Custom(nn.Module):
    """C067: a non-persistent buffer, an initialisation of its own, BatchNorm; blocks, and a tied head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.constant_(self.blocks[1][0].weight, 0.5)
        nn.init.orthogonal_(self.blocks[2][0].weight)
        self.register_buffer("order", torch.arange(4), persistent=False)
        self.steps = nn.Parameter(torch.randint(0, 9, (3,)), requires_grad=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def build(seed, deferred):
    torch.manual_seed(seed)
    if not deferred:
        return Custom()
    with deferred_init():
        return Custom()


def equal_everywhere(rank, world_size):
    want, ends = state(build(100, deferred=False)), []
    for plan in plans(world_size):
        for deferred in (False, True):
            model = build(100 + rank, deferred)
            optimizer = torch.optim.Adagrad(model.blocks.parameters(), lr=0.1, initial_accumulator_value=0.25)
            engine = Engine(model, PLANS[plan], group(world_size))
            engine.take_optimizer(optimizer)
            assert model.order.tolist() == [0, 1, 2, 3] and not is_deferred(model.norm.running_var)
            for held in optimizer.state.values():
                assert not is_deferred(held["sum"]) and bool((held["sum"] == 0.25).all())
            with engine.gathered():
                for name, tensor in state(model).items():
                    assert torch.equal(tensor, want[name]), f"{plan} deferred={deferred} {name}"
            with engine.forward():
                loss = model(torch.arange(6) % 9).square().mean()
            engine.backward(loss)
            engine.close_window()
            engine.step(optimizer)
            with engine.gathered():
                ends.append([p.detach().clone() for p in model.parameters()])
    for end in ends:
        assert all(torch.equal(a, b) for a, b in zip(end, ends[0], strict=True))


@pytest.mark.case("C067")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_all_ranks_start_from_rank_0s_weights_however_they_are_seeded(world_size):
    run_ranks(equal_everywhere, world_size)


def peak_bytes(work):
    """Returns the result and the most bytes that were held at once, beyond those held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, most


def never_whole(rank, world_size):
    width, layers = 512, 8
    unit = 4 * (width * width + width)

    def construct():
        with deferred_init():
            made = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
            nn.init.orthogonal_(made[3].weight)
            return made

    model, built = peak_bytes(construct)
    assert built < 1.2 * unit, built / unit  # the numbers of one parameter at a time, for the generator's sake
    _, most = peak_bytes(lambda: Engine(model, PLANS["zero3"], group(world_size)))
    # Of a unit that is not made in place (orthogonal: a factorisation), rank 0 holds what that needs of one parameter.
    allowed = layers * unit / world_size + (4 if rank == 0 else 1) * unit + 100_000
    assert most < allowed < (layers + 1) * unit, (most / unit, allowed / unit)


@pytest.mark.case("C067")
def test_no_rank_ever_holds_more_than_its_shards_and_one_unit():
    run_ranks(never_whole, 2)


class Plain(pl.LightningModule):
    """Built in configure_model, or before."""

    def __init__(self, seed, late):
        super().__init__()
        self.seed, self.model, self.start, self.deferred = seed, None, None, None
        if not late:
            self.model = self.make()

    def make(self):
        torch.manual_seed(self.seed)
        return Custom()

    def configure_model(self):
        if self.model is None:
            self.model = self.make()

    def on_fit_start(self):
        with self.trainer.strategy.gathered():
            self.start = {n: t.detach().clone() for n, t in state(self.model).items()}

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", self.model(batch).square().mean(), batch_size=6, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        self.deferred = any(is_deferred(p) for p in self.parameters())
        names = [(n, tuple(p.shape)) for n, p in self.named_parameters()]
        assert ("model.blocks.0.0.weight", (6, 6)) in names
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)


ROUTES = ("configure_model", "init_module", "context")
PAIRS = [("zero3", route) for route in ROUTES] + [("ddp", "configure_model"), ("zero1", "init_module")]


def lightning_routes(rank, world_size, folder, pairs):
    torch.manual_seed(50)
    want = state(Custom())
    data, ends = DataLoader([torch.arange(6) % 9] * 4, batch_size=None), {}
    for strategy, route in pairs:
        trainer = make_trainer(strategy, world_size, folder, precision="32-true", max_epochs=1)
        if route == "configure_model":
            module = Plain(50 + rank, late=True)
        elif route == "init_module":
            with trainer.init_module(empty_init=True):
                module = Plain(50 + rank, late=False)
        else:
            with deferred_init():
                module = Plain(50 + rank, late=False)
        where = f"{strategy} {route}"
        trainer.fit(module, data, data)
        for name, tensor in want.items():
            assert torch.equal(module.start[name], tensor), f"{where} {name}"
        assert module.deferred is (route != "configure_model" or strategy == "zero3"), where
        if route == "configure_model":
            # Called again at each of these.
            model = module.model
            trainer.validate(module, data, verbose=False)
            trainer.test(module, data, verbose=False)
            assert module.model is model
        with trainer.strategy.gathered():
            end = [p.detach().clone() for p in module.parameters()]
        for a, b in zip(end, ends.setdefault(0, end), strict=True):
            assert torch.equal(a, b), where


@pytest.mark.case("C067")
@pytest.mark.conformance("C4")
def test_lightning_modules_are_built_deferred_by_each_route(tmp_path):
    run_ranks(lightning_routes, 2, init=False, folder=str(tmp_path), pairs=PAIRS, timeout_s=120)


@pytest.mark.long
@pytest.mark.conformance("C4")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lightning_modules_are_built_deferred_by_every_route_under_every_strategy(world_size, tmp_path):
    pairs = [(strategy, route) for strategy in plans(world_size) for route in ROUTES]
    run_ranks(lightning_routes, world_size, init=False, folder=str(tmp_path), pairs=pairs, timeout_s=300)


def meta_outside(rank, world_size, folder):
    with torch.device("meta"):
        module = Plain(0, late=False)
    data = DataLoader([torch.arange(6) % 9], batch_size=None)
    make_trainer(ZeRO3(), world_size, folder, precision="32-true").fit(module, data, data)


@pytest.mark.conformance("C4")
def test_a_module_on_the_meta_device_without_its_initialisation_is_refused_by_name(tmp_path):
    with pytest.raises(RanksFailedError, match=r"'model.steps' is on the meta device.*configure_model"):
        run_ranks(meta_outside, 1, init=False, folder=str(tmp_path))


def grows_between_fits(rank, world_size, folder):
    data = DataLoader([torch.arange(6) % 9], batch_size=None)
    module = Plain(1, late=True)
    trainer = make_trainer("zero3", world_size, folder, precision="32-true")
    trainer.fit(module, data, data)
    first = trainer.strategy.engine
    with trainer.strategy.gathered():
        before = module.model.embedding.weight.detach().clone()
    module.model.extra = nn.Linear(3, 3)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)
    assert trainer.strategy.engine is not first and torch.equal(module.start["embedding.weight"], before)
    assert module.model.extra.weight in trainer.strategy.engine.table.place
    with trainer.strategy.gathered():
        assert not torch.equal(module.model.embedding.weight, before)


def test_a_module_with_new_parameters_in_a_second_fit_is_sharded_anew(tmp_path):
    run_ranks(grows_between_fits, 2, init=False, folder=str(tmp_path))
