"""Keys in the wrong section, and keys that are called otherwise in other tools: what is said of them."""

import dataclasses
from collections.abc import Mapping

from shardlight.framework.described import Described
from shardlight.framework.schema import SECTIONS, Config
from shardlight.framework.source import Node
from shardlight.strategies.options import OPTIONS

SYNONYMS = {
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "accumulation_steps": "trainer.accumulate_grad_batches",
    "accumulate": "trainer.accumulate_grad_batches",
    "train_batch_size": "trainer.global_batch_size",
    "train_micro_batch_size_per_gpu": "data.batch_size",
    "per_device_train_batch_size": "data.batch_size",
    "zero_optimization": "strategy",
    "model": "module",
    "datamodule": "data",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "warmup_num_steps": "schedule.warmup_steps",
    "total_num_steps": "schedule.total_steps",
    "warmup_min_lr": "schedule.min_lr_ratio",
    "gpus": "trainer.devices",
    "num_processes": "trainer.devices",
    "nodes": "trainer.num_nodes",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "mixed_precision": "trainer.precision",
    "steps_per_print": "trainer.log_every_n_steps",
    "logging_steps": "trainer.log_every_n_steps",
    "num_train_epochs": "trainer.max_epochs",
    "resume_from_checkpoint": "resume",
    "ckpt_path": "resume",
    "save_steps": "checkpoint.every_n_steps",
    "every_n_train_steps": "checkpoint.every_n_steps",
    "save_total_limit": "checkpoint.save_top_k",
    "default_root_dir": "run.dir",
    "output_dir": "run.dir",
    "seed_everything": "seed",
    "activation_checkpointing": "strategy.recompute",
    "gradient_checkpointing": "strategy.recompute",
    "gradient_clipping": "trainer.gradient_clip_val",
    "max_grad_norm": "trainer.gradient_clip_val",
    "learning_rate": "optimizer.lr",
    "num_epochs": "trainer.max_epochs",
    "epochs": "trainer.max_epochs",
}
"""What other tools call our keys."""
ABSENT = {
    "stage": "The stage is the strategy's name: strategy: zero3.",
    "overlap_comm": "Collectives overlap with computing anyway: leave it out.",
    "contiguous_gradients": "Gradients of a unit lie together anyway: leave it out.",
    "reduce_bucket_size": "Whole units are reduced: leave it out, or name their classes in strategy.units.",
    "allgather_bucket_size": "Whole units are gathered: leave it out, or name their classes in strategy.units.",
    "stage3_prefetch_bucket_size": "The next unit is gathered ahead anyway: leave it out.",
    "stage3_param_persistence_threshold": "It is strategy.keep_small here.",
    "offload_optimizer": "State on disk is strategy.offload.optimizer here, or strategy infinity.",
    "offload_param": "Weights on disk are strategy.offload.parameters of zero3 here, or strategy infinity.",
    "params": "Its keys stand one level higher here.",
}
"""What is said of keys of other tools that have no counterpart."""
STRATEGY_SYNONYMS = {
    "deepspeed": "zero3",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_3": "zero3",
    "fsdp": "zero3",
    "fsdp2": "zero3",
    "full_shard": "zero3",
    "zero_infinity": "infinity",
    "shard_grad_op": "zero2",
    "ddp_find_unused_parameters_true": "ddp",
    "ddp_spawn": "ddp",
    "ddp_notebook": "ddp",
    "dp": "ddp",
    "none": "single",
}
"""What other tools call our strategies."""
RENAMED: dict[str, str] = {}
"""Keys that an earlier version had: dotted path -> what became of it, such as "is called trainer.x since 0.2"."""


def misplaced(section: str, key: str, node: Node, tree: Node, targets: Mapping[str, Described]) -> str | None:
    """The fault of a key that its section does not have, but another one or another tool; None: nobody knows it.

    Args:
        node: its value.
        tree: the whole config.
        targets: the classes named there, by section.
    """
    here = f"{section}.{key}" if section else key
    if here in RENAMED:
        return f"{here} {RENAMED[here]}."
    if (section, key) in (("optimizer", "type"), ("schedule", "type")):
        return f"{here} is called {section}.name here."
    if key in ABSENT and section in ("", "strategy", "trainer", "optimizer", "schedule"):
        return f"{here} is not a key here. {ABSENT[key]}"
    if "." in key and (key.split(".", maxsplit=1)[0] in _names(Config)):
        return f"{key} is not a key: nest it, '{key.split('.', maxsplit=1)[0]}: {{{key.partition('.')[2]}: ...}}'."
    if key in SYNONYMS:
        homes = [(SYNONYMS[key].split(".")[0], f"called {SYNONYMS[key]} here")]
        there = SYNONYMS[key]
    else:
        # A name is a key of several sections: it says nothing about where it should stand.
        homes = [home for home in _homes(key, tree, targets) if home[0] != section and key != "name"]
        if not homes:
            return None
        there = f"{homes[0][0]}.{key}" if homes[0][0] else key
    kind = homes[0][1]
    wrong = f", not of {section or 'the top level'}" if key not in SYNONYMS else ""
    other = tree.find(there)
    if other is not None and other.plain() != node.plain():
        both = f"{here} = {node.plain()} contradicts {there} = {other.plain()} ({other.origin})"
        return f"{both}. It is {kind}{wrong}: remove {here}."
    return f"{here} is {kind}{wrong}: {'remove it' if other is not None else f'move it to {there}'}."


def _homes(key: str, tree: Node, targets: Mapping[str, Described]) -> list[tuple[str, str]]:
    """(section, "a key of trainer") of every section that knows the key."""
    named = tree.find("strategy.name")
    chosen = str(named.value) if named is not None else ""
    homes = [(name, f"a key of {name}") for name in SECTIONS if key in _names(SECTIONS[name])]
    for name in sorted(OPTIONS, key=lambda name: name != chosen):
        if key in _names(OPTIONS[name]):
            homes.append(("strategy", f"an option of strategy {name}"))
            break
    for name, target in targets.items():
        if key in target.parameters:
            homes.append((name, f"a parameter of {name}"))
    if key in _names(Config):
        homes.append(("", "a key of the top level"))
    order = [
        "trainer",
        "optimizer",
        "schedule",
        "strategy",
        "checkpoint",
        "run",
        "data",
        "module",
        "init_from",
        "resume",
        "",
    ]
    return sorted(homes, key=lambda home: order.index(home[0]))


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]
