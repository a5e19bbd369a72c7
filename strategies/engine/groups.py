"""Which ranks an engine exchanges what with: the same shards, replicas, other stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from shardlight.strategies.engine.choices import Transport
from shardlight.strategies.engine.collectives import Collectives


@dataclass(frozen=True)
class EngineGroups:
    """The process groups of an engine. Unset: state is sharded over all ranks, and nothing is replicated."""

    world: dist.ProcessGroup | None
    """The ranks that have the same parameters, and see different data."""
    shard: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None
    """All ranks; unset: those of `world`."""
    pipeline: dist.ProcessGroup | None = None
    """One rank per stage, which see the same data; unset: there is one stage."""
    tensor: dist.ProcessGroup | None = None
    """The ranks of one stage that see the same data, and have slices of the same parameters; unset: none has."""
    model: dist.ProcessGroup | None = None
    """The ranks that see the same data, and have the whole model together; unset: this rank alone."""
    stage: int = 0
    """Which stage this rank is at."""
    joint: Mapping[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    """By stages that share parameters, this rank's among them: all ranks of these stages."""


class Ranks:
    """The collectives of an engine: over all ranks, those that share one set of shards, and those that hold the same.

    With hybrid sharding (Zhang et al. 2022, MiCS, arXiv 2205.00119) a shard group has all shards of the model, and
    gradients of shards are added up over the replicate groups; else there is one shard group, and no replica.
    """

    def __init__(
        self,
        groups: EngineGroups,
        device: torch.device | str = "cpu",
        transport: Transport = "auto",
        together: Collectives | None = None,
    ) -> None:
        self.world = Collectives(groups.world, device, together, transport)
        shard, everyone = groups.shard, groups.everyone
        self.shard = self.world if shard is None else Collectives(shard, device, self.world, transport)
        self.replicate = Collectives(groups.replicate, device, self.world, transport)
        self.everyone = self.world if everyone is None else Collectives(everyone, device, self.world, transport)
        """All ranks, also those that have other parts of the model."""
        self.pipeline = Collectives(groups.pipeline, device, self.world, transport)
        """One rank of each stage."""
        self.tensor = Collectives(groups.tensor, device, self.world, transport)
        """The ranks that have slices of the same parameters."""
        known = {id(groups.pipeline): self.pipeline, id(groups.tensor): self.tensor}
        self.model = known.get(id(groups.model)) or Collectives(groups.model, device, self.world, transport)
        """The ranks that see the same data."""
        self.joint: dict[tuple[int, ...], Ranks] = {
            stages: Ranks(EngineGroups(group, tensor=groups.tensor), device, transport, self.world)
            for stages, group in sorted(groups.joint.items())
        }
        """By stages that share parameters: state of these is sharded over all ranks of these stages."""
        self._stage = groups.stage

    def counts(self, ranks: "Ranks") -> bool:
        """Whether what the ranks of a group hold together is counted on this rank's stage: the first that has it."""
        return ranks is self or any(r is ranks and stages[0] == self._stage for stages, r in self.joint.items())
