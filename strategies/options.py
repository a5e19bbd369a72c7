"""The options of every strategy of the ZeRO table: their one list, with what their values may be.

No torch in here, so that a config can be checked without importing it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from shardlight.strategies.engine.choices import (
    Compile,
    KeepGathered,
    MomentsDtype,
    Norms,
    OptimizerKernel,
    Order,
    Override,
    Recompute,
    Transport,
)
from shardlight.strategies.engine.offload import Offload, Tier
from shardlight.strategies.engine.pipeline.balance import check_balance
from shardlight.strategies.engine.pipeline.schedules import SCHEDULES, check_setting
from shardlight.strategies.engine.plan import PLANS, Reduce
from shardlight.strategies.errors import StrategyError

REDUCE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every strategy of the ZeRO table."""

    reduce: Reduce | None = None
    """When gradients are reduced: `micro_batch` (less memory) or `window` (fewer bytes sent; keeps the full gradients
    over the window). Unset: `window` for single, ddp and zero1, `micro_batch` for zero2 and zero3."""

    units: tuple[str, ...] = ()
    """Class names of modules that are gathered and reduced as one unit each. Empty: the blocks of the model's repeated
    block lists."""

    shard_group: int | None = None
    """Hybrid sharding for zero1 to zero3: state is sharded within groups of this many ranks that follow each other (the
    devices of a node), and replicated across the groups: gathers stay within a group. Unset: sharded over all ranks."""

    keep_gathered: KeepGathered = "no"
    """zero3: how long a unit's weights stay after its forward. `no`: backward gathers them again (least memory).
    `backward`: to its backward. `window`: to the optimizer's step. Both send less, and hold up to all weights. `auto`:
    over the window for as many units as fit into half of the memory that is left when the first backward starts."""

    order: Order = "batch"
    """zero3, infinity: in which order micro-batches and units meet. `batch`: each batch goes through all units, and an
    accumulation of M batches gathers, or reads from disk, each unit's weights 2 M times. `layer`: a batch is cut into
    `micro_batches`, and each unit serves all of them before the next: it is gathered twice, whatever their number, and
    its gradients are reduced once. The activations of all of them are kept until backward: set recompute: blocks."""

    micro_batches: int | None = None
    """order: layer: parts of each rank's batch."""

    keep_small: int = 0
    """zero3: parameters of at most this many elements (biases, norms) stay whole on every rank and are never gathered
    for use; their gradients and optimizer state are sharded all the same. What they hold may be read and, alike on
    every rank, written between steps, as under zero2."""

    collectives: Transport = "auto"
    """What moves data between ranks on CPU. `auto`: memory that the ranks of a host share, where the compiled library
    is there (`shardlight ops`), and gloo between hosts. `gloo`: gloo alone."""

    optimizer_kernel: OptimizerKernel = "auto"
    """Who computes a step. `auto`: a compiled op where the optimizer is exactly AdamW, Adam, SGD, Adagrad, RMSprop or
    Lion, which gives the same numbers in one pass over memory (`shardlight ops`). `torch`: the optimizer itself."""

    moments_dtype: MomentsDtype | None = None
    """bfloat16: what the optimizer keeps of fp32 parameters from step to step (moments, momentum) takes half the
    memory, and 8 bits of precision. What changes by less than 1/512 of itself in a step does not change: with beta2 =
    0.999 a second moment never falls, and rises to twice its value at most. Set beta2 to 0.95; at 0.99 it comes to rest
    up to twice too large. For optimizers that a compiled op steps; an error with others. Unset: that of parameters."""

    recompute: Recompute = "no"
    """Whether the units' blocks keep only their inputs and run again in backward: less memory for activations, one more
    forward. `blocks_reentrant` is PyTorch's older kind, for blocks that its hooks on saved tensors do not suit."""

    compile: Compile = "no"
    """Whether the units' blocks are compiled by torch.compile; like blocks share one compilation."""

    compile_backend: str = "inductor"
    """Backend of torch.compile; `aot_eager` needs no C++ compiler (and gains nothing: it is for looking for faults)."""

    master: bool = True
    """With precision bf16-true: whether the optimizer works on fp32 master weights. False: on the bf16 weights, which
    takes less memory and loses small updates."""

    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype in which gradients are sent between ranks; they are summed in fp32 whatever is sent. Unset: the dtype they
    come in, and fp32 for sums over several micro-batches."""

    keep_fp32: tuple[str, ...] = ()
    """Names of modules whose weights zero1 to zero3 keep in fp32 under bf16-mixed and 16-mixed, e.g. a router that
    switches autocast off."""

    loss_scale: float = 65536.0
    """With precision 16-mixed: what the loss is multiplied by at first, so that no small gradient is lost in fp16."""

    loss_scale_growth_steps: int = 2000
    """Steps without an inf or NaN after which the loss scale doubles; each inf or NaN halves it. 0: it stays."""

    defer: bool | None = None
    """Whether the module is built without memory, and each unit gets its values when it is sharded: those of an
    ordinary construction. Unset: under zero3."""

    max_not_finite_steps: int = 10
    """Steps in a row that may be skipped because a gradient is inf or NaN; then training ends with an error. A step
    that lowers the loss scale does not count."""

    offload: Offload | None = None
    """zero1 to zero3: which state is in host memory or on disk between its uses. Unset: all is on the device."""

    force: bool = False
    """Start a fit even where its state cannot fit into the memory or the disk that are there, as `shardlight fit
    --force` does."""

    timeout_s: float = 600.0
    """Seconds after which a collective, or the arrival of all ranks at the start, fails instead of waiting on."""

    sizes: ClassVar[Mapping[str, str]] = {}
    """By axis of the mesh that a model is cut over, the option that says how many ranks."""

    @property
    def axes(self) -> dict[str, int]:
        """How many ranks a model is cut over, by axis of the mesh; nothing where every rank has all of it."""
        return {axis: getattr(self, name) for axis, name in self.sizes.items()}


@dataclass(frozen=True, kw_only=True)
class InfinityOptions(EngineOptions):
    """Options of infinity: those of zero3, and of `offload` with everything on disk."""

    disk: str = "swap"
    """Folder of the swap files, one per rank, best on a local NVMe disk. They have no name while they are in use, and
    are gone when their process ends, however that ends."""

    parameters: Tier = "disk"
    """Where the authoritative weights (fp32 masters under 16-bit precision) are."""

    gradients: Tier = "disk"
    """Where the reduced gradients of this rank's part are, from their reduction to the step."""

    optimizer: Tier = "disk"
    """Where what the optimizer keeps (moments) is."""

    staging_count: int = 4
    """Ranges of a streamed step that are read ahead, with the one that is computed. One ahead waits for the disk in a
    machine that has much to do; each more takes its weights, gradients and moments of memory."""

    staging_bytes: int = 4194304
    """Bytes of one tensor of a range."""


