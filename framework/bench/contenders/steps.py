"""The rank's side of `shardlight bench ops`: optimizer steps of our ops, of PyTorch and of DeepSpeed, taking turns.

Shape suffix: N elements of one flat tensor.
"""

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from shardlight.framework.bench import meters
from shardlight.framework.bench.contenders.gpt import LEARNING_RATE, fixed_gpt
from shardlight.framework.bench.contenders.loop import start_group
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.ops.adagrad import adagrad_step
from shardlight.ops.adam import adam_step
from shardlight.ops.built import why_not
from shardlight.ops.lion import lion_step
from shardlight.ops.muon_adamw import MuonAdamW
from shardlight.ops.native import loaded
from shardlight.ops.rmsprop import rmsprop_step
from shardlight.ops.sgd import sgd_step
from shardlight.ops.steps import Batch
from shardlight.ops.sums import square_sums
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TAIL = 4096
"""Elements that are compared with PyTorch's."""
Call = Callable[[], object]


class Buffers:
    """What a step reads and writes; the same memory for every contender."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.grad16_N: Tensor = torch.randn(numel, generator=generator).to(torch.bfloat16)
        self.grad_N: Tensor = self.grad16_N.float()
        self.param_N: Tensor = torch.empty(numel)
        self.mean_N: Tensor = torch.empty(numel)
        self.square_N: Tensor = torch.empty(numel)
        self.copy_N: Tensor = torch.empty(numel, dtype=torch.bfloat16)

    def prepare(self) -> None:
        """Sets what is written anew: without numbers that a processor is slow with."""
        self.param_N.fill_(0.5)
        self.mean_N.fill_(0.01)
        self.square_N.fill_(1e-3)
        self.copy_N.fill_(0)


def ours(b: Buffers, narrow: bool) -> Call:
    """The compiled op; `narrow`: from 16-bit gradients, and with a 16-bit copy of the parameters."""

    def call() -> None:
        batch = Batch(
            params=[b.param_N],
            grads=[b.grad16_N if narrow else b.grad_N],
            states=([b.mean_N], [b.square_N]),
            numbers=[2.0],
            copies=[b.copy_N] if narrow else None,
        )
        adam_step(batch, **OPTIONS, decoupled=True)

    return call


def traffic(b: Buffers, narrow: bool) -> Call:
    """The same loads and stores without a step's arithmetic."""
    function = loaded().ops_traffic
    function.restype = None
    function.argtypes = (*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int)
    grad_N, copy = (b.grad16_N, b.copy_N.data_ptr()) if narrow else (b.grad_N, None)
    given = b.param_N.data_ptr(), grad_N.data_ptr(), b.mean_N.data_ptr(), b.square_N.data_ptr(), copy
    return lambda: function(*given, b.param_N.numel(), torch.get_num_threads())


def _as_optimizer(optimizer: Optimizer, b: Buffers, step: object) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = b.grad_N
    optimizer.state[parameter] = {"step": step, "exp_avg": b.mean_N, "exp_avg_sq": b.square_N}


def torch_fused(b: Buffers) -> Call:
    """PyTorch's fused AdamW."""
    optimizer = AdamW([nn.Parameter(b.param_N)], **OPTIONS, fused=True)
    step = torch.tensor(1.0)
    _as_optimizer(optimizer, b, step)

    def call() -> None:
        step.fill_(1.0)
        optimizer.step()

    return call


