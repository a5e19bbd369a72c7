"""The rank's side of `shardlight bench infinity`: training from disk, a limit to memory, a step by itself."""

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardlight.framework.bench import meters
from shardlight.framework.bench.contenders import loop, torch_ddp
from shardlight.framework.bench.contenders.gpt import fixed_gpt, loss_of, optimizer_of, rows_of
from shardlight.framework.bench.contenders.ours import BUILDERS as OURS
from shardlight.framework.bench.contenders.ours import OurStrategy
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.framework.launch import STORE
from shardlight.ops.disk import BLOCK_BYTES, DiskFile, Request, aligned
from shardlight.strategies.engine.choices import Recompute
from shardlight.strategies.engine.deferred.tensors import deferred_init
from shardlight.strategies.engine.disk_tensor import DiskTensor, Region
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.offload import Offload, Tier
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.engine.window import StepResult
from torch import Tensor

SAMPLE_S = 0.02
"""Between two looks at how much memory this rank has."""
SETS = 4
"""Of buffers that plain reads and writes take turns with; one set is read while two others are written."""


class Watch:
    """Looks at the memory of this process again and again, and ends it at once when that is more than it may be.

    What counts is the proportional set size without pages of files, above what it was when this was made.

    Args:
        cap_bytes: None: it may be anything.
        verdict: the file that says so when a rank is ended.
    """

    def __init__(self, cap_bytes: int | None, verdict: Path | None) -> None:
        self._cap_bytes = cap_bytes
        self._verdict = verdict
        self._base = self._now()
        self.peak_bytes = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _now(self) -> int:
        found = meters.memory()
        return 0 if found is None else found["pss"]

    def _run(self) -> None:
        while True:
            held = self._now() - self._base
            self.peak_bytes = max(self.peak_bytes, held)
            if self._cap_bytes is not None and held > self._cap_bytes:
                if self._verdict is not None:
                    self._verdict.write_text(json.dumps({"rank": int(os.environ["RANK"]), "bytes": held}))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(SAMPLE_S)

    def gauges(self) -> dict[str, float]:
        """What this process has now, and has had at most."""
        return {"held_bytes": self._now() - self._base, "sampled_peak_bytes": self.peak_bytes}


class Deferred(OurStrategy):
    """zero3 on a model that is built without memory, with its state where it is told to be.

    Args:
        tier: of all kinds of state.
        staging_bytes: see Offload; None: its default.
    """

    def __init__(
        self, size: Size, tier: Tier = "device", recompute: Recompute = "no", staging_bytes: int | None = None
    ) -> None:
        with deferred_init():
            self.model = fixed_gpt(size)
        self.optimizer = optimizer_of(self.model)
        # The crew's own folder is on the disk that is measured.
        folder = str(Path(os.environ[STORE]).parent / "swap") if tier == "disk" else ""
        staging = {} if staging_bytes is None else {"staging_bytes": staging_bytes}
        offload = Offload(parameters=tier, gradients=tier, optimizer=tier, disk=folder, **staging)
        transforms = BlockTransforms(recompute=recompute)
        self.engine = Engine(self.model, PLANS["zero3"], dist.group.WORLD, transforms=transforms, offload=offload)
        self.engine.take_optimizer(self.optimizer)

    def counters(self) -> dict[str, float]:
        """What went to and came from disk, and what was waited for."""
        found = super().counters() | {"rank_wait_ms": 1000 * self.engine.collectives.waited_s}
        tiers = self.engine.tiers
        if tiers is not None:
            found["disk_wait_ms"] = 1000 * tiers.waited_s
            found["gathers_disk_bytes"] = tiers.gathers.read_bytes
            for kind, traffic in tiers.traffic.items():
                found[f"{kind}_disk_bytes"] = traffic.read_bytes + traffic.written_bytes
        return found


class SameRows:
    """A contender that trains on the first rows that it gets, under a watch: so its loss has to go down.

    Args:
        make: makes the contender.
    """

    def __init__(self, size: Size, make: Callable[[Size], loop.Contender], watch: Watch) -> None:
        self._watch = watch
        self._contender = make(size)
        self._rows: tuple[Tensor, Tensor] | None = None

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes a step on the first rows."""
        self._rows = self._rows or (tokens_BT, labels_BT)
        return self._contender.step(*self._rows)

    def counters(self) -> dict[str, float]:
        """The contender's."""
        return self._contender.counters()

    def gauges(self) -> dict[str, float]:
        """The contender's, and those of the watch."""
        return self._contender.gauges() | self._watch.gauges()


BUILDERS: loop.Builders = {
    "shardlight-zero3": OURS["shardlight-zero3"],
    "infinity, in memory": functools.partial(Deferred, tier="device"),
    "infinity": functools.partial(Deferred, tier="disk"),
}
"""Contenders whose steps are timed."""


def walled(staging_bytes: int | None) -> loop.Builders:
    """Returns those whose memory is limited; ours recompute their blocks, which the others need not get to."""
    return {
        "ddp": torch_ddp.ddp,
        "zero3": functools.partial(Deferred, recompute="blocks"),
        "infinity": functools.partial(Deferred, tier="disk", recompute="blocks", staging_bytes=staging_bytes),
    }


