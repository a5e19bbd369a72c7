"""The rank's side of `shardlight bench checkpoint`: who holds a model with its optimizer state, saves and loads it.

Values are known: element i of a tensor follows from i and from which tensor it is. So what is loaded can be checked on
any number of ranks, under any strategy.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shardlight.framework.bench import meters
from shardlight.framework.bench.contenders.fsdp2 import fsdp2
from shardlight.framework.bench.contenders.gpt import rows_of
from shardlight.framework.bench.contenders.loop import start_group
from shardlight.framework.bench.contenders.ours import OurStrategy
from shardlight.framework.bench.contenders.torch_ddp import PlainLoop
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.ops.crc32 import crc32_chunks
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.manifest import CHUNK_BYTES
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.plan import PLANS
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
PERIOD = 8191
"""Of the values; no number of columns divides by it."""

Part = tuple[Tensor, int, int]
"""A flat part of a tensor in memory, its first element's place in the whole, and the number of the tensor."""


def values_of(numel: int, start: int, number: int) -> Tensor:
    """Returns the values of elements [start, start + numel) of tensor `number`, exact in fp32."""
    return torch.arange(start, start + numel).remainder_(PERIOD).add_(number * 10_007).to(torch.float32)


class Held(Protocol):
    """A model with optimizer state that a rank has a part of."""

    def parts(self) -> Iterator[Part]:
        """Yields this rank's memory of weights and optimizer state."""

    def save(self, folder: Path) -> None:
        """Writes them, and waits until they are on disk."""

    def load(self, folder: Path) -> None:
        """Reads what any number of ranks has saved."""


class Ours:
    """A strategy of ours, through what `Trainer.save_checkpoint` calls."""

    def __init__(self, size: Size, strategy: str) -> None:
        self._held = OurStrategy(size, PLANS[strategy])
        _take_step(self._held, size)

    def parts(self) -> Iterator[Part]:
        """See Held."""
        engine, optimizer = self._held.engine, self._held.optimizer
        local = engine.local_parameters
        for number, parameter in enumerate(self._held.model.parameters()):
            if not engine.plan.shard_parameters:
                yield parameter.data.view(-1), 0, 3 * number
            elif (piece := engine.owned_piece(parameter)) is not None:
                yield piece[1], piece[0], 3 * number
            for place, moment in enumerate(MOMENTS, 1):
                if moment in optimizer.state[parameter]:
                    start, _ = local.span(parameter, optimizer)
                    yield optimizer.state[parameter][moment].view(-1), start, 3 * number + place

    def save(self, folder: Path) -> None:
        """See Held."""
        state = self._held.model.state_dict(keep_vars=True)
        checkpoint = {"epoch": 0, "global_step": 1, "state_dict": state, "optimizer_states": [{}]}
        trainer_state.save(self._held.engine, [self._held.optimizer], checkpoint, {}, folder)

    def load(self, folder: Path) -> None:
        """See Held. Every byte is compared with its checksum before anything is changed."""
        engine, reader = self._held.engine, CheckpointReader(folder)
        trainer_state.verify_together(engine, reader, evaluating=False)
        state = self._held.model.state_dict(keep_vars=True)
        trainer_state.load_model(engine, reader, state, reader.names("model/"), strict=True)
        trainer_state.load_optimizers(engine, reader, [self._held.optimizer])


class Raw:
    """Plain writes of another's memory: as many bytes, in as many files.

    Args:
        other: whose memory is written.
    """

    def __init__(self, other: Held) -> None:
        self._other = other
        self.files: dict[str, int] = {}
        """Name and bytes of each that this rank is to write; set before it saves."""

    def parts(self) -> Iterator[Part]:
        """See Held."""
        return self._other.parts()

    def save(self, folder: Path) -> None:
        """See Held."""
        memory = [memoryview(part.view(torch.uint8).numpy()) for part, _, _ in self.parts()]
        for name, nbytes in self.files.items():
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            left = nbytes
            try:
                while left:
                    for view in memory:
                        rest = view[:left]
                        while rest:
                            written = os.write(file, rest)
                            rest, left = rest[written:], left - written
                os.fsync(file)
            finally:
                os.close(file)

    def load(self, folder: Path) -> None:
        """Nothing is loaded so."""
        raise NotImplementedError