def deepspeed_cpu_adam(b: Buffers, whole: bool) -> Call:
    """DeepSpeedCPUAdam on fp32 masters; `whole`: with the passes around it, from and to 16 bits.

    Raises: Exception: whatever its build raises.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam([nn.Parameter(b.param_N)], **OPTIONS)
    _as_optimizer(optimizer, b, 1)
    (state,) = optimizer.state.values()

    def call() -> None:
        state["step"] = 1
        if whole:
            b.grad_N.copy_(b.grad16_N)
        optimizer.step()
        if whole:
            b.copy_N.copy_(b.param_N)

    return call


def verify(name: str, call: Call, b: Buffers, narrow: bool) -> None:
    """Takes a step. Raises: ArithmeticError: it is not that of torch.optim.AdamW."""
    want = nn.Parameter(torch.full((TAIL,), 0.5))
    plain = AdamW([want], **OPTIONS)
    want.grad = b.grad_N[-TAIL:].clone()
    state = {"exp_avg": torch.full((TAIL,), 0.01), "exp_avg_sq": torch.full((TAIL,), 1e-3)}
    plain.state[want] = {"step": torch.tensor(1.0), **state}
    plain.step()
    b.prepare()
    call()
    found = b.param_N[-TAIL:]
    # DeepSpeed has 1 - 0.999 in fp32, which is off by 5e-5.
    right = torch.allclose(found, want.data, atol=1e-6)
    right = right and torch.allclose(b.square_N[-TAIL:], state["exp_avg_sq"], rtol=1e-4)
    if narrow:
        right = right and torch.equal(b.copy_N[-TAIL:], found.to(torch.bfloat16))
    if not right:
        raise ArithmeticError(f"AdamW by {name}: not the step of torch.optim.AdamW.")


def measure(calls: Mapping[str, Call], b: Buffers, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round by contender; one round more warms up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            b.prepare()
            began_s = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - began_s)
    return {name: seconds[1:] for name, seconds in found.items()}


def take_turns(numel: int, narrow: bool, rounds: int, peers: bool) -> dict[str, list[float]]:
    """Measures one mix of dtypes. Args: peers: whether DeepSpeed is among the contenders."""
    b = Buffers(numel)
    calls = {"shardlight": ours(b, narrow)}
    if not narrow:
        calls["torch-fused"] = torch_fused(b)
    elif peers:
        calls["deepspeed"] = deepspeed_cpu_adam(b, whole=True)
    for name, call in calls.items():
        verify(name, call, b, narrow)
    if narrow and peers:
        calls["deepspeed-step-alone"] = deepspeed_cpu_adam(b, whole=False)
    return measure({**calls, "same-traffic": traffic(b, narrow)}, b, rounds)


def first_calls() -> dict[str, float]:
    """Returns by how many ms an op's first call of this process takes longer than its tenth."""
    x_N = torch.ones(1000)

    def batch(states: int) -> Batch:
        kept = tuple([torch.zeros(1000)] for _ in range(states))
        return Batch(params=[x_N], grads=[torch.ones(1000)], states=kept, numbers=[1.0])

    decay = {"weight_decay": 0.0, "lr": 0.1}
    calls: dict[str, Call] = {
        "adam": lambda: adam_step(batch(2), **OPTIONS, decoupled=True),
        "sgd": lambda: sgd_step(batch(1), momentum=0.9, dampening=0.0, nesterov=False, **decay),
        "adagrad": lambda: adagrad_step(batch(1), lr_decay=0.0, eps=1e-8, **decay),
        "rmsprop": lambda: rmsprop_step(batch(1), alpha=0.9, eps=1e-8, momentum=0.0, **decay),
        "lion": lambda: lion_step(batch(1), betas=(0.9, 0.99), **decay),
        "sums": lambda: square_sums(x_N, 1000),
    }
    found = {}
    for name, call in calls.items():
        seconds = []
        for _ in range(10):
            began_s = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began_s)
        found[name] = 1000 * (seconds[0] - seconds[-1])
    return found


# --- Muon


def _optimizer(model: nn.Module, kind: str) -> Optimizer:
    if kind == "adamw":
        return AdamW(model.parameters(), lr=LEARNING_RATE)
    named = list(model.named_parameters())
    matrices = [p for n, p in named if n.startswith("blocks.") and p.dim() == 2]
    rest = [p for n, p in named if not (n.startswith("blocks.") and p.dim() == 2)]
    groups = [{"params": matrices, "kind": "muon", "lr": 0.02}, {"params": rest, "lr": LEARNING_RATE}]
    return MuonAdamW(groups)


def _plain_step(size: Size, kind: str) -> Callable[[], float]:
    model = fixed_gpt(size)
    optimizer = _optimizer(model, kind)
    for p in model.parameters():
        p.grad = torch.randn_like(p)

    def step() -> float:
        began_s = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began_s

    return step


def _zero2_step(size: Size, kind: str) -> Callable[[], float]:
    model = fixed_gpt(size)
    optimizer = _optimizer(model, kind)
    engine = Engine(model, PLANS["zero2"], dist.group.WORLD)
    engine.take_optimizer(optimizer)
    tokens_BT = torch.randint(size.vocabulary, (1, 8), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        with engine.forward():
            loss = model(tokens_BT).square().mean()
        engine.backward(loss)
        engine.close_window()
        dist.barrier()
        began_s = time.perf_counter()
        engine.step(optimizer)
        return time.perf_counter() - began_s

    return step


def extra_of_muon(size: Size, rounds: int, rank: int) -> dict[str, list[float]]:
    """Returns the seconds by which a step of MuonAdamW takes longer than one of AdamW, of each round.

    Of this rank under zero2, and, on rank 0 while the others wait, of a process that has the whole model.
    """
    sharded = {kind: _zero2_step(size, kind) for kind in ("muon", "adamw")}
    alone = {kind: _plain_step(size, kind) for kind in ("muon", "adamw")} if rank == 0 else {}
    found: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        both = {"shardlight": sharded, "one-process": alone}
        for who, steps in both.items():
            if steps:
                found.setdefault(who, []).append(steps["muon"]() - steps["adamw"]())
            dist.barrier()
    return {who: seconds[1:] for who, seconds in found.items()}


def run(job: dict[str, Any], turns: Turns) -> None:
    """Answers requests until the end. Args: job: `threads`; `peers`, whether DeepSpeed is to be built and loaded."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job["threads"])
    start_group(world_size)
    for request in turns.requests():
        before_s = meters.cpu_s()
        answer: dict[str, Any]
        if request["do"] == "look":
            answer = {"why_not": why_not()}
            if answer["why_not"] is None:
                answer["first_ms"] = first_calls()
        elif request["do"] == "build":
            answer = {"why_not": _why_no_deepspeed()}
        elif request["do"] == "muon":
            seconds = extra_of_muon(Size(**request["size"]), request["rounds"], rank)
            answer = {"seconds": seconds}
        else:
            answer = {"seconds": take_turns(request["numel"], request["narrow"], request["rounds"], request["peers"])}
        turns.reply({**answer, "cpu_s": meters.cpu_s() - before_s})
    if world_size > 1:
        dist.destroy_process_group()


def _why_no_deepspeed() -> str | None:
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        # Another project's build, which can fail in any way; it is told as a peer that is missing.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    return None
