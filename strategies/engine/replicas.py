"""State that every rank keeps whole: module buffers and parameters that are not floating point."""

from collections.abc import Mapping

import torch
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.groups import Ranks
from torch import Tensor, nn


class Replicas:
    """Keeps module buffers equal on all ranks: rank 0's count, at the start and after each step that changed any.

    During a step each rank's own batch moves its buffers (BatchNorm statistics); as with DDP, rank 0's values are the
    ones that count.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model = model
        self.collectives = ranks.world
        # Then of all ranks of the tensor group the first one's, where each has made its own (without a seed).
        groups = [ranks.tensor, ranks.world] if ranks.world.rank == 0 else [ranks.world]
        for collectives in groups:
            for parameter in model.parameters():
                if not (parameter.is_floating_point() or parameter.is_complex()):
                    collectives.broadcast(parameter.data, "start values of an integer parameter")
            self._take(collectives)
        self._moving = False
        """Whether a step has changed any, on some rank."""
        self._note()

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [(n, b) for n, b in self.model.named_buffers() if b.numel()]

    def changed(self) -> bool:
        """Whether a buffer was written or replaced on this rank since the last synchronisation."""
        return {n: (id(b), b._version) for n, b in self._buffers()} != self._versions

    def synchronise(self) -> None:
        """Overwrites all buffers with rank 0's. Collective."""
        self._take(self.collectives)
        self._note()
        self._moving = True

    def _take(self, collectives: Collectives) -> None:
        if collectives.world_size == 1:
            return
        with torch.no_grad():
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for _, buffer in self._buffers():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            for group in by_dtype.values():
                flat = torch.cat([b.reshape(-1) for b in group]).to(collectives.device)
                collectives.broadcast(flat, "module buffers")
                for buffer, part in zip(group, flat.split([b.numel() for b in group]), strict=True):
                    buffer.copy_(part.view(buffer.shape))

    def _note(self) -> None:
        self._versions = {n: (id(b), b._version) for n, b in self._buffers()}

    def own(self) -> dict[str, Tensor]:
        """Returns by name the buffers of a state dict that may differ from rank 0's since the last synchronisation."""
        if self.collectives.rank == 0 or not (self._moving or self.changed()):
            return {}
        modules = dict(self.model.named_modules())
        places = [(n, *n.rpartition(".")[::2], b) for n, b in self._buffers()]
        return {n: b for n, path, last, b in places if last not in modules[path]._non_persistent_buffers_set}

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites buffers on this rank alone, by name."""
        buffers = dict(self._buffers())
        with torch.no_grad():
            for name, value in values.items():
                buffers[name].copy_(value.view(buffers[name].shape))