Zero = Literal[0, 1, 2, 3]
ROWS = ("ddp", "zero1", "zero2", "zero3")
"""The row of the ZeRO table for each value of the option `zero`."""


@dataclass(frozen=True, kw_only=True)
class StagedOptions(EngineOptions):
    """Options of what cuts a model into stages, and in which order micro-batches go through them."""

    schedule: Literal["auto", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"] = "1f1b"
    """In which order a rank runs forwards and backwards. `gpipe`: all forwards first (most memory). `1f1b`: a backward
    as soon as one can come. `interleaved_1f1b`: the same with several stages per rank, for a smaller bubble and more
    messages. `zb_h1`, `zbv`: backward in two parts, of which one fills what would be idle time. `auto`: the fastest on
    paper. `shardlight schedule CONFIG` draws them."""

    micro_batches: int | None = None
    """Parts of each rank's batch that go through the stages one after the other. Unset: twice the stages."""

    loss_over: Literal["micro_batch", "batch"] = "micro_batch"
    """gpipe: `batch` runs the step once on the whole batch behind the last block, for losses that compare its samples
    with each other (contrastive ones) and what is logged once. The step is to draw no random numbers before the model,
    and what the last block returns to have one row per sample. Validation and test still run by micro-batch."""

    chunks: int | None = None
    """interleaved_1f1b: stages per rank. Unset: 2."""

    balance: tuple[int, ...] = ()
    """Blocks of each stage, e.g. [5, 7]. Empty: so that the busiest rank has least to do, by sizes of matrices."""

    blocks: str | None = None
    """Name of the list of blocks that is cut, where the model has several, e.g. model.decoder.layers."""

    everywhere: tuple[str, ...] = ()
    """Names of modules or parameters outside of the blocks that every stage has, e.g. an embedding that blocks of later
    stages are given; their gradients are added up over the stages."""

    zero: Zero = 1
    """What the ranks that have the same part of the model shard among them, as ddp, zero1, zero2 and zero3 do."""

    keep_gathered: KeepGathered = "window"
    """zero: 3: how long a unit's weights stay, as under zero3. `window`: they are gathered once per step, whatever the
    number of micro-batches."""

    @property
    def per_batch(self) -> int:
        """Micro-batches of a batch."""
        return 2 * self.axes["pipeline"] if self.micro_batches is None else self.micro_batches


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(StagedOptions):
    """Options of pipeline."""

    stages: int = 2
    """Ranks that a batch goes through. The other factor of the number of ranks see different data."""

    sizes = {"pipeline": "stages"}


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """Options of what cuts matrices over the ranks of a tensor group."""

    plan: Mapping[str, Override] = field(default_factory=dict)
    """How layers are cut, by pattern of their name (`*.mlp.up: column`), where that is not found by itself: `column`
    (outputs are divided), `row` (inputs), `vocab` (words of an embedding or a head), `whole` (it is not cut, nor is
    anything in it). The first pattern that fits counts."""

    norms: Norms = "whole"
    """What is between the cut layers of blocks. `whole`: the same on all ranks of a group. `sharded`: divided along the
    sequence, which takes less memory for activations; as many bytes are sent."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions(CutOptions, EngineOptions):
    """Options of tensor: a model's matrices are cut over the ranks of a group."""

    size: int = 2
    """Ranks of a group, which see the same data. The other factor of the number of ranks see different data."""

    zero: Zero = 1
    """What the ranks that have the same part of the model shard among them, as ddp, zero1, zero2 and zero3 do."""

    sizes = {"tensor": "size"}


@dataclass(frozen=True, kw_only=True)
class MeshOptions(CutOptions, StagedOptions):
    """Options of mesh: several ways to cut a model at once; what they leave of the ranks see different data."""

    pipeline: int = 1
    """Stages that a batch goes through, as `stages` of pipeline."""

    tensor: int = 1
    """Ranks that matrices are cut over, as `size` of tensor; they follow each other."""

    sizes = {"pipeline": "pipeline", "tensor": "tensor"}


OPTIONS: dict[str, type[EngineOptions]] = {
    **dict.fromkeys(PLANS, EngineOptions),
    "infinity": InfinityOptions,
    "pipeline": PipelineOptions,
    "tensor": TensorOptions,
    "mesh": MeshOptions,
}
"""What options each strategy has, by its name in a config."""

_WITH_ZERO = ("pipeline", "tensor", "mesh")

ONLY_FOR: dict[str, tuple[tuple[str, ...], str]] = {
    "shard_group": (("zero1", "zero2", "zero3", "infinity", *_WITH_ZERO), "{} shards nothing"),
    "keep_gathered": (("zero3", "infinity", *_WITH_ZERO), "the weights of {} are always there"),
    "keep_small": (("zero3", "infinity", *_WITH_ZERO), "the weights of {} are always there"),
    "order": (("zero3", "infinity"), "{} gathers no weights from batch to batch"),
    "micro_batches": (("zero3", "infinity", "pipeline", "mesh"), "{} runs batches as they are"),
    "offload": (("zero1", "zero2", "zero3"), "{} keeps all state on the device, or has options of its own for it"),
}
"""Options that mean something to some strategies only: which, and why not to the others."""

_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "master": ("bf16-true",),
    "moments_dtype": ("32-true", "bf16-mixed", "16-mixed", "bf16-true"),
    "keep_fp32": ("bf16-mixed", "16-mixed"),
    "loss_scale": ("16-mixed",),
    "loss_scale_growth_steps": ("16-mixed",),
}


