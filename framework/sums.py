"""Sums over several sections of a config (batch sizes, ranks, steps), from all numbers that are right by themselves."""

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardlight.framework.check import BAD, Checker
from shardlight.framework.described import UNREADABLE, Described
from shardlight.framework.schema import SECTIONS
from shardlight.framework.source import Node
from shardlight.strategies.engine.mesh import Mesh
from shardlight.strategies.errors import MeshError
from shardlight.strategies.options import OPTIONS


class Sums:
    """Reads the numbers of a tree that take part in a sum, and says which sums do not come out.

    [Note: unknown numbers] A number whose own fault is reported is BAD: no sum that it is part of is looked at, and all
    others are. So one run of the check shows every fault.

    Args:
        tree: the config.
        checker: takes the faults.
        targets: the classes that are known, by section.
    """

    def __init__(self, tree: Node, checker: Checker, targets: Mapping[str, Described]) -> None:
        self.tree = tree
        self.checker = checker
        self.devices = self._number("trainer.devices")
        self.nodes = self._number("trainer.num_nodes")
        self.accumulate = self._number("trainer.accumulate_grad_batches")
        self.whole = self._number("trainer.global_batch_size")
        self.axes = self._axes()
        self.data = targets.get("data")
        self.batch = self._batch()

    @property
    def world_size(self) -> Any:
        """Processes of the run, or BAD."""
        return BAD if BAD in (self.devices, self.nodes) else self.devices * self.nodes

    @property
    def ranks(self) -> str:
        """The terms of `world_size`."""
        return f"trainer.devices {self.devices} x trainer.num_nodes {self.nodes}"

    @property
    def data_ranks(self) -> Any:
        """How many batches the ranks take at once, or BAD: those that a model is cut over take one."""
        if BAD in (self.world_size, *self.axes.values()) or self.world_size % math.prod(self.axes.values()):
            return BAD
        return self.world_size // math.prod(self.axes.values())

    @property
    def terms(self) -> str:
        """The terms of `data_ranks`."""
        cut = [f" / strategy.{self._key(axis)} {size}" for axis, size in self.axes.items() if size != 1]
        return self.ranks + "".join(cut)

    def _key(self, axis: str) -> str:
        """The option of the strategy that says how long an axis is."""
        return OPTIONS[self.tree.find("strategy.name").value].sizes[axis]  # type: ignore[union-attr]

    def _axes(self) -> dict[str, Any]:
        """How many ranks a model is cut over, by axis of the mesh; BAD where it is faulty."""
        name, found = self.tree.find("strategy.name"), {}
        options = None if name is None or not isinstance(name.value, str) else OPTIONS.get(name.value)
        for axis, key in (options.sizes if options is not None else {}).items():
            node = self.tree.find(f"strategy.{key}")
            value = getattr(options, key) if node is None else Checker([]).convert(node, int, f"strategy.{key}")
            found[axis] = value if value is not BAD and value >= 1 else BAD
        return found

    def _number(self, path: str, least: int = 1) -> Any:
        """A whole number of a section, its default where it is not set, BAD where it is faulty."""
        section, _, name = path.partition(".")
        field = next(field for field in dataclasses.fields(SECTIONS[section]) if field.name == name)
        block = self.tree.value.get(section)
        if block is not None and block.value is not None and not isinstance(block.value, dict):
            return BAD
        node = self.tree.find(path)
        if node is None:
            return field.default
        value = Checker([]).convert(node, int | None if field.default is None else int, path)
        return BAD if value is not BAD and value is not None and value < least else value

    def _batch(self) -> Any:
        """`data.batch_size`: what is written, else the default of the class; None: there is no such argument."""
        node, found = self.tree.find("data.batch_size"), None
        if self.data is not None:
            found = self.data.parameters.get("batch_size")
        if node is None:
            if self.data is None:
                return BAD
            default = None if found is None else found.default
            return None if default is inspect.Parameter.empty or default is UNREADABLE else default
        if self.data is not None and found is None:
            return BAD
        return Checker([]).convert(node, int, "data.batch_size")

    def accumulation(self) -> tuple[int | None, Any]:
        """Global batch = batch per rank x accumulation x ranks: checks it.

        Returns: micro-batches per step, and the origin of the number that they were derived from, or None.
        """
        if isinstance(self.batch, int) and self.batch < 1:
            home = self.tree.find("data.batch_size") or self.tree
            self.checker.fault(home, f"data.batch_size is {self.batch}; it must be at least 1.")
            return None, None
        if self.whole is None or self.whole is BAD:
            return (1 if self.accumulate in (None, BAD) else self.accumulate), None
        home = self.tree.find("trainer.global_batch_size") or self.tree
        if self.batch is not BAD and not isinstance(self.batch, int):
            named = self.tree.find("data.class")
            text = f"{named.value} has no such argument" if named and self.batch is None else f"it is {self.batch}"
            text = f"trainer.global_batch_size needs data.batch_size, a positive whole number, but {text}."
            self.checker.fault(home, text)
        if BAD in (self.batch, self.accumulate, self.data_ranks) or not isinstance(self.batch, int):
            return None, None
        if self.accumulate is None:
            return self._derived(home)
        product = self.batch * self.accumulate * self.data_ranks
        if product != self.whole:
            terms = f"data.batch_size {self.batch} x trainer.accumulate_grad_batches {self.accumulate} x {self.terms}"
            text = f"trainer.global_batch_size is {self.whole}, but {terms} = {product}."
            self.checker.fault(home, f"{text} Make them agree, or leave one out.")
        return self.accumulate, None

    def _derived(self, home: Node) -> tuple[int, Any]:
        divisor = self.batch * self.data_ranks
        if self.whole % divisor:
            terms = f"{divisor} = data.batch_size {self.batch} x {self.terms}"
            self.checker.fault(home, f"trainer.global_batch_size {self.whole} is not divisible by {terms}.")
        return max(1, self.whole // divisor), home.origin

    def warmup(self) -> None:
        """A schedule that falls needs room after its warmup, where the number of steps is known."""
        name = self.tree.find("schedule.name")
        if name is None or name.value not in ("linear", "cosine"):
            return
        warmup = self._number("schedule.warmup_steps", 0)
        home, steps = "schedule.total_steps", self._number("schedule.total_steps")
        if steps is None:
            home, steps = "trainer.max_steps", self._number("trainer.max_steps")
        if BAD in (warmup, steps) or steps is None or warmup < steps:
            return
        if home == "schedule.total_steps":
            return  # the section itself says so
        text = f"schedule.warmup_steps {warmup} does not fit into {home} {steps}."
        self.checker.fault(self.tree.find("schedule.warmup_steps") or self.tree, f"{text} Lower it, or train longer.")

    def single(self, node: Node, others: Iterable[str]) -> None:
        """`strategy: single` (at the node) needs one process; `others` are the strategies for more."""
        if self.world_size is BAD or self.world_size == 1:
            return
        text = f"strategy single runs in one process, but {self.ranks} = {self.world_size}."
        self.checker.fault(node, f"{text} Choose {', '.join(others)}, or set both to 1.")

    def shard_group(self, node: Node, size: int) -> None:
        """`strategy.shard_group` (at the node) has to divide the ranks that hold the same parameters."""
        if self.data_ranks is BAD or self.data_ranks % size == 0:
            return
        fits = [n for n in range(1, self.data_ranks + 1) if self.data_ranks % n == 0]
        ranks = f"{self.data_ranks} ranks{' of a stage' if self.axes.get('pipeline', 1) > 1 else ''}"
        text = f"{ranks} do not divide into groups of {size}. Use one of {fits}."
        self.checker.fault(node, f"strategy.shard_group is {size}: {text}")

    def mesh(self, node: Node) -> None:
        """The ranks have to divide into what a model is cut over (by the strategy at the node)."""
        if self.axes and BAD not in (self.world_size, *self.axes.values()):
            try:
                Mesh.over(self.world_size, **self.axes)
            except MeshError as error:
                cut = {self._key(axis): size for axis, size in self.axes.items() if size > 1}
                at = next((node.value[key] for key in cut if key in node.value), node.value["name"])
                said = " and ".join(f"strategy.{key} is {size}" for key, size in cut.items())
                self.checker.fault(at, f"{said}: {self.ranks} = {error}")

    def micro_batches(self, asked: Node, parts: int) -> None:
        """A batch has to have as many samples as `strategy.micro_batches` (at the node) cuts it into."""
        if isinstance(self.batch, int) and 1 <= self.batch < parts:
            text = f"strategy.micro_batches is {parts}, and data.batch_size only {self.batch}"
            self.checker.fault(asked, f"{text}. Set it to at most {self.batch}, or data.batch_size to more.")
