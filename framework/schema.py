"""The schema of a config file: frozen dataclasses, closed at every level; each field's docstring is its documentation.

No torch in here, so that a config can be checked without importing it.

`optimizer` and `schedule` are defined beside their owner in optim.py, the options of a strategy beside the strategy.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from typing import Any, Literal

from shardlight.framework.classes import ClassConfig
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes: a new folder dir/name/NNN for each run, counted up."""

    name: str | None = None
    """Folder of all runs of this kind. Unset: the name of the folder the config lies in."""
    dir: str = "runs"
    """Folder of all runs, relative to the working directory."""

    def __post_init__(self) -> None:
        if self.name is not None and (self.name in ("", ".", "..") or set(self.name) & {"/", "\\", "\0"}):
            raise ValueError(f"run: name is {self.name!r}; it must be the name of one folder, without slashes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """How model state is laid out over the ranks."""

    name: str
    """single (one process), ddp, zero1, zero2 or zero3."""
    options: Any
    """The strategy's own options: an instance of its dataclass, see OPTIONS."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The training loop: processes, length, batches, validation and logging."""

    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live. auto: cuda where there is one, else cpu."""
    devices: int = 1
    """Processes per node, one per device."""
    num_nodes: int = 1
    """Nodes; more than one needs torchrun or SLURM to start the processes."""
    max_steps: int | None = None
    """Optimizer steps after which training ends. One of max_steps and max_epochs must be set."""
    max_epochs: int | None = None
    """Passes over the training data after which training ends."""
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true"] = "32-true"
    """Type of parameters and arithmetic. bf16-mixed: parameters and optimizer in fp32, matrix products in bf16.
    bf16-true: everything in bf16, the optimizer too (there are no fp32 master weights)."""
    accumulate_grad_batches: int | None = None
    """Micro-batches per optimizer step on each rank. Unset: from global_batch_size, else 1."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks: data.batch_size x accumulate_grad_batches x devices x num_nodes."""
    gradient_clip_val: float | None = None
    """Largest global gradient norm (or value, see gradient_clip_algorithm). Unset: no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    """norm scales all gradients to the norm; value clamps each element."""
    val_check_interval: int | float | None = None
    """Validate every so many training batches, or after this fraction of an epoch. Unset: at the end of an epoch."""
    check_val_every_n_epoch: int | None = 1
    """Validate in every n-th epoch. null: val_check_interval counts batches across epochs."""
    limit_train_batches: int | float | None = None
    """At most so many training batches per epoch and rank, or this fraction. Unset: all."""
    limit_val_batches: int | float | None = None
    """At most so many validation batches per rank, or this fraction; 0 for no validation. Unset: all."""
    limit_test_batches: int | float | None = None
    """At most so many test batches per rank, or this fraction. Unset: all."""
    limit_predict_batches: int | float | None = None
    """At most so many prediction batches per rank, or this fraction. Unset: all."""
    log_every_n_steps: int = 10
    """Optimizer steps between two entries in the logs."""
    num_sanity_val_steps: int = 2
    """Validation batches run before training, so that a fault there shows at once; 0 for none, -1 for all."""
    enable_progress_bar: bool = True
    """Show progress: a bar on a terminal, plain lines elsewhere."""
    deterministic: bool = False
    """Only use deterministic algorithms; an operation that has none raises."""
    detect_anomaly: bool = False
    """Let autograd name the operation that made a NaN; slow."""

    def __post_init__(self) -> None:
        least = {"devices": 1, "num_nodes": 1, "max_steps": 1, "max_epochs": 1, "accumulate_grad_batches": 1}
        least |= {"global_batch_size": 1, "log_every_n_steps": 1, "num_sanity_val_steps": -1}
        least |= {"check_val_every_n_epoch": 1, "gradient_clip_val": 0}
        faults = [
            f"{name} is {getattr(self, name)}; it must be at least {bound}"
            + (" (or left out, for no limit)" if name in ("max_steps", "max_epochs") else "")
            for name, bound in least.items()
            if getattr(self, name) is not None and not getattr(self, name) >= bound
        ]
        for name in (field.name for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if not (name.startswith("limit_") or name == "val_check_interval") or value is None:
                continue
            if value == 0 and name == "limit_train_batches":
                faults.append(f"{name} is 0; nothing would be trained")
            elif value < 0:
                faults.append(f"{name} is {value}; it must be at least 0")
            elif isinstance(value, float) and value > 1:
                faults.append(f"{name} is {value}; a fraction is at most 1.0, so write {int(value)} for batches")
        if faults:
            raise ValueError("trainer: " + "; ".join(faults))

    @property
    def world_size(self) -> int:
        """Processes of a run: devices x num_nodes."""
        return self.devices * self.num_nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves its state, into the folder checkpoints/ of the run."""

    every_n_steps: int | None = None
    """Save every so many optimizer steps. Unset: after each validation, or at the end of each epoch."""
    monitor: str | None = None
    """Logged value that decides which checkpoints are kept, such as val/loss. Unset: the latest."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest monitored value is the best."""
    save_top_k: int = 1
    """Checkpoints kept; -1 for all, 0 for none."""
    save_last: bool = False
    """Also keep the newest one as checkpoints/last."""
    export_every_n_steps: int | None = None
    """Write full weights to exports/step-N of the run every so many optimizer steps, as `shardlight export` would; in
    the layout of from_pretrained where the module wraps a transformers model. All are kept. Unset: never."""
    export_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of floating point numbers in those exports."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("every_n_steps", "export_every_n_steps")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        if self.save_top_k < -1:
            faults.append(f"save_top_k is {self.save_top_k}; it must be at least -1")
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            faults.append(f"save_top_k is {self.save_top_k}; without monitor it must be -1, 0 or 1")
        if self.monitor is None and self.mode != "min":
            faults.append(f"mode is {self.mode}; it is for monitor, which is not set")
        if faults:
            raise ValueError("checkpoint: " + "; ".join(faults))


AUTO = "auto"
"""`resume: auto`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitFromConfig:
    """Where the first weights come from; nothing else is taken from there (no optimizer state, no position)."""

    path: str
    """A .safetensors file, a folder with one or with its index of several, a checkpoint, or a file of torch.save."""
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prefixes of names in the file and what they become; '' puts a prefix before every other name."""
    strict: bool = True
    """Everything has to fit. false: what fits is loaded, and the rest is said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """What a run goes on from: weights, optimizer, schedule, position in the data, random numbers."""

    path: str
    """A checkpoint folder, or a .ckpt file of Lightning. auto: the newest whole one of all runs of this run.name; a
    fresh start where there is none."""
    skip: tuple[str, ...] = ()
    """Names of tensors that stay as the fresh module has them, with their optimizer state; `head.*` for all below."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. Everything is frozen: what a config says at the start holds to the end."""

    extends: tuple[str, ...] = ()
    """Config files this one builds on, relative to it; later ones win over earlier, and this file over all."""
    vars: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Free values of your own, for use elsewhere as ${vars.NAME}."""
    seed: int = 0
    """Seed of all random numbers, on every rank and in every loader worker."""
    run: RunConfig = RunConfig()
    """Where the run writes."""
    module: ClassConfig
    """{class: import path of a LightningModule, argument: value, ...}."""
    data: ClassConfig
    """{class: import path of a LightningDataModule, argument: value, ...}."""
    optimizer: OptimizerConfig | None = None
    """Optimizer of a TrainingModule; null where the module has its own configure_optimizers."""
    schedule: ScheduleConfig | None = None
    """Learning rate over the steps; null for a constant one."""
    strategy: StrategyConfig
    """A name, or {name: NAME, option: value, ...}. Unset: single for one process, ddp for more."""
    trainer: TrainerConfig
    """The training loop."""
    callbacks: Mapping[str, ClassConfig | None] = dataclasses.field(default_factory=dict)
    """{NAME: {class: import path of a Callback, argument: value, ...}}; null switches one off that a base has."""
    checkpoint: CheckpointConfig | None = CheckpointConfig()
    """When state is saved; null for never."""
    init_from: InitFromConfig | None = None
    """Weights to start from: a path, or {path: PATH, rename: {PREFIX: PREFIX}}. Not used where one is resumed."""
    resume: ResumeConfig | None = None
    """Checkpoint to go on from: a path, `auto`, or {path: PATH, skip: [NAME, ...]}; null for a fresh start."""


SECTIONS: dict[str, type] = {
    "run": RunConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "trainer": TrainerConfig,
    "checkpoint": CheckpointConfig,
    "init_from": InitFromConfig,
    "resume": ResumeConfig,
}
"""The sections that are plain dataclasses."""


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, by field name.

    Example: field_docs(RunConfig)["dir"] == "Folder of all runs, relative to the working directory."
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[field.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[union-attr]
    return docs
