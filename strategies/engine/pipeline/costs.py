"""What a micro-batch costs: time and bytes of each stage, and of each part of a model that stages are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardlight.strategies.engine.pipeline.schedules import Action, Kind


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one micro-batch costs on each stage: seconds, or any other unit of time, and bytes.

    Attributes:
        forward, backward_input, backward_weight: time per stage.
        backward: time per stage of both backwards in one; None: the sum of the two.
        communication: time from the end of an action until what it sends has arrived; ranks compute meanwhile.
        activation_bytes: per stage, kept from a forward until its backward.
        held_bytes: per stage, what a split backward still keeps of that for the weights' gradients; None: all of it.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    communication: float = 0.0
    activation_bytes: tuple[float, ...]
    held_bytes: tuple[float, ...] | None = None

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        communication: float = 0.0,
        activation_bytes: float = 1.0,
        held_bytes: float | None = None,
    ) -> "Costs":
        """Returns the same costs for every stage; by default each of the three parts takes 1."""
        return cls(
            forward=(forward,) * stages,
            backward_input=(backward_input,) * stages,
            backward_weight=(backward_weight,) * stages,
            communication=communication,
            activation_bytes=(activation_bytes,) * stages,
            held_bytes=None if held_bytes is None else (held_bytes,) * stages,
        )

    def of(self, action: Action) -> float:
        """Returns the time that an action takes."""
        stage = action.stage
        if action.kind == Kind.FORWARD:
            return self.forward[stage]
        if action.kind == Kind.BACKWARD_INPUT:
            return self.backward_input[stage]
        if action.kind == Kind.BACKWARD_WEIGHT:
            return self.backward_weight[stage]
        return (
            self.backward_input[stage] + self.backward_weight[stage] if self.backward is None else self.backward[stage]
        )


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """What one micro-batch costs in one part of a model: a block, or all before the first or behind the last one.

    Attributes: those of `Costs`, for this part alone.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    backward: float | None = None
    activation_bytes: float = 0.0
    held_bytes: float | None = None

    @property
    def joint(self) -> float:
        """The time of both backwards in one."""
        return self.backward_input + self.backward_weight if self.backward is None else self.backward

    @property
    def time(self) -> float:
        """The time of forward and backward, which is what stages are balanced by."""
        return self.forward + self.joint


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """What one micro-batch costs in a model of blocks.

    Attributes:
        before: embedding and whatever else is on the first stage only.
        after: head and loss, on the last stage only.
        communication: as in `Costs`.
    """

    blocks: tuple[PartCosts, ...]
    before: PartCosts = PartCosts()
    after: PartCosts = PartCosts()
    communication: float = 0.0

    def of_stages(self, counts: Sequence[int]) -> Costs:
        """Returns the costs of stages of so many blocks each."""
        stages = [list(self.blocks[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
        stages[0].insert(0, self.before)
        stages[-1].append(self.after)

        def total(name: str) -> tuple[float, ...]:
            return tuple(sum(getattr(part, name) for part in stage) for stage in stages)

        held = ([p.activation_bytes if p.held_bytes is None else p.held_bytes for p in stage] for stage in stages)
        return Costs(
            forward=total("forward"),
            backward_input=total("backward_input"),
            backward_weight=total("backward_weight"),
            backward=total("joint"),
            communication=self.communication,
            activation_bytes=total("activation_bytes"),
            held_bytes=tuple(map(sum, held)),
        )