def without_effect(options: EngineOptions, precision: str) -> dict[str, str]:
    """Returns the options that are set but mean nothing with this precision: name to what is wrong, and the mend."""
    found = {}
    for entry in fields(options):
        precisions = _ONLY_WITH.get(entry.name, (precision,))
        if precision not in precisions and getattr(options, entry.name) != entry.default:
            found[entry.name] = (
                f"{entry.name} is for trainer.precision {' or '.join(precisions)}, which is {precision} here. "
                "Leave it out, or change the precision."
            )
    if options.compile == "no" and options.compile_backend != "inductor":
        found["compile_backend"] = "compile_backend is for compile: blocks. Leave it out, or set compile."
    return found


def _refuse_without_use(options: EngineOptions, strategy: str) -> None:
    for name, (strategies, why) in ONLY_FOR.items():
        if getattr(options, name) != getattr(EngineOptions, name) and strategy not in strategies:
            *some, last = strategies
            owners = f"{', '.join(some)} and {last}" if some else last
            raise StrategyError(f"{name} is for {owners}: {why.format(strategy)}. Leave it out.")


def offload_of(options: EngineOptions) -> Offload | None:
    """Returns where state is; None: all of it is on the device."""
    if isinstance(options, InfinityOptions):
        return Offload(**{entry.name: getattr(options, entry.name) for entry in fields(Offload)})
    return options.offload


