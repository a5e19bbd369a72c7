"""State that every rank keeps whole: module buffers and parameters that are not floating point."""

import torch
from shardlight.strategies.engine.collectives import Collectives
from torch import Tensor, nn


class Replicas:
    """Keeps module buffers equal on all ranks: rank 0's count, at the start and after each step that changed any.

    During a step each rank's own batch moves its buffers (BatchNorm statistics); as with DDP, rank 0's values are the
    ones that count.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self.model = model
        self.collectives = collectives
        for parameter in model.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                collectives.broadcast(parameter.data, "start values of an integer parameter")
        self.synchronise()

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [(n, b) for n, b in self.model.named_buffers() if b.numel()]

    def changed(self) -> bool:
        """Whether a buffer was written or replaced on this rank since the last synchronisation."""
        return {n: (id(b), b._version) for n, b in self._buffers()} != self._versions

    def synchronise(self) -> None:
        """Overwrites all buffers with rank 0's. Collective."""
        with torch.no_grad():
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for _, buffer in self._buffers():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            for group in by_dtype.values():
                if self.collectives.world_size == 1:
                    break
                flat = torch.cat([b.reshape(-1) for b in group]).to(self.collectives.device)
                self.collectives.broadcast(flat, "module buffers")
                for buffer, part in zip(group, flat.split([b.numel() for b in group]), strict=True):
                    buffer.copy_(part.view(buffer.shape))
        self._versions = {n: (id(b), b._version) for n, b in self._buffers()}