class Sharded:
    """FSDP2 with AdamW; saved by torch.distributed.checkpoint, which waits for the disk by default."""

    def __init__(self, size: Size) -> None:
        self._held: PlainLoop = fsdp2(size)
        _take_step(self._held, size)

    def parts(self) -> Iterator[Part]:
        """See Held."""
        for number, parameter in enumerate(self._held.model.parameters()):
            state = self._held.optimizer.state[parameter]
            for place, tensor in enumerate((parameter, *(state[m] for m in MOMENTS))):
                assert isinstance(tensor, DTensor)
                # Cut along the first dimension into equal parts, the last ones maybe shorter.
                rows = -(-tensor.shape[0] // dist.get_world_size())
                start = min(rows * dist.get_rank(), tensor.shape[0]) * (tensor.numel() // tensor.shape[0])
                yield tensor.to_local().detach().view(-1), start, 3 * number + place

    def save(self, folder: Path) -> None:
        """See Held."""
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """See Held."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        model, optimizer = self._held.model, self._held.optimizer
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._held.model, self._held.optimizer)
        return {"model": model, "optimizer": optimizer}


class Pickled:
    """The same state by torch.save: each rank a file of its own shards, which only that rank can read again.

    Args:
        other: who holds it.
    """

    def __init__(self, other: Held) -> None:
        self._other = other

    def parts(self) -> Iterator[Part]:
        """See Held."""
        return self._other.parts()

    def save(self, folder: Path) -> None:
        """See Held."""
        with (folder / self._name()).open("wb") as file:
            torch.save({str(number): part for part, _, number in self.parts()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        """See Held."""
        found = torch.load(folder / self._name(), weights_only=True)
        for part, _, number in self.parts():
            part.copy_(found[str(number)])

    def _name(self) -> str:
        return f"rank-{dist.get_rank()}.pt"


def _take_step(held: OurStrategy | PlainLoop, size: Size) -> None:
    """So that there is optimizer state; the rows are short."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    short = replace(size, batch=world_size, sequence=min(size.sequence, 8))
    held.step(*rows_of(short, 0, rank, world_size))
    held.optimizer.zero_grad()


@torch.no_grad()
def fill(held: Held, factor: float = 1.0) -> None:
    """Sets this rank's memory to the known values, times a factor."""
    for part, start, number in held.parts():
        part.copy_(values_of(part.numel(), start, number).mul_(factor))


def check(who: str, held: Held) -> None:
    """Raises ArithmeticError: this rank's memory does not have the known values."""
    for part, start, number in held.parts():
        if not torch.equal(part, values_of(part.numel(), start, number)):
            rank, world_size = dist.get_rank(), dist.get_world_size()
            raise ArithmeticError(f"{who}: wrong values on rank {rank} of {world_size}, in tensor {number}.")


def builders(size: Size, made: dict[str, Held]) -> dict[str, Callable[[], Held]]:
    """Returns how contenders are made, some of them around another one of `made`."""
    return {
        "zero3": lambda: Ours(size, "zero3"),
        "ddp": lambda: Ours(size, "ddp"),
        "raw zero3": lambda: Raw(made["zero3"]),
        "raw ddp": lambda: Raw(made["ddp"]),
        "dcp": lambda: Sharded(size),
        "torch.save": lambda: Pickled(made["dcp"]),
    }


def measured(work: Callable[[], object]) -> dict[str, Any]:
    """Does something on all ranks at once; returns what it took of this one."""
    meters.reset_peak()
    before, cpu_s = meters.memory(), meters.cpu_s()
    dist.barrier()
    began_s = time.perf_counter()
    work()
    lasted_s = time.perf_counter() - began_s
    used_s = meters.cpu_s() - cpu_s
    return {"seconds": lasted_s, "cpu_s": used_s, "memory": meters.above(before, meters.memory())}


def checksum_s(held: Held) -> float:
    """Returns the CPU time of one pass of checksums over this rank's memory."""
    began_s = meters.cpu_s()
    for part, _, _ in held.parts():
        crc32_chunks(part, CHUNK_BYTES)
    return meters.cpu_s() - began_s


def obey(command: dict[str, Any], size: Size, made: dict[str, Held]) -> dict[str, Any]:
    """Does what the benchmark says; returns the answer."""
    what, who, folder = command["do"], command["who"], Path(command.get("folder", ""))
    if what == "build":
        made[who] = builders(size, made)[who]()
        fill(made[who])
        return {}
    held = made[who]
    if what == "save":
        if isinstance(held, Raw):
            held.files = command["files"][dist.get_rank()]
        return measured(lambda: held.save(folder))
    if what == "load":
        return measured(lambda: held.load(folder))
    if what == "verify":
        share = dist.get_rank(), dist.get_world_size()
        return measured(lambda: CheckpointReader(folder).verify(share))
    if what == "checksum":
        return {"cpu_s": checksum_s(held)}
    fill(held, -1.0)
    held.load(folder)
    check(f"{who} from {folder.name}", held)
    return {}


def run(job: dict[str, Any], turns: Turns) -> None:
    """Answers the benchmark. Args: job: `size`, the fields of one."""
    start_group(int(os.environ["WORLD_SIZE"]), alone=True)
    made: dict[str, Held] = {}
    for command in turns.requests():
        turns.reply(obey(command, Size(**job["size"]), made))
    dist.destroy_process_group()
