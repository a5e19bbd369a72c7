"""The ops on a device: held to fp64, to plain PyTorch in their own dtype, and to the CPU's bits; and their speed."""

import time
from collections.abc import Callable
from functools import partial

import torch
from shardlight.ops.adagrad import adagrad_step
from shardlight.ops.adam import adam_step
from shardlight.ops.lion import lion_step
from shardlight.ops.rmsprop import rmsprop_step
from shardlight.ops.sgd import sgd_step
from shardlight.ops.steps import Batch
from shardlight.ops.sums import cast, scale_and_check, square_sums, sum_in_rank_order
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (0, 1, 3, 255, 1023, 1024, 1025, *[5] * 60, 70_001)
STEPS = 3
LR = 1e-2


class PlainLion(Optimizer):
    """Chen et al. 2023, Algorithm 2, with PyTorch's operations."""

    def __init__(self, params: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Steps every parameter."""
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = torch.sign(b1 * m + (1 - b1) * p.grad)
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                m.copy_(b2 * m + (1 - b2) * p.grad)


_ADAM = {"betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
_SGD = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True}
_ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-4}
_RMSPROP = {"alpha": 0.9, "eps": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
_LION = {"betas": (0.9, 0.99), "weight_decay": 0.1}
RULES: dict[str, tuple[Callable[..., Optimizer], Callable[..., None], int]] = {
    "adamw": (partial(AdamW, **_ADAM), partial(adam_step, decoupled=True, **_ADAM), 2),
    "adam amsgrad": (partial(Adam, amsgrad=True, **_ADAM), partial(adam_step, decoupled=False, **_ADAM), 3),
    "sgd nesterov": (partial(SGD, **_SGD), partial(sgd_step, **_SGD), 1),
    "adagrad": (partial(Adagrad, **_ADAGRAD), partial(adagrad_step, **_ADAGRAD), 1),
    "rmsprop centered": (partial(RMSprop, centered=True, **_RMSPROP), partial(rmsprop_step, **_RMSPROP), 3),
    "lion": (partial(PlainLion, **_LION), partial(lion_step, **_LION), 1),
}
"""PyTorch's optimizer, our op, and how many states it has."""


def _given(dtype: torch.dtype, positive: bool) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    sets = [[torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS] for _ in range(STEPS + 1)]
    # Where two of them cancel, a sign is a matter of rounding.
    grads = [[(g.abs() + 0.1 if positive else g).to(dtype) for g in step] for step in sets[1:]]
    return [p.to(dtype) for p in sets[0]], grads


def _to(device: torch.device | torch.dtype, grads: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[g.to(device) for g in step] for step in grads]


def _run_torch(kind: Callable[..., Optimizer], params: list[Tensor], grads: list[list[Tensor]]) -> Tensor:
    held = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = kind(held, lr=LR)
    for step in grads:
        for p, g in zip(held, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return torch.cat([p.detach() for p in held])


def _run_ours(
    ours: Callable[..., None], states: int, params: list[Tensor], grads: list[list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Returns parameters, and everything that was written, as bytes."""
    held = [p.clone() for p in params]
    kept = tuple([torch.zeros_like(p) for p in held] for _ in range(states))
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in held]
    for number, step in enumerate(grads, 1):
        ours(Batch(params=held, grads=step, states=kept, numbers=[float(number)] * len(held), copies=copies), lr=LR)
    written = [torch.cat(column).view(torch.uint8).cpu() for column in (held, *kept, copies)]
    return torch.cat(held), torch.cat(written)


def check(device: torch.device) -> dict[str, dict[str, float]]:
    """Returns by op and dtype: `error_ratio`, the largest error over twice plain PyTorch's and a rounding, and
    `bytes_apart`, how many bytes are not those that the CPU gives.
    """
    found: dict[str, dict[str, float]] = {}
    for rule, (kind, ours, states) in RULES.items():
        for name, dtype in DTYPES.items():
            params, grads = _given(dtype, rule == "lion")
            here = [p.to(device) for p in params]
            true = _run_torch(kind, [p.double() for p in here], _to(torch.float64, _to(device, grads)))
            plain = _run_torch(kind, here, _to(device, grads)).double()
            mine, written = _run_ours(ours, states, here, _to(device, grads))
            _, on_cpu = _run_ours(ours, states, params, grads)
            rounding = torch.finfo(dtype).eps * true.abs()
            if dtype == torch.float64:
                # There is nothing wider to hold it to: what a dozen operations may differ by.
                rounding = 64 * rounding.clamp(min=torch.finfo(dtype).eps)
            allowed = 2 * (plain - true).abs().max() + rounding
            found[f"{rule} {name}"] = {
                "error_ratio": float(((mine.double() - true).abs() / allowed).nan_to_num(nan=float("inf")).max()),
                "bytes_apart": float((written != on_cpu).sum()),
            }
    for name, dtype in DTYPES.items():
        found[f"sums {name}"] = {"bytes_apart": float(sum(_apart(device, dtype, n) for n in (1, 17, 1000, 1024, 2500)))}
    return found


def _apart(device: torch.device, dtype: torch.dtype, chunk: int) -> int:
    """How many bytes of what the passes of ops/sums.py give differ from the CPU's, for chunks of that length."""
    generator = torch.Generator().manual_seed(chunk)
    parts = [torch.randn(40 * chunk + 1, generator=generator, dtype=torch.float64).to(dtype)[1:] for _ in range(3)]
    results = []
    for there in (torch.device("cpu"), device):
        flats = [part.to(there, copy=True) for part in parts]
        sums, bad = square_sums(flats[0], chunk, 0.3, 0.7)
        narrow = cast(flats[1], torch.empty_like(flats[1], dtype=torch.bfloat16))
        total = sum_in_rank_order(flats, torch.empty_like(flats[0]))
        finite = scale_and_check(flats[2], 0.37)
        told = torch.tensor([int(bad), int(finite)])
        outs = (sums, narrow, total, flats[2], told)
        results.append(torch.cat([o.contiguous().view(torch.uint8).cpu() for o in outs]))
    return int((results[0] != results[1]).sum())


# --- speed


def measure(device: torch.device, numel: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a call by way, one for each round: steps of AdamW, and copies of as many bytes.

    fp32: parameter, gradient and moments read, all but the gradient written. masters: the gradient is bf16, and a bf16
    copy is written as well. Both move 28 bytes per element.
    """
    make = partial(torch.zeros, numel, device=device)
    p, g, m, v = (make() for _ in range(4))
    g16, p16 = make(dtype=torch.bfloat16), make(dtype=torch.bfloat16)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
    held = torch.nn.Parameter(make())
    held.grad = g
    fused = AdamW([held], lr=1e-3, fused=True)
    # 14 bytes per element are read, and as many written.
    source, target = (torch.zeros(numel * 14 // 16 * 2, dtype=torch.float64, device=device) for _ in range(2))
    plain = Batch(params=[p], grads=[g], states=([m], [v]), numbers=[1.0])
    masters = Batch(params=[p], grads=[g16], states=([m], [v]), numbers=[1.0], copies=[p16])
    ways: dict[str, Callable[[], object]] = {
        "op fp32": lambda: adam_step(plain, **options),
        "op masters": lambda: adam_step(masters, **options),
        "torch fused": fused.step,
        "copy": lambda: target.copy_(source),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    # Two rounds more: the first ones warm up.
    for _ in range(rounds + 2):
        for name, call in ways.items():
            found[name].append(_seconds(call, device))
    return {name: seconds[2:] for name, seconds in found.items()}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000