def _check_offload(options: EngineOptions, strategy: str) -> None:
    offload = offload_of(options)
    if offload is None:
        return
    own = "" if isinstance(options, InfinityOptions) else "offload."
    for name, text in offload.faults().items():
        raise StrategyError(f"{own}{text}" if text.startswith(name) else f"{own}{name}: {text}")
    for name in ("parameters", "gradients", "optimizer"):
        if getattr(offload, name) not in get_args(Tier):
            raise StrategyError(
                f"{own}{name}={getattr(offload, name)!r} is not a tier: use {', '.join(get_args(Tier)[:-1])} or disk."
            )
    if offload.parameters != "device" and strategy in ("zero1", "zero2"):
        raise StrategyError(
            f"{own}parameters={offload.parameters!r} is for zero3 and infinity: {strategy} keeps all weights on every "
            "rank."
        )
    if offload.gradients == "disk" and strategy == "zero1":
        raise StrategyError(f"{own}gradients='disk' is for zero2 and up: zero1 keeps full gradients on every rank.")
    if offload.gradients == "disk" and options.reduce == "window":
        raise StrategyError(
            f"reduce='window' keeps full gradients in memory, and {own}gradients is disk: leave reduce out, or set "
            f"{own}gradients to device."
        )


def _check_parts(options: EngineOptions, strategy: str) -> None:
    """Refuses what no model can be cut by."""
    if not isinstance(options, StagedOptions | TensorOptions):
        return
    sizes = [(n, getattr(options, n)) for n in ("stages", "size", "pipeline", "tensor") if hasattr(options, n)]
    for name, value in sizes:
        if not isinstance(value, int) or value < 1:
            raise StrategyError(f"{name}={value!r} must be at least 1.")
    if options.zero not in range(len(ROWS)):
        raise StrategyError(f"zero={options.zero!r} is not an option of {strategy}: use 0, 1, 2 or 3.")
    for name, least in (("shard_group", 1), ("keep_gathered", 3), ("keep_small", 3)):
        if options.zero < least and getattr(options, name) != getattr(type(options), name):
            more = "zero: 3" if least == 3 else "zero: 1 to 3"
            raise StrategyError(f"{name} is for {more}, and zero is {options.zero}. Leave it out, or set zero.")
    if isinstance(options, CutOptions):
        _check_cut(options)
    if isinstance(options, StagedOptions):
        _check_stages(options, strategy)


def _check_cut(options: CutOptions) -> None:
    for name, how in options.plan.items():
        if how not in get_args(Override):
            raise StrategyError(
                f"plan: {{{name}: {how}}}: a layer is cut by {', '.join(get_args(Override)[:-1])}, or whole."
            )
    if options.norms not in get_args(Norms):
        raise StrategyError(f"norms={options.norms!r} is not an option: use 'whole' or 'sharded'.")
    if options.axes["tensor"] == 1 and (options.plan or options.norms != "whole"):  # type: ignore[attr-defined]
        name = "plan" if options.plan else "norms"
        raise StrategyError(f"{name} is for tensor: 2 or more. Leave it out, or set tensor.")
    if options.norms == "sharded" and options.axes.get("pipeline", 1) > 1:  # type: ignore[attr-defined]
        raise StrategyError(
            "norms='sharded' does not go with stages, which send each other whole activations. Leave it out."
        )
    if options.axes["tensor"] > 1 and options.compile != "no":  # type: ignore[attr-defined]
        raise StrategyError(
            "compile='blocks' does not go with matrices that are cut, whose layers exchange what they compute. Leave "
            "it out."
        )


_OF_STAGES = ("schedule", "micro_batches", "loss_over", "chunks", "balance", "blocks", "everywhere")


