"""The ops: what each is, and which version of it runs on a device, and why. Told without PyTorch.

One stem per op: its PyTorch reference is in `ops/STEM.py`, its arithmetic in `ops/csrc/STEM.h`, compiled for CPU from
`ops/csrc/cpu/STEM.cpp` and for CUDA from `ops/csrc/cuda/STEM.cu`.
"""

from dataclasses import dataclass

from shardlight.ops.built import OPS_VARIABLE, Device, OpError, choice, library, why_no_ring, why_not, why_not_shared


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the table.

    Attributes:
        stem: of its files.
        what: what it does, for people.
        devices: those that there is compiled code for.
    """

    stem: str
    what: str
    devices: tuple[Device, ...] = ("cpu", "cuda")

    def why_not(self, device: Device) -> str | None:
        """Returns why the PyTorch reference runs on a device instead of compiled code; None: compiled code runs."""
        if device not in self.devices:
            return f"there is no compiled version for {device.upper()}"
        return why_not_shared() if self.stem == "host_collectives" else why_not(device)

    def how(self) -> str:
        """Returns what is to be said of compiled code that runs."""
        return f"it loads, {why_no_ring() or 'with io_uring'}" if self.stem == "disk" else "it loads"

    def native(self, device: str) -> bool:
        """Whether compiled code runs on a device.

        Raises: OpError: SHARDLIGHT_OPS=native asks for it, and it is not there.
        """
        if device not in ("cpu", "cuda"):
            return False
        reason = self.why_not(device)
        if reason is not None and choice() == "native":
            raise OpError(
                f"ops.{self.stem} has no compiled version for {device.upper()}: {reason}. Or set {OPS_VARIABLE}=auto."
            )
        return reason is None


OPS = {
    op.stem: op
    for op in (
        Op(stem="adam", what="AdamW and Adam: scale, clip, decay, update, copy"),
        Op(stem="sgd", what="SGD: the same"),
        Op(stem="adagrad", what="Adagrad: the same"),
        Op(stem="rmsprop", what="RMSprop: the same"),
        Op(stem="lion", what="Lion: the same"),
        Op(stem="sums", what="sums over ranks, squares with a count of what is not finite, scaling, casts"),
        Op(stem="crc32", what="CRC-32 of memory, else zlib's", devices=("cpu",)),
        Op(stem="host_collectives", what="collectives of a host's ranks, else gloo", devices=("cpu",)),
        Op(stem="disk", what="reads and writes of files beside computing, else Python's", devices=("cpu",)),
    )
}


def table() -> list[dict[str, str]]:
    """Returns a row per op: what it is, what is built for CPU and for CUDA, which version runs on each, and why."""
    rows = []
    for op in OPS.values():
        reasons = {device: op.why_not(device) for device in op.devices}
        there = {d: "built" if library(d) is not None else "not built" for d in op.devices}
        rows.append(
            {
                "op": op.stem,
                "what": op.what,
                "CPU": there["cpu"],
                "CUDA": there.get("cuda", "none"),
                "chosen": "; ".join(f"{d.upper()}: {'reference' if why else 'native'}" for d, why in reasons.items()),
                "why": "; ".join(f"{d.upper()}: {why or op.how()}" for d, why in reasons.items()),
            }
        )
    return rows


def check() -> None:
    """Raises OpError where the environment asks for what there is not; for a command's start."""
    OPS["sums"].native("cpu")
    choice()