class RawTraffic:
    """Reads and writes what a streamed step does, in its order and sizes; what was read is written again.

    Args:
        held: that has taken a step.
    """

    def __init__(self, held: Deferred) -> None:
        engine, state = held.engine, held.optimizer.state
        assert engine.tiers is not None
        self._ranges: list[list[tuple[DiskFile, int, int, bool]]] = []
        """Of each range: file, offset, bytes, and whether it is written as well."""
        step = engine.tiers.range_numel
        for buffer in engine.buffers:
            slot = next(iter(buffer.pieces), None)
            if slot is None:
                continue
            moments = (state[buffer.params[slot]][name] for name in ("exp_avg", "exp_avg_sq"))
            parts = [(_region(buffer.shard), True), (_region(buffer.grad), False)]
            parts += [(_region(moment), True) for moment in moments]
            for low in range(0, buffer.layout.shard_numel, step):
                numel = min(step, buffer.layout.shard_numel - low)
                spans = [(r, r.at_byte + low * r.dtype.itemsize, numel * r.dtype.itemsize, w) for r, w in parts]
                self._ranges.append([(r.file, at, nbytes, w) for r, at, nbytes, w in spans])
        largest = max(nbytes for spans in self._ranges for _, _, nbytes, _ in spans)
        self._sets = [[aligned(largest) for _ in range(4)] for _ in range(SETS)]

    def run(self) -> None:
        """Does it once."""
        reads: list[list[Request]] = [[] for _ in self._sets]
        writes: list[list[Request]] = [[] for _ in self._sets]
        for number in range(len(self._ranges) + 1):
            if number < len(self._ranges):
                at = number % SETS
                _wait(writes[at])
                pairs = zip(self._ranges[number], self._sets[at], strict=True)
                reads[at] = [file.start_read(start, _whole(held, nbytes)) for (file, start, nbytes, _), held in pairs]
            if number:
                at = (number - 1) % SETS
                _wait(reads[at])
                pairs = zip(self._ranges[number - 1], self._sets[at], strict=True)
                writes[at] = [
                    file.start_write(start, _whole(held, nbytes))
                    for (file, start, nbytes, written), held in pairs
                    if written
                ]
        for requests in writes:
            _wait(requests)


def _region(tensor: Tensor | None) -> Region:
    assert isinstance(tensor, DiskTensor)
    return tensor.region


def _whole(held: Tensor, nbytes: int) -> Tensor:
    """Returns as much of a buffer as whole blocks of the disk take."""
    return held[: -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES]


def _wait(requests: list[Request]) -> None:
    for request in requests:
        request.wait()


class StepAlone:
    """The optimizer's step by itself: from disk, in memory, and only the traffic of it."""

    def __init__(self, size: Size) -> None:
        # Gradients of short rows are as many.
        self._size = replace(size, batch=dist.get_world_size(), sequence=min(size.sequence, 8))
        self._on_disk, self._in_memory = Deferred(size, "disk"), Deferred(size)
        for held in (self._on_disk, self._in_memory):
            for number in range(2):
                self._backward(held, number)
                _step(held)
        self._raw = RawTraffic(self._on_disk)

    def _backward(self, held: Deferred, number: int) -> None:
        """Gives it final gradients, and waits until they are in their place."""
        tokens_BT, labels_BT = rows_of(self._size, number, dist.get_rank(), dist.get_world_size())
        with held.engine.forward():
            loss = loss_of(held.model, tokens_BT, labels_BT)
        held.engine.backward(loss)
        held.engine.close_window()
        if held.engine.tiers is not None:
            held.engine.tiers.reap()

    def time(self, what: str, number: int) -> dict[str, float]:
        """Does one of "disk", "memory" and "raw" on all ranks at once; returns what it took of this one.

        Args:
            number: of the rows.
        """
        if what == "raw":
            return self._timed(self._raw.run)
        held = self._on_disk if what == "disk" else self._in_memory
        self._backward(held, number)
        before = held.counters()
        found, after = self._timed(lambda: _step(held)), held.counters()
        counted = [name for name in after if name.endswith(("_disk_bytes", "_wait_ms"))]
        return found | {name: after[name] - before[name] for name in counted}

    def _timed(self, work: Callable[[], None]) -> dict[str, float]:
        cpu_s = meters.cpu_s()
        dist.barrier()
        began_s = time.perf_counter()
        work()
        return {"step_ms": 1000 * (time.perf_counter() - began_s), "cpu_ms": 1000 * (meters.cpu_s() - cpu_s)}


def _step(held: Deferred) -> None:
    result = held.engine.step(held.optimizer)
    if result is not StepResult.STEPPED:
        raise ArithmeticError(f"the optimizer took no step: {result}")


def run(job: dict[str, Any], turns: Turns) -> None:
    """Trains, or steps alone.

    Args:
        job: see loop.run; `alone`: only steps; `watch`: who of `walled` trains, and what memory it may have.
    """
    size, watch = Size(**job["size"]), job.get("watch")
    torch.set_num_threads(1)
    if job.get("alone"):
        loop.start_group(int(os.environ["WORLD_SIZE"]), alone=True)
        stepping = StepAlone(size)
        for command in turns.requests():
            turns.reply(stepping.time(command["what"], command["number"]))
        dist.destroy_process_group()
        return
    builders: loop.Builders = BUILDERS
    if watch is not None:
        seen = Watch(watch["cap_bytes"], Path(watch["verdict"]))
        make = walled(watch["staging_bytes"])[watch["who"]]
        builders = {name: functools.partial(SameRows, make=make, watch=seen) for name in job["hosts"]}
    loop.run(job, turns, builders)
