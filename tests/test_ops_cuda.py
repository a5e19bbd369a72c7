"""The CUDA library without a GPU: nvcc builds it as a whole or not at all, and its kernels, run on a CPU by
`cuda_on_cpu`, give the bits that the CPU's library gives.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shardlight.ops import build, built, native, steps
from shardlight.ops.adagrad import adagrad_step
from shardlight.ops.adam import adam_step
from shardlight.ops.built import ABI, OpError, why_not
from shardlight.ops.lion import lion_step
from shardlight.ops.native import NUMBER_OF, loaded, pointers
from shardlight.ops.rmsprop import rmsprop_step
from shardlight.ops.sgd import sgd_step
from shardlight.ops.steps import Batch

STEMS = ("adagrad", "adam", "lion", "rmsprop", "sgd", "sums")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
FUNCTIONS = {"ops_abi", "cuda_error_name", "cuda_error_text"}
FUNCTIONS |= {f"cuda_{name}" for name in (*native._STEPS, *native._CUDA_SUMS)}
needs_nvcc = pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed")


# --- on a CPU


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The CUDA sources, compiled for CPU."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    if why_not() is not None:
        pytest.skip(f"compiled ops are not used on CPU: {why_not()}")
    folder = tmp_path_factory.mktemp("emulated")
    flags = ["-std=c++17", "-O0", "-fPIC", "-w", "-ffp-contract=off", f"-I{Path(__file__).parent / 'cuda_on_cpu'}"]
    commands = [[compiler, *flags, "-x", "c++", "-c", build.SOURCES / f"{s}.cu", "-o", folder / s] for s in STEMS]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for run in runs:
        errors = run.communicate()[1]
        assert run.returncode == 0, errors[-2000:]
    library = folder / "emulated.so"
    subprocess.run([compiler, "-shared", "-o", library, *(folder / stem for stem in STEMS)], check=True)
    found = ctypes.CDLL(str(library))
    for name in native._STEPS:
        function = getattr(found, f"cuda_{name}")
        function.restype, function.argtypes = ctypes.c_int, (ctypes.POINTER(native.Step), ctypes.c_int)
    for name, (result, arguments) in native._CUDA_SUMS.items():
        function = getattr(found, f"cuda_{name}")
        function.restype, function.argtypes = result, arguments
    return found


ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}
RULES = {
    "adamw": (adam_step, ADAM | {"decoupled": True}, (1, 1, 0)),
    "adam amsgrad": (adam_step, ADAM | {"decoupled": False, "betas": (0.3, 0.5)}, (1, 1, 1)),
    "sgd": (sgd_step, SGD | {"momentum": 0.0, "nesterov": False}, (0,)),
    "sgd nesterov": (sgd_step, SGD | {"nesterov": True}, (1,)),
    "adagrad": (adagrad_step, {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-10}, (1,)),
    "rmsprop": (rmsprop_step, {"alpha": 0.9, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.0}, (1, 0, 0)),
    "rmsprop momentum": (rmsprop_step, {"alpha": 0.9, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.9}, (1, 1, 0)),
    "rmsprop centered": (rmsprop_step, {"alpha": 0.4, "eps": 1e-2, "weight_decay": 0.0, "momentum": 0.0}, (1, 0, 1)),
    "rmsprop all": (rmsprop_step, {"alpha": 0.9, "eps": 1e-2, "weight_decay": 0.0, "momentum": 0.9}, (1, 1, 1)),
    "lion": (lion_step, {"betas": (0.9, 0.99), "weight_decay": 0.1}, (1,)),
}
MIXES = [  # of parameter, gradient, states, copy
    (F32, F32, F32, None),
    (F32, F32, F32, BF16),
    (F32, BF16, F32, BF16),
    (F32, F32, BF16, None),
    (F32, F32, BF16, BF16),
    (BF16, BF16, BF16, None),
    (F16, BF16, F32, F64),
    (BF16, F32, F16, F32),
    (F64, F64, F64, None),
    (F64, F32, F16, BF16),
]
LENGTHS = [0, 1, 3, 1023, 1023, 1024, 1024, 2060, 2060, *[5] * 35, 1025]
"""More tensors than one launch takes; some have no element. Every second one begins one element off."""


def tensors(dtype, seed):
    """Views of one memory."""
    generator = torch.Generator().manual_seed(seed)
    starts = [0]
    for n in LENGTHS:
        starts.append(starts[-1] + -(-(n + 1) // 16) * 16)
    flat = torch.randn(starts[-1] + 1, generator=generator, dtype=F64).abs().to(dtype)
    return [flat[s + i % 2 : s + i % 2 + n] for i, (s, n) in enumerate(zip(starts, LENGTHS, strict=False))]


def stepped(rule, mix):
    step, options, uses = RULES[rule]
    parameter, gradient, state, copy = mix
    params, grads = tensors(parameter, 0), tensors(gradient, 1)
    states = tuple(tensors(state, 2 + n) if used else None for n, used in enumerate(uses))
    if "rmsprop" in rule and uses[2]:
        for square, mean in zip(states[0], states[2], strict=True):
            square.add_(1)
            mean.mul_(0.1)  # a variance is not negative
    copies = None if copy is None else tensors(copy, 5)
    for number in (0, 3, 6) if copies else ():
        copies[number] = None
    numbers = [1.0 + n % 3 for n in range(len(params))]
    batch = Batch(params=params, grads=grads, states=states, numbers=numbers, scale=0.37, clip=0.61, copies=copies)
    step(batch, lr=0.01, **options)
    return [t for column in (params, *states, copies) if column is not None for t in column if t is not None]


@pytest.mark.parametrize("rule", RULES)
def test_steps_on_cuda_give_the_cpus_bits(rule, emulated, monkeypatch):
    library = SimpleNamespace(**{f"ops_{name}": getattr(emulated, f"cuda_{name}") for name in native._STEPS})
    for mix in MIXES:
        want = stepped(rule, mix)
        with monkeypatch.context() as patch:
            patch.setattr(steps, "loaded", lambda device: library)
            found = stepped(rule, mix)
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(found, want, strict=True)), mix


def test_a_step_without_a_version_is_refused(emulated, monkeypatch):
    library = SimpleNamespace(ops_lion=lambda step, uses: emulated.cuda_lion(step, 2))
    monkeypatch.setattr(steps, "loaded", lambda device: library)
    with pytest.raises(RuntimeError, match=r"ops.lion with states 1 and dtypes .* has no compiled version"):
        stepped("lion", MIXES[0])


def flat_of(n, dtype, seed=0, unaligned=False):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n + 16, generator=generator, dtype=F64) * 50).to(dtype)[unaligned : n + unaligned]


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
def test_squares_and_scaling_on_cuda_give_the_cpus_bits(dtype, emulated):
    for chunk, chunks in ((1, 3), (16, 5), (17, 40), (1000, 7), (1024, 33), (2048, 3), (2500, 2)):
        for spoilt in ((), (0, chunk * chunks - 1)):
            flat = flat_of(chunk * chunks, dtype, unaligned=True)
            for where in spoilt:
                flat[where] = torch.nan if where else torch.inf
            results = []
            for library in ("cpu", "cuda"):
                sums, bad = torch.zeros(chunks, dtype=F64), torch.zeros((), dtype=torch.int64)
                given = flat.data_ptr(), NUMBER_OF[dtype], flat.numel(), chunk, 0.3, 0.7, sums.data_ptr()
                if library == "cpu":
                    bad.fill_(loaded().ops_square_sums(*given, 1))
                else:
                    assert emulated.cuda_square_sums(*given, bad.data_ptr(), None) == 0
                results.append((native_bits(sums), int(bad)))
            assert results[0] == results[1] and results[0][1] == len(spoilt)
    for n in (1, 1024, 5000):
        for unaligned in (False, True):
            flat = flat_of(n, dtype, unaligned=unaligned)
            flat[-1] = torch.finfo(dtype).max
            for by in (0.37, 4.0):
                here, there, bad = (
                    flat.clone(),
                    flat_of(n, dtype, unaligned=unaligned),
                    torch.zeros((), dtype=torch.int64),
                )
                there.copy_(flat)
                count = loaded().ops_scale(here.data_ptr(), NUMBER_OF[dtype], n, by, 1)
                assert emulated.cuda_scale(there.data_ptr(), NUMBER_OF[dtype], n, by, bad.data_ptr(), None) == 0
                assert torch.equal(here, there) and int(bad) == count == (by > 1)


def native_bits(sums):
    return sums.view(torch.int64).tolist() if sums.isfinite().all() else [str(s) for s in sums.tolist()]


@pytest.mark.parametrize("target", [F32, F64, BF16, F16], ids=str)
def test_casts_on_cuda_give_the_cpus_bits(target, emulated):
    for source in (F32, F64, BF16, F16):
        for n, unaligned in ((5000, False), (5000, True), (1, True)):
            flat = flat_of(n, source, unaligned=unaligned)
            found, want = torch.zeros(n, dtype=target), flat.to(target)
            numbers = NUMBER_OF[source], NUMBER_OF[target]
            assert emulated.cuda_cast(flat.data_ptr(), numbers[0], found.data_ptr(), numbers[1], n, None) == 0
            assert torch.equal(found, want)


def test_sums_on_cuda_give_the_cpus_bits(emulated):
    wider = {BF16: F32, F16: F32, F32: F64}
    for dtype in NUMBER_OF:
        for target in {dtype, wider.get(dtype, dtype)}:
            for n, unaligned in ((1, False), (2048, False), (2500, True)):
                parts, start = [flat_of(n, dtype, s, unaligned) for s in range(3)], flat_of(n, target, 9)
                for add in (False, True):
                    outs = []
                    for library in ("cpu", "cuda"):
                        out = start.clone()
                        given = pointers(parts), 3, NUMBER_OF[dtype], out.data_ptr(), NUMBER_OF[target], n, add
                        if library == "cpu":
                            assert loaded().ops_sum(*given, 1) == 0
                        else:
                            assert emulated.cuda_sum(*given, None) == 0
                        outs.append(out)
                    assert torch.equal(*outs), (dtype, target, n, add)
    parts = [flat_of(8, F32, s) for s in range(2)]
    want = parts[0] + parts[1]
    assert emulated.cuda_sum(pointers(parts), 2, 0, parts[1].data_ptr(), 0, 8, False, None) == 0
    assert torch.equal(parts[1], want)
    assert (
        emulated.cuda_sum(pointers(parts), 2, NUMBER_OF[BF16], parts[1].data_ptr(), NUMBER_OF[F16], 8, False, None)
        == -1
    )


# --- nvcc


def exported(library):
    run = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in run.stdout.splitlines()}


@needs_nvcc
def test_one_source_is_compiled_and_all_else_is_hidden(tmp_path, monkeypatch):
    (tmp_path / "csrc/cuda").mkdir(parents=True)
    csrc = build.SOURCES.parent
    for path in [*csrc.glob("*.h"), *csrc.glob("cuda/*.cuh"), csrc / "cuda/library.cu"]:
        shutil.copy(path, tmp_path / "csrc" / path.relative_to(csrc))
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc/cuda")
    library = build.build_cuda(["sm_90"], tmp_path / "_cuda.so")
    assert exported(library) == {"ops_abi", "cuda_error_name", "cuda_error_text"}
    found = ctypes.CDLL(str(library))
    assert found.ops_abi() == ABI
    found.cuda_error_name.restype = ctypes.c_char_p
    assert found.cuda_error_name(2) == b"cudaErrorMemoryAllocation"
    assert {p.name for p in tmp_path.iterdir()} == {"csrc", "_cuda.so"}


@needs_nvcc
@pytest.mark.long
def test_the_library_is_built_for_both_architectures_and_loads(tmp_path, monkeypatch):
    library = build.build_cuda(build.ARCHITECTURES, tmp_path / "_cuda.so")
    assert exported(library) == FUNCTIONS
    monkeypatch.setattr(built, "cuda_library", lambda: library)
    for cached in (built.why_not, native.loaded):
        cached.cache_clear()
    try:
        assert built.why_not("cuda") is None
        assert native.loaded("cuda").cuda_error_name(0) == b"cudaSuccess"
    finally:
        for cached in (built.why_not, native.loaded):
            cached.cache_clear()
    code = library.read_bytes()
    assert [name for name in ("sm_75", "sm_80", "sm_90", "sm_100") if name.encode() in code] == [*build.ARCHITECTURES]


def fake_nvcc(folder, text):
    """A compiler that writes half of its output, and then fails as told."""
    path = folder / "bin/nvcc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nfor last; do :; done\necho half > "$last"\n{text}\n')
    path.chmod(0o755)
    return path


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    target = tmp_path / "_cuda.so"
    compiler = fake_nvcc(tmp_path, "echo 'adam.cu(3): error: no such thing' >&2\nexit 2")
    target.write_text("of before")
    with pytest.raises(OpError, match=r"nvcc failed \(2\):\nadam.cu\(3\): error: no such thing"):
        build.build_cuda(["sm_90"], target)
    assert target.read_text() == "of before" and {p.name for p in tmp_path.iterdir()} == {"bin", "_cuda.so"}
    target.unlink()
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    with pytest.raises(OpError, match="there is none: install g"):
        build.build_cuda(["sm_90"], target)
    compiler.write_text("neither a script nor a program")
    with pytest.raises(OpError, match="Nothing was built"):
        build.build_cuda(["sm_90"], target)
    compiler.unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OpError, match="nvcc was not found: install the CUDA toolkit"):
        build.build_cuda(["sm_90"], target)
    assert {p.name for p in tmp_path.iterdir()} == {"bin"}


def test_a_folder_that_is_none_or_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    fake_nvcc(tmp_path, "exit 0")
    with pytest.raises(OpError, match=r"missing cannot be written: build as the user that installed shardlight\."):
        build.build_cuda(["sm_90"], tmp_path / "missing/_cuda.so")
    with pytest.raises(OpError, match="--arch sm90 is no architecture"):
        build.build_cuda(["sm_90", "sm90"], tmp_path / "_cuda.so")
    with pytest.raises(OpError, match="names no architecture"):
        build.build_cuda([], tmp_path / "_cuda.so")
    assert build.build_cuda(["sm_90"], tmp_path / "_cuda.so").read_text() == "half\n"
