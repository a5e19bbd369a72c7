"""A file of DeepSpeed or accelerate to our config and a report."""

import dataclasses
import math
import os
from collections.abc import Iterable
from pathlib import Path

from shardlight.framework.check import BAD
from shardlight.framework.faults import ConfigError, Fault
from shardlight.framework.migrate import accelerate_keys, deepspeed_keys
from shardlight.framework.migrate.batches import settle_batches
from shardlight.framework.migrate.draft import Draft, Line
from shardlight.framework.migrate.layout import settle_layout
from shardlight.framework.migrate.optimizers import settle_optimizer
from shardlight.framework.migrate.precision import settle_precision
from shardlight.framework.migrate.rules import walk
from shardlight.framework.migrate.schedules import settle_schedule
from shardlight.framework.migrate.source import Kind, read_source
from shardlight.framework.migrate.write import SECTIONS, to_yaml
from shardlight.framework.source import FILL_IN, Node

_MARKS = {
    "compute_environment",
    "distributed_type",
    "deepspeed_config",
    "fsdp_config",
    "mixed_precision",
    "num_processes",
    "num_machines",
    "machine_rank",
}
"""Keys that only accelerate has."""
_SECTIONS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}


@dataclasses.dataclass(frozen=True)
class Migration:
    """What came of a file.

    Attributes:
        kind: of the source.
        text: our config, as YAML.
        lines: one for each key of the source, in its order.
        fill_in: dotted paths of what is left to the user.
    """

    kind: Kind
    text: str
    lines: tuple[Line, ...]
    fill_in: tuple[str, ...]


class MigrationError(ConfigError):
    """A source with faults. Nothing is written of it, but all its keys were looked at.

    Attributes:
        made: what came of it, with a report of every other key; its text is empty.
    """

    def __init__(self, faults: Iterable[Fault], made: Migration) -> None:
        super().__init__(faults)
        self.made = made


def migrate(path: str | os.PathLike[str]) -> Migration:
    """Turns a DeepSpeed or accelerate config into ours.

    Raises:
        ConfigError: it is neither, or cannot be read.
        MigrationError: it contradicts itself, or has values that cannot be; all of them with file and line.
    """
    tree = read_source(path)
    kind = _recognise(tree)
    draft = Draft()
    if kind == "accelerate":
        walk(tree, accelerate_keys.ACCELERATE_KEYS, draft, accelerate_keys.REFUSING)
        deepspeed = _accelerate(draft, tree, Path(path).parent)
    else:
        walk(tree, deepspeed_keys.DEEPSPEED_KEYS, draft, deepspeed_keys.REFUSING)
        deepspeed = True
    draft.leave(
        "module.class", "import path of your LightningModule, such as my_project.model.Model; its arguments below"
    )
    draft.leave(
        "data.class", "import path of your LightningDataModule, such as my_project.data.Data; its arguments below"
    )
    ranks = settle_batches(draft, deepspeed=deepspeed)
    settle_layout(draft, deepspeed=deepspeed, ranks=ranks)
    settle_precision(draft, deepspeed=deepspeed)
    settle_optimizer(draft, settle_schedule(draft))
    _clipping(draft, deepspeed=deepspeed)
    _logs(draft)
    total = draft.entries.get("schedule.total_steps")
    known = f"; the schedule has {total.value}" if total is not None and total.value != FILL_IN else ""
    draft.leave("trainer.max_steps", f"optimizer steps of the training, or max_epochs: the script's own{known}")
    lines = tuple(sorted(draft.lines, key=lambda line: line.order))

    if draft.faults:
        raise MigrationError(draft.faults, Migration(kind, "", lines, ()))

    def order(path: str) -> int:
        return SECTIONS.index(path.partition(".")[0])

    return Migration(kind, to_yaml(draft.entries, Path(path).name), lines, tuple(sorted(draft.filled_in(), key=order)))


def _recognise(tree: Node) -> Kind:
    names = set(tree.value)
    if names & _MARKS:
        return "accelerate"
    if names & {name.split(".")[0] for name in deepspeed_keys.DEEPSPEED_KEYS}:
        return "deepspeed"
    some = ", ".join(list(tree.value)[:5]) or "none at all"
    text = (
        f"neither a DeepSpeed config (zero_optimization, train_batch_size, ...) nor one of accelerate "
        f"(distributed_type, "
        f"num_processes, ...): no key of either, but {some}."
    )
    raise ConfigError([Fault(tree.origin, text)])


