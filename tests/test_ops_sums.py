"""Passes over flat buffers: compiled code against its PyTorch reference, to the bit where the order is fixed."""

import pytest
import torch
from devices import VERSIONS, use_version
from shardlight.ops.sums import all_true, cast, scale_and_check, square_sums, sum_in_rank_order
from torch import library

LENGTHS = [0, 1, 15, 16, 17, 1023, 1024, 1025, 70_001]
FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PATTERNS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


@pytest.fixture(params=VERSIONS)
def device(request, monkeypatch):
    return use_version(request.param, monkeypatch)


@pytest.fixture(params=VERSIONS[::2])
def native_device(request, monkeypatch):
    return use_version(request.param, monkeypatch)


def random(n, dtype, seed=0, device="cpu"):
    """Unaligned, as a shard of a buffer may be."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n + 1, generator=generator, dtype=torch.float64).to(dtype).to(device)[1:]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_squares_are_summed_and_what_is_not_finite_is_counted(dtype, device):
    for n in (0, 1, 16, 17, 1000, 1024):
        flat = random(7 * n, dtype, device=device)
        sums, bad = square_sums(flat, n) if n else (torch.zeros(0, device=device), 0)
        want = flat.double().view(-1, n).square().sum(1) if n else torch.zeros(0, device=device)
        assert torch.allclose(sums, want.to(sums.dtype), rtol=1e-13) and bad == 0
        if n:
            scaled = (flat.to(torch.promote_types(dtype, torch.float32)) * 0.3).mul_(0.7).double()
            sums, _ = square_sums(flat, n, 0.3, 0.7)
            assert torch.allclose(sums, scaled.view(-1, n).square().sum(1), rtol=1e-13)
            flat[0], flat[n], flat[-1] = torch.inf, torch.nan, -torch.inf
            sums, bad = square_sums(flat, n)
            assert bad == 3 and not sums[0].isfinite() and sums[2:6].isfinite().all()
    large = torch.full((64,), 1e300, dtype=torch.float64, device=device)
    assert square_sums(large, 64)[1] == 0  # its squares are too large, it is not
    assert square_sums(torch.full((64,), 3e38, device=device), 64, scale=2.0)[1] == 64
    complex_ones = torch.ones(32, dtype=torch.complex64, device=device) * (1 + 2j)
    assert square_sums(complex_ones, 16)[0].tolist() == [80.0, 80.0]


def test_squares_do_not_depend_on_threads_or_on_how_the_buffer_is_cut(device, monkeypatch):
    flat = random(300 * 1024, torch.float32, device=device)
    whole, _ = square_sums(flat)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(square_sums(flat)[0], whole)
        parts = [square_sums(part)[0] for part in flat.split([1024, 150 * 1024, 149 * 1024])]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_scaling_is_pytorchs_to_the_bit_and_tells_what_is_finite(dtype, device):
    for n in LENGTHS:
        flat = random(n, dtype, device=device)
        want = flat * 0.37
        assert scale_and_check(flat, 0.37) and torch.equal(flat, want)
        for special in (torch.inf, -torch.inf, torch.nan) if n else ():
            broken = flat.clone()
            broken[n // 2] = special
            assert not scale_and_check(broken, 1.0)
    most = torch.full((3,), torch.finfo(dtype).max, dtype=dtype, device=device)
    assert not scale_and_check(most, 2.0) and most.isinf().all()


@pytest.mark.parametrize("source", FLOATING, ids=str)
@pytest.mark.parametrize("target", FLOATING, ids=str)
def test_casts_are_pytorchs_to_the_bit(source, target, device):
    patterns = (
        PATTERNS.view(source)
        if source.itemsize == 2
        else torch.cat([PATTERNS.view(d).to(source) for d in (torch.bfloat16, torch.float16)])
    )
    between = (
        torch.nextafter(random(5000, source), torch.tensor(0.0, dtype=source)) if source.itemsize > 2 else patterns
    )
    for flat in (patterns, between, between[1:], between[:0]):
        flat = flat.to(device)
        found, want = torch.empty_like(flat, dtype=target), flat.to(target)
        assert cast(flat, found) is found
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int8, torch.int64], ids=str)
def test_sums_over_ranks_are_those_of_the_reference_to_the_bit(dtype, native_device, monkeypatch):
    for n in LENGTHS:
        parts = [(random(n, torch.float64, seed, native_device) * 50).to(dtype) for seed in range(3)]
        start = (random(n, torch.float64, 9, native_device) * 50).to(dtype)
        found = {}
        for native in (True, False):
            if not native:
                monkeypatch.setattr("shardlight.ops.registry.Op.native", lambda op, device: False)
            copies = [[p.clone() for p in parts] for _ in range(3)]
            found[native] = [
                sum_in_rank_order(copies[0], torch.empty_like(start)),
                sum_in_rank_order(copies[1], start.clone(), add=True),
                sum_in_rank_order(copies[2], copies[2][1]),
            ]
            monkeypatch.undo()
        assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True)), n


def test_answers_that_nobody_waits_for_are_the_same(device):
    flats = [random(n, torch.float32, device=device) for n in (1024, 1, 0)]
    finite = [scale_and_check(flat, 0.5, wait=False) for flat in flats]
    counts = [square_sums(flat, 1, wait=False)[1] for flat in flats]
    assert all_true(finite) and all_true([count == 0 for count in counts])
    flats[1][0] = torch.inf
    finite = [scale_and_check(flat, 0.5, wait=False) for flat in flats]
    counts = [int(square_sums(flat, 1, wait=False)[1]) for flat in flats]
    assert not all_true(finite) and [bool(f) for f in finite] == [True, False, True] and counts == [0, 1, 0]
    assert all_true([]) and all_true([True]) and not all_true([True, False])


def test_passes_are_operators_of_pytorch(device):
    flat = random(32, torch.float32, device=device)
    ops = torch.ops.shardlight
    for operator, arguments in (
        (ops.square_sums.default, (flat, 16, 0.5, 0.5)),
        (ops.scale_.default, (flat.clone(), 0.5)),
        (ops.cast.default, (flat, torch.bfloat16)),
        (ops.sum_in_rank_order.default, ([flat, flat + 1], flat.clone())),
    ):
        library.opcheck(operator, arguments)

    def all_of_them(x):
        sums, bad = ops.square_sums(x, 16)
        y = x.clone()
        ops.scale_(y, 0.5)
        ops.sum_in_rank_order([x, x], y, True)
        return sums + bad, ops.cast(y, torch.bfloat16)

    want, found = all_of_them(flat), torch.compile(all_of_them, backend="aot_eager", fullgraph=True)(flat)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