def _check_stages(options: StagedOptions, strategy: str) -> None:
    if options.axes["pipeline"] == 1 and strategy == "mesh":
        for name in _OF_STAGES:
            if getattr(options, name) != getattr(StagedOptions, name):
                raise StrategyError(f"{name} is for pipeline: 2 or more, and it is 1. Leave it out, or set pipeline.")
        return
    parts = options.micro_batches
    if parts is not None and (not isinstance(parts, int) or parts < 1):
        raise StrategyError(f"micro_batches={parts!r} must be at least 1.")
    if options.loss_over not in ("micro_batch", "batch"):
        raise StrategyError(
            f"loss_over={options.loss_over!r} is not an option of pipeline: use 'micro_batch' or 'batch'."
        )
    if options.loss_over == "batch" and options.schedule != "gpipe":
        raise StrategyError(
            f"loss_over='batch' needs schedule 'gpipe', which has all forwards before the first backward, and it is "
            f"{options.schedule!r}. Set schedule to gpipe, or leave loss_over out."
        )
    if options.reduce == "micro_batch":
        raise StrategyError(
            "reduce='micro_batch' is not for pipeline, whose gradients are reduced once per window. Leave it out."
        )
    if options.schedule != "auto":
        check_setting(options.schedule, options.axes["pipeline"], options.per_batch, options.chunks)
    elif options.chunks is not None and options.chunks < 1:
        raise StrategyError(f"chunks={options.chunks!r} must be at least 1.")
    _check_balance(options)


def _check_order(options: EngineOptions) -> None:
    parts = options.micro_batches
    if isinstance(options, StagedOptions):
        return
    if parts is not None and (not isinstance(parts, int) or parts < 1):
        raise StrategyError(f"micro_batches={parts!r} must be at least 1.")
    if options.order == "layer" and parts is None:
        raise StrategyError("order='layer' needs micro_batches: into how many parts a rank's batch is cut.")
    if options.order == "batch" and parts is not None:
        raise StrategyError(
            f"micro_batches={parts} is for order 'layer'. Set order to layer, or leave micro_batches out and set "
            "trainer.accumulate_grad_batches."
        )


def _check_balance(options: StagedOptions) -> None:
    """Refuses a `balance` that fits no model."""
    counts, ranks, name = options.balance, options.axes["pipeline"], options.schedule
    if not counts:
        return
    if name != "auto":
        chunks = check_setting(name, ranks, options.per_batch, options.chunks)
        check_balance(counts, sum(counts), SCHEDULES[name].place(ranks, chunks))
    elif len(counts) % ranks or min(counts) < 1:
        raise StrategyError(
            f"balance={list(counts)} must be blocks of each stage, at least 1: {ranks} numbers for one stage per rank, "
            f"{2 * ranks} for two."
        )


def make_options(kind: type[EngineOptions], strategy: str, given: dict[str, Any]) -> EngineOptions:
    """Makes the options of a strategy from keyword arguments.

    Raises: TypeError: an unknown keyword; StrategyError: an option's value is impossible.
    """
    options = kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})
    choices = {
        "reduce": (None, *get_args(Reduce)),
        "collectives": get_args(Transport),
        "optimizer_kernel": get_args(OptimizerKernel),
        "keep_gathered": get_args(KeepGathered),
        "order": get_args(Order),
        "recompute": get_args(Recompute),
        "compile": get_args(Compile),
        "moments_dtype": (None, *get_args(MomentsDtype)),
        "reduce_dtype": (None, *REDUCE_DTYPES),
    }
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            *some, last = (repr(a) for a in allowed if a is not None)
            names = f"{', '.join(some)} or {last}" if some else last
            raise StrategyError(f"{name}={value!r} is not an option of {strategy}: use {names}.")
    if options.max_not_finite_steps < 1:
        raise StrategyError(f"max_not_finite_steps={options.max_not_finite_steps!r} must be at least 1.")
    if options.shard_group is not None and options.shard_group < 1:
        raise StrategyError(f"shard_group={options.shard_group!r} must be at least 1 rank.")
    if options.keep_small < 0:
        raise StrategyError(f"keep_small={options.keep_small!r} must be 0 or more elements.")
    _refuse_without_use(options, strategy)
    _check_offload(options, strategy)
    _check_parts(options, strategy)
    _check_order(options)
    if options.loss_scale_growth_steps < 0:
        raise StrategyError(f"loss_scale_growth_steps={options.loss_scale_growth_steps!r} must be 0 or more.")
    if not 1.0 <= options.loss_scale < float("inf"):
        raise StrategyError(f"loss_scale={options.loss_scale!r} must be at least 1.")
    if not options.timeout_s > 0:
        raise StrategyError(f"timeout_s={options.timeout_s!r} must be above 0 seconds.")
    for entry in fields(options):
        if str(entry.type).startswith("tuple") and isinstance(getattr(options, entry.name), str):
            raise StrategyError(f"{entry.name}={getattr(options, entry.name)!r} must be a list of names.")
    return options
