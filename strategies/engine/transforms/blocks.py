"""What is done to a model's blocks before they are sharded, in one order: compilation, and recomputation around it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from shardlight.strategies.engine.choices import Compile, Recompute
from shardlight.strategies.engine.transforms.compile import compile_blocks, keep_engine_out
from shardlight.strategies.engine.transforms.recompute import recompute
from shardlight.strategies.engine.transforms.tensor.sharded import ParameterPart
from shardlight.strategies.errors import StrategyError
from torch import nn


@dataclass(frozen=True, kw_only=True)
class BlockTransforms:
    """Choices for the blocks of a model; see EngineOptions."""

    recompute: Recompute = "no"
    compile: Compile = "no"
    compile_backend: str = "inductor"

    def apply(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        around: Callable[[], AbstractContextManager[Any]],
        prepare: Callable[[nn.Module], None] | None,
    ) -> Callable[[], None]:
        """Changes the blocks' forwards; returns a function that undoes it.

        Args:
            around: see `recompute`.
            prepare: see `compile_blocks`.
        Raises: StrategyError: there are no blocks, or they are cut over a tensor group and are to be compiled.
        """
        if self.compile != "no" and any(isinstance(p, ParameterPart) for p in model.parameters()):
            raise StrategyError(
                f"compile={self.compile!r}: the model's matrices are cut over a tensor group, and what its code sees "
                "between them cannot be compiled. Set compile to 'no'."
            )
        for option, value in (("recompute", self.recompute), ("compile", self.compile)):
            if value != "no" and not blocks:
                raise StrategyError(
                    f"{option}={value!r}: the model has no blocks (a ModuleList or Sequential with two or more "
                    f"children of one class). Name the classes of its blocks in strategy.units, or set {option} to "
                    "'no'."
                )
        keep_engine_out()
        undos: list[Callable[[], None]] = []
        if self.compile == "blocks":
            undos.append(compile_blocks(blocks, prepare, self.compile_backend))
        if self.recompute != "no":
            undos.append(recompute(model, blocks, around, reentrant=self.recompute == "blocks_reentrant"))

        def undo() -> None:
            for step in reversed(undos):
                step()

        return undo
