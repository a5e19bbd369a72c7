"""The sizes of the benchmark model and of a run; no torch, since the command itself does not need it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT and how much of it is measured."""

    name: str
    vocabulary: int
    width: int
    blocks: int
    heads: int
    sequence: int
    """Tokens per row."""
    batch: int
    """Rows per step, of all ranks together."""
    rounds: int = 15
    """Turns that each contender gets."""
    steps_per_turn: int = 1

    @property
    def numel(self) -> int:
        """Number of parameters; the head is not tied."""
        block = 12 * self.width * self.width + 13 * self.width
        return (2 * self.vocabulary + self.sequence + 2) * self.width + self.blocks * block

    @property
    def tokens(self) -> int:
        """Tokens per step, of all ranks together."""
        return self.batch * self.sequence

    @property
    def activation_bytes(self) -> int:
        """About what all ranks together keep for backward, with the logits and their gradient; for planning only."""
        return self.tokens * (self.blocks * self.width * 34 * 4 + self.vocabulary * 4 * 3)


SIZES = {
    size.name: size
    for size in (
        Size(name="tiny", vocabulary=2048, width=192, blocks=6, heads=6, sequence=128, batch=8, steps_per_turn=2),
        Size(name="small", vocabulary=6144, width=512, blocks=6, heads=8, sequence=128, batch=8),
        Size(name="medium", vocabulary=25600, width=768, blocks=12, heads=12, sequence=128, batch=4, rounds=5),
    )
}
