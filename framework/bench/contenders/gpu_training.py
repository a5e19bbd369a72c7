"""The engine on one device beside plain PyTorch: the same losses, weights and bytes, in each precision."""

import copy
import gc
from collections.abc import Callable

import torch
from shardlight.framework.bench.contenders.gpt import fixed_gpt, loss_of, optimizer_of, rows_of
from shardlight.framework.bench.sizes import Size
from shardlight.strategies.engine.dtypes import AS_THEY_ARE, DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import FP32, MASTERED, PLANS
from torch import Tensor, nn

MAX_NORM = 1.0
POLICIES = {
    "fp32": AS_THEY_ARE,
    "bf16-mixed": DtypePolicy(compute=torch.bfloat16, mixed=True),
    "bf16-true": DtypePolicy(compute=torch.bfloat16),
}
Steps = Callable[[Tensor, Tensor], Tensor]
"""Takes a step on tokens and labels; returns the loss."""


def _autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed")


def _plain(device: torch.device, size: Size, precision: str) -> tuple[Steps, Callable[[], list[Tensor]]]:
    """Returns a step of PyTorch alone, and the fp32 weights that it updates."""
    weights = fixed_gpt(size).to(device)
    model: nn.Module = copy.deepcopy(weights).to(torch.bfloat16) if precision == "bf16-true" else weights
    optimizer = optimizer_of(weights)

    def step(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with _autocast(device, precision):
            loss = loss_of(model, tokens_BT, labels_BT)
        loss.backward()
        if model is not weights:
            for master, narrow in zip(weights.parameters(), model.parameters(), strict=True):
                assert narrow.grad is not None
                master.grad, narrow.grad = narrow.grad.float(), None
        nn.utils.clip_grad_norm_(weights.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if model is not weights:
            with torch.no_grad():
                for master, narrow in zip(weights.parameters(), model.parameters(), strict=True):
                    narrow.copy_(master)
        return loss.detach()

    return step, lambda: [p.detach().flatten() for p in weights.parameters()]


class _Ours:
    """The same under the engine."""

    def __init__(self, device: torch.device, size: Size, precision: str, plan: str) -> None:
        self.model = fixed_gpt(size).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer_of(self.model)
        self.engine = Engine(self.model, PLANS[plan], None, dtypes=POLICIES[precision])
        self.engine.take_optimizer(self.optimizer)
        self.autocast = _autocast(device, precision)

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Takes a step; returns the loss."""
        with self.engine.forward(), self.autocast:
            loss = loss_of(self.model, tokens_BT, labels_BT)
        self.engine.backward(loss)
        self.engine.clip(self.optimizer, MAX_NORM)
        self.engine.step(self.optimizer)
        return loss.detach()

    def weights(self) -> list[Tensor]:
        """Returns the fp32 weights that are updated; of one rank, all of them."""
        pieces = map(self.engine.owned_piece, self.parameters)
        return [piece[1] for piece in pieces if piece is not None]


def _train(device: torch.device, size: Size, steps: int, step: Steps) -> list[float]:
    batches = ([t.to(device) for t in rows_of(size, number, 0, 1)] for number in range(steps))
    return [float(step(*batch)) for batch in batches]


def _flat(weights: list[Tensor]) -> Tensor:
    return torch.cat([w.detach().flatten().float().cpu() for w in weights])


class _Allocated:
    """Bytes of a GPU's memory above what was taken at the start; nothing on CPU, whose allocator does not tell."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._base = torch.cuda.memory_allocated(device)

    def figures(self) -> dict[str, float]:
        """Returns `peak_allocated_bytes` and `steady_allocated_bytes`."""
        if self._device.type != "cuda":
            return {}
        now, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return {"peak_allocated_bytes": peak - self._base, "steady_allocated_bytes": now - self._base}


def check(
    device: torch.device, size: Size, precision: str, plans: list[str], steps: int
) -> dict[str, dict[str, float]]:
    """Returns figures by plan, and of PyTorch alone as "torch".

    `loss_apart`: the largest difference of a step's loss. `weights_apart`: the mean difference of a weight after the
    steps, divided by how far it has moved. `state_bytes`: of weights, gradients and moments, counted after a step, and
    `table_state_bytes`, as the ZeRO table says.
    """
    _train(device, size, 1, _plain(device, size, precision)[0])  # what libraries allocate with their first use
    start = _flat(list(fixed_gpt(size).parameters()))
    allocated = _Allocated(device)
    step, weights = _plain(device, size, precision)
    losses, ended = _train(device, size, steps, step), _flat(weights())
    found = {"torch": allocated.figures()}
    del step, weights
    moved = float((ended - start).abs().mean())
    for plan in plans:
        allocated = _Allocated(device)
        ours = _Ours(device, size, precision, plan)
        theirs = _train(device, size, steps, ours.step)
        engine, numel = ours.engine, len(start)
        widths = MASTERED if precision == "bf16-true" else FP32
        # Under mixed precision only some weights have copies.
        copies = sum(b.full.nbytes for b in engine.buffers if b.mastered and b.filled and precision == "bf16-mixed")
        found[plan] = allocated.figures() | {
            "loss_apart": max(abs(a - b) for a, b in zip(losses, theirs, strict=True)),
            "weights_apart": float((_flat(ours.weights()) - ended).abs().mean()) / moved,
            "state_bytes": engine.state_bytes([ours.optimizer]),
            "table_state_bytes": engine.plan.state_bytes(numel, 1, widths) + copies,
        }
        engine.detach()
        del ours, engine
    return found