def _accelerate(draft: Draft, tree: Node, folder: Path) -> bool:
    """What of an accelerate config comes first; whether it trains through DeepSpeed."""
    kind = draft.one("distributed")
    if kind is None:
        draft.faults.append(Fault(tree.origin, "distributed_type is missing, which accelerate asks for."))
    named = "DEEPSPEED" if kind is None else str(kind.value).upper()
    for fact, keys in draft.facts.items():
        idle = [key for key in keys if _SECTIONS.get(key.name.split(".")[0], named) != named]
        for key in idle:
            draft.line(key, "none", f"without effect: distributed_type is {named}")
        draft.facts[fact] = [key for key in keys if key not in idle]
    if (place := draft.one("environment")) is not None:
        local = place.value == "LOCAL_MACHINE"
        draft.line(place, "none", "not needed" if local else "start the processes with torchrun there")
    if (cpu := draft.one("use_cpu")) is not None:
        on = draft.number(cpu, bool)
        if on is True:
            draft.maps(cpu, "trainer.accelerator", "cpu")
        elif on is False:
            draft.line(cpu, "none", "off: trainer.accelerator auto takes cuda where there is one")
    _deepspeed_file(draft, folder)
    return named == "DEEPSPEED"


def _deepspeed_file(draft: Draft, folder: Path) -> None:
    key = draft.one("deepspeed_file")
    if key is None:
        return
    named = str(key.value)
    if named.lower() in ("none", "") or key.value is None:
        del draft.facts["deepspeed_file"]
        draft.line(key, "none", "no file")
        return
    found = next((place for place in (folder / named, Path(named)) if place.is_file()), None)
    if found is None:
        draft.fault(key, f"{key.name}: there is no file {folder / named}.")
        return
    draft.line(key, "maps", "its keys are below")
    walk(read_source(found), deepspeed_keys.DEEPSPEED_KEYS, draft, deepspeed_keys.REFUSING)


def _clipping(draft: Draft, *, deepspeed: bool) -> None:
    key = draft.one("clipping")
    path, usual = "trainer.gradient_clip_val", "TrainingArguments.max_grad_norm, 1.0 where unset"
    if key is None:
        if deepspeed:
            text = "DeepSpeed clips at 1.0 since mid-2026 and did not before; here nothing is clipped where it is unset"
            draft.hint(path, 1.0, text)
            draft.unset("gradient_clipping", f"{text}. Check your version, and set {path}")
    elif key.auto:
        draft.leave(path, f'"auto" in {key}: {usual}')
        draft.line(key, "differs", f'"auto": {usual}; left for you', path)
    elif key.value is None:
        draft.line(key, "none", "null: no clipping")
    else:
        value = draft.number(key, float, 0)
        if value == 0:
            draft.line(key, "none", "0: no clipping, as by default here")
        else:
            draft.maps(key, path, value, "by the global norm over all ranks")


def _logs(draft: Draft) -> None:
    """steps_per_print and the TensorBoard section."""
    key = draft.one("print_steps")
    if key is not None:
        steps = key.value
        finite = isinstance(steps, int | float) and not isinstance(steps, bool) and math.isfinite(steps)
        if finite and 1 <= steps < 1_000_000 and (value := draft.number(key, int)) is not BAD:
            draft.maps(key, "trainer.log_every_n_steps", value, "steps between two entries in the log")
        else:
            draft.line(key, "differs", "trainer.log_every_n_steps is 10 where it is left out; progress shows by itself")
    keys = {key.leaf: key for key in draft.facts.get("tensorboard", [])}
    enabled = keys.pop("enabled", None)
    on = enabled is not None and draft.number(enabled, bool) is True
    if enabled is not None:
        text = (
            "every run logs to TensorBoard, in its own folder"
            if on
            else "off there; every run logs to TensorBoard here"
        )
        draft.line(enabled, "maps" if on else "differs", text)
    for name, key in keys.items():
        path = {"output_path": "run.dir", "job_name": "run.name"}[name]
        value = str(key.value or "")
        if not on or not value or (path == "run.name" and (set(value) & {"/", "\\", "\0"} or value in (".", ".."))):
            draft.line(key, "none", f"not written: {path} is what it would be")
        else:
            draft.maps(key, path, value, "of the whole run: logs, checkpoints, summary")
