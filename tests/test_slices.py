"""Parts of logical tensors that ranks of a tensor group have: arithmetic, checkpoints, norms, start weights."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.live_export import export_running
from shardlight.strategies.checkpoint.modules import read_state_dict
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.weights import load_weights
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.mesh import Mesh, Place
from shardlight.strategies.engine.part import ModelPart
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.slices import Slice, rows_of
from shardlight.strategies.engine.window import StepResult
from shardlight.strategies.errors import MeshError
from shardlight.strategies.process_group import engine_groups
from torch import nn


@st.composite
def slices(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=6, unique=True)))
    ranges = list(zip(edges[::2], edges[1::2], strict=False)) or [(0, shape[dim])]
    return Slice(shape, dim, tuple(draw(st.permutations(ranges))))


@settings(max_examples=300, deadline=None)
@given(slices(), st.data())
def test_any_range_of_a_part_is_these_elements_of_the_whole(part, data):
    whole = torch.arange(math.prod(part.shape)).view(part.shape)
    local = part.of(whole)
    assert tuple(local.shape) == part.local_shape
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, local.numel())] * 2)))
    flat = local.reshape(-1)[start:stop]
    seen = []
    for box, held in part.parts(flat, start):
        expected = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert torch.equal(held, expected) and held.numel()
        seen += held.reshape(-1).tolist()
        rows = list(rows_of(box, part.shape, 7))
        assert [n for low, high in rows for n in range(low, high)] == list(
            range(box.offsets[0], box.offsets[0] + box.sizes[0])
        )
    assert Counter(seen) == Counter(flat.tolist())
    assert [b for b, _ in part.parts(flat, start)] == list(part.boxes(start, stop))
    runs = [(first, run.tolist()) for first, run in part.runs(flat, start)]
    assert all(run == list(range(first, first + len(run))) for first, run in runs)
    assert Counter(n for _, run in runs for n in run) == Counter(seen)


def test_a_part_of_a_fused_projection():
    part = Slice((6, 4), 0, ((0, 1), (2, 3), (4, 5)))
    assert part.of(torch.arange(24).view(6, 4))[:, 0].tolist() == [0, 8, 16] and not part.is_whole
    assert Slice.whole((3, 2)).is_whole and Slice.whole(()).local_shape == ()


def test_ranks_of_a_mesh():
    mesh = Mesh(pipeline=2, data=3, tensor=2)
    assert [mesh.rank(**vars(mesh.place(rank))) for rank in range(12)] == list(range(12))
    assert mesh.place(7) == Place(pipeline=1, data=0, tensor=1)
    assert mesh.lines("tensor")[:2] == [[0, 1], [2, 3]] and mesh.lines("pipeline")[1] == [1, 7]
    assert mesh.lines("data")[:2] == [[0, 2, 4], [1, 3, 5]]
    assert mesh.lines("pipeline", "tensor")[0] == [0, 1, 6, 7]
    assert mesh.joined([(0, 1)])[1] == [1, 3, 5, 7, 9, 11]
    with pytest.raises(
        MeshError, match="6 ranks do not divide into groups of 4 ranks that share matrices. Start 4 or 8"
    ):
        Mesh.over(6, tensor=4)
    with pytest.raises(MeshError, match="pipeline 2 x tensor 4 = 8 ranks for each part of the data. Start 8 or 16"):
        Mesh.over(12, pipeline=2, tensor=4)
    with pytest.raises(
        MeshError, match="pipeline 2 x data 2 x tensor 2 = 8 ranks, but 12 were started. Start 8, or set"
    ):
        Mesh.over(12, pipeline=2, tensor=2, data=2)


WIDTH, HIDDEN = 6, 10  # of 2 ranks one has 6 of the hidden ones, the other 4


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    """A norm that all have, a projection cut by rows, one cut by columns, and a factor that all have."""

    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x):
        h = self.norm(x)
        if self.group is not None:
            h = _Copy.apply(h, self.group)
        h = self.down(torch.tanh(self.up(h)))
        if self.group is not None:
            h = _Sum.apply(h, self.group)
        return x + h * self.scale.sum(0)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()).double()


def parts(tensor):
    own = ((0, 1), (3, 8)) if tensor == 0 else ((1, 3), (8, HIDDEN))
    cut = {"up.weight": ((HIDDEN, WIDTH), 0), "up.bias": ((HIDDEN,), 0), "down.weight": ((WIDTH, HIDDEN), 1)}
    found = {f"{b}.{n}": Slice(shape, dim, own) for b in (1, 2) for n, (shape, dim) in cut.items()}
    return found


def engine(plan, mesh, groups, seed=0):
    whole = model()
    place = mesh.place(dist.get_rank())
    torch.manual_seed(100 * dist.get_rank() + seed)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if dist.get_rank() and name not in parts(0):
                parameter.normal_()  # rank 0's count
    found = parts(place.tensor) if mesh.tensor > 1 else {}
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for name, part in found.items():
        owner, _, leaf = name.rpartition(".")
        parameter = getattr(whole.get_submodule(owner), leaf)
        parameter.data = part.of(parameter.data)
    made = Engine(whole, PLANS[plan], groups, part=ModelPart(slices=found, tensor_rank=place.tensor))
    for block in list(whole)[1:]:
        block.group = groups.tensor
    made.take_optimizer(optimizer)
    return made, optimizer


def batch(number, data, of):
    x = torch.randn(12, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return x[data * 12 // of : (data + 1) * 12 // of]


def train(made, optimizer, steps, data=0, of=1):
    norms = []
    for number in steps:
        with made.forward():
            loss = made.model(batch(number, data, of)).square().mean()
        made.backward(loss)
        made.close_window()
        norms.append(float(made.norm()))
        made.clip(optimizer, 0.05)
        assert made.step(optimizer) is StepResult.STEPPED
    return norms


def save(made, optimizer, path):
    content = {"state_dict": made.model.state_dict(keep_vars=True), "optimizer_states": []}
    trainer_state.save(made, [optimizer], content, {}, Path(path))


def load(made, optimizer, path):
    reader, state = CheckpointReader(path), made.model.state_dict(keep_vars=True)
    trainer_state.verify_together(made, reader, False)
    trainer_state.load_model(made, reader, state, list(state))
    trainer_state.load_optimizers(made, reader, [optimizer])


def _sliced(rank, world, folder, tensor):
    mesh = Mesh.over(world, tensor=tensor)
    groups = engine_groups("gloo", 60.0, None, mesh) if world > 1 else None
    data, norms = mesh.place(rank).data, {}
    for plan in ("ddp", "zero1", "zero2", "zero3"):
        made, optimizer = engine(plan, mesh, groups or engine_groups("gloo", 60.0))
        norms[plan] = train(made, optimizer, range(2), data, mesh.data)
        save(made, optimizer, f"{folder}/{plan}-{world}")
        export_running(made, made.model.state_dict(keep_vars=True), Path(f"{folder}/{plan}-{world}.export"), dtype=None)
        # The checkpoints of others, and a bare file of all weights.
        other, optimizer = engine(plan, mesh, groups or engine_groups("gloo", 60.0), seed=5)
        load(other, optimizer, f"{folder}/reference")
        norms[f"{plan} resumed"] = train(other, optimizer, range(2, 4), data, mesh.data)
        save(other, optimizer, f"{folder}/{plan}-{world}-on")
        load_weights(other.model, f"{folder}/reference.export/model.safetensors")
        save(other, optimizer, f"{folder}/{plan}-{world}-loaded")
    return norms


def _one_process(rank, world, folder):
    made, optimizer = engine("single", Mesh(), engine_groups("gloo", 60.0))
    first = train(made, optimizer, range(2))
    save(made, optimizer, f"{folder}/reference")
    export_running(made, made.model.state_dict(keep_vars=True), Path(f"{folder}/reference.export"), dtype=None)
    then = train(made, optimizer, range(2, 4))
    save(made, optimizer, f"{folder}/reference-on")
    return first, then


@pytest.mark.parametrize("world", [2, 4])
def test_norms_weights_and_checkpoints_are_those_of_one_process(tmp_path, world):
    ((first, then),) = run_ranks(_one_process, 1, folder=str(tmp_path))
    reference = {end: CheckpointReader(tmp_path / f"reference{end}") for end in ("", "-on")}
    for norms in run_ranks(_sliced, world, folder=str(tmp_path), tensor=2):
        for plan in ("ddp", "zero1", "zero2", "zero3"):
            assert norms[plan] == pytest.approx(first, rel=1e-12) and norms[f"{plan} resumed"] == pytest.approx(then)
    for plan in ("ddp", "zero1", "zero2", "zero3"):
        for end, expected in reference.items():
            found = CheckpointReader(tmp_path / f"{plan}-{world}{end}")
            assert set(found.tensors) == set(expected.tensors) and found.content["mesh"]["tensor"] == 2
            for name in found.tensors:
                torch.testing.assert_close(found.read(name), expected.read(name), rtol=1e-9, atol=1e-11, msg=name)
        loaded = read_state_dict(tmp_path / f"{plan}-{world}-loaded")
        assert all(torch.equal(t, reference[""].read(f"model/{n}")) for n, t in loaded.items())
        saved = CheckpointReader(tmp_path / f"{plan}-{world}")
        exported = load_file(tmp_path / f"{plan}-{world}.export" / "model.safetensors")
        assert exported and all(torch.equal(t, saved.read(f"model/{n}")) for n, t in exported.items())
