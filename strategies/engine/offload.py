"""Which tier of memory each kind of state lives in. No torch in here: a config is checked without importing it."""

from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "host", "disk"]
"""Where state is between its uses. Without a GPU `device` and `host` are the same memory."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """The home tier of each kind of state, and how what is on disk comes through memory."""

    parameters: Tier = "device"
    """zero3: the authoritative weights (fp32 masters under 16-bit precision). `disk`: a unit's are read when it is
    gathered, while the unit before computes."""

    gradients: Tier = "device"
    """The reduced gradients of this rank's part, from their reduction to the step."""

    optimizer: Tier = "device"
    """What the optimizer keeps (moments); for zero1 and zero2 also fp32 masters. `disk`: a step streams it range by
    range, the next one read and the last one written meanwhile."""

    disk: str = ""
    """Folder of the swap files, one per rank, best on a local NVMe disk. They have no name while they are in use, and
    are gone when their process ends, however that ends."""

    staging_count: int = 4
    """Ranges of a streamed step that are read ahead, with the one that is computed. One ahead waits for the disk in a
    machine that has much to do; each more takes its weights, gradients and moments of memory."""

    staging_bytes: int = 4194304
    """Bytes of one tensor of a range."""

    @property
    def uses_disk(self) -> bool:
        """Whether any state is on disk."""
        return "disk" in (self.parameters, self.gradients, self.optimizer)

    @property
    def elsewhere(self) -> bool:
        """Whether any state is not on the device."""
        return {self.parameters, self.gradients, self.optimizer} != {"device"}

    def faults(self) -> dict[str, str]:
        """Returns what cannot be, by field: what is wrong, and the mend."""
        found = {}
        if self.uses_disk and not self.disk:
            found["disk"] = "disk is missing: state is to be on disk. Name a folder for swap files, as in disk: swap."
        if self.disk and not self.uses_disk:
            found["disk"] = (
                "disk is set, but no state is to be there: set parameters, gradients or optimizer to disk, or leave it "
                "out."
            )
        if self.staging_count < 1:
            found["staging_count"] = f"staging_count={self.staging_count} must be at least 1."
        if self.staging_bytes < 1:
            found["staging_bytes"] = f"staging_bytes={self.staging_bytes} must be at least 1 byte."
        return found
