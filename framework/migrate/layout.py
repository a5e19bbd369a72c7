"""Settles how state is laid out: stage of ZeRO or FSDP's sharding to a strategy, and the options of it."""

from typing import Any

from shardlight.framework.check import BAD
from shardlight.framework.migrate.draft import Draft, Key

_STAGES = ("ddp", "zero1", "zero2", "zero3")
_FSDP = {
    "FULL_SHARD": ("zero3", "no", False),
    "SHARD_GRAD_OP": ("zero3", "backward", False),
    "NO_SHARD": ("ddp", "no", False),
    "HYBRID_SHARD": ("zero3", "no", True),
    "HYBRID_SHARD_ZERO2": ("zero3", "backward", True),
}
"""FSDP's sharding -> strategy, how long weights stay gathered, sharded within a machine; by accelerate's order "
"from 1."""
_DISTRIBUTED = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "DEEPSPEED": "", "FSDP": ""}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_DTYPES |= {"float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "half": "float16", "float": "float32"}
_NO_OFFLOAD = (
    "on GPUs nothing is offloaded in this version; CPU ranks have strategy infinity, with state on disk. Instead: a "
    "higher stage, more ranks, strategy.recompute: blocks for activations, "
    "strategy.moments_dtype: bfloat16 for half of the optimizer's state"
)


def settle_layout(draft: Draft, *, deepspeed: bool, ranks: int | None) -> str | None:
    """Writes the strategy and its options; returns its name, or None where it is left to the user."""
    kind = draft.one("distributed")
    name: str | None = "ddp"
    if kind is not None:
        name = _distributed(draft, kind, ranks)
    stage = draft.one("stage")
    if stage is not None:
        name = _stage(draft, stage)
    elif deepspeed and kind is not None and "deepspeed_file" not in draft.facts:
        name = "zero2"
        draft.put("strategy.name", name, "stage 2: accelerate's own where deepspeed_config.zero_stage is unset")
    if kind is not None and str(kind.value).upper() == "FSDP":
        name = _fsdp(draft)
    if name is not None:
        draft.put("strategy.name", name, "nothing is sharded where the source sets no stage")
    _stage_3(draft, name, ranks)
    _offload(draft)
    _sending(draft)
    _compiled(draft)
    return name


def _distributed(draft: Draft, kind: Key, ranks: int | None) -> str | None:
    value = str(kind.value).upper()
    name = _DISTRIBUTED.get(value)
    if name is None:
        draft.leave("strategy.name", f"{kind}: {kind.value} has no counterpart; ddp, zero1, zero2 or zero3")
        draft.line(
            kind, "none", f"{kind.value} is not here: of devices cpu and cuda, of layouts ddp and zero1 to zero3"
        )
        return None
    if value == "NO" and ranks is not None and ranks > 1:
        return draft.fault(kind, f"distributed_type is NO, but num_processes is {ranks}. Make them agree.") and None
    if value == "MULTI_CPU":
        draft.put("trainer.accelerator", "cpu", kind)
    if name:
        draft.maps(kind, "strategy.name", name)
    else:
        draft.line(kind, "maps", "to a strategy by its own section")
    return name or "ddp"


def _stage(draft: Draft, stage: Key) -> str | None:
    if isinstance(stage.value, bool):
        draft.maps(stage, "strategy.name", _STAGES[int(stage.value)], "true was stage 1 in old versions of DeepSpeed")
        return _STAGES[int(stage.value)]
    if stage.value is None or stage.value == {}:
        draft.line(stage, "none", "empty: nothing is sharded")
        return "ddp"
    value = draft.number(stage, int)
    if value is BAD or not 0 <= value < len(_STAGES):
        if value is not BAD:
            draft.fault(stage, f"{stage.name} is {value}; it must be 0, 1, 2 or 3.")
        return None
    text = "gradients are reduced per micro-batch there too; reduce: window sends less" if value == 2 else ""
    draft.maps(stage, "strategy.name", _STAGES[value], text)
    return _STAGES[value]


def _fsdp(draft: Draft) -> str:
    keys = [key for fact in ("fsdp_sharding", "fsdp_reshard") if (key := draft.one(fact)) is not None]
    rest = [key for fact in ("fsdp_wrap", "fsdp_classes", "fsdp_recompute") if (key := draft.one(fact)) is not None]
    names = [_fsdp_sharding(draft, key) for key in keys]
    if not keys:
        draft.put("strategy.name", "zero3", "FULL_SHARD: accelerate's own where it is unset")
    for key in rest:
        _fsdp_units(draft, key)
    return names[0] if names else "zero3"


def _fsdp_sharding(draft: Draft, key: Key) -> str:
    value: Any = str(key.value).upper()
    numbered = dict(zip("12345", _FSDP, strict=True))
    if value in ("TRUE", "FALSE"):
        value = "FULL_SHARD" if value == "TRUE" else "SHARD_GRAD_OP"
    value = numbered.get(value, value)
    if value not in _FSDP:
        draft.fault(key, f"{key.name} is {key.value}; it must be one of {', '.join(_FSDP)}, or true or false.")
        return "zero3"
    name, kept, hybrid = _FSDP[value]
    draft.put("strategy.name", name, key)
    text = f"{value}: the weights are sharded too"
    if kept == "backward":
        draft.put("strategy.keep_gathered", "backward", key)
        text += ", and stay gathered from a unit's forward to its backward (keep_gathered)"
    if hybrid:
        devices = draft.entries.get("trainer.devices")
        known = devices is not None and isinstance(devices.value, int)
        draft.put("strategy.shard_group", devices.value if known and devices else "FILL_IN", f"{key}: within a machine")
        text += ", within the devices of a machine (shard_group)"
    draft.line(key, "maps", text if name == "zero3" else "NO_SHARD: nothing is sharded", "strategy.name")
    return name


def _fsdp_units(draft: Draft, key: Key) -> None:
    if key.leaf == "fsdp_transformer_layer_cls_to_wrap":
        names = [name.strip() for name in str(key.value or "").split(",") if name.strip()]
        if names:
            draft.maps(key, "strategy.units", names)
        else:
            draft.line(key, "none", "empty: units are the blocks of the model's block lists")
    elif key.leaf == "fsdp_activation_checkpointing":
        if draft.number(key, bool) is True:
            draft.maps(key, "strategy.recompute", "blocks")
        else:
            draft.line(key, "none", "off")
    elif "TRANSFORMER" in str(key.value):
        text = "units are the classes named, else the blocks of the model's block lists, found without a name"
        draft.line(key, "maps", text)
    else:
        text = "units are the blocks of the model's block lists, never made by size; strategy.units names other classes"
        draft.line(key, "differs", f"{text}. Check the memory")


def _stage_3(draft: Draft, name: str | None, ranks: int | None) -> None:
    """Keys that mean something where weights are sharded."""
    keys = {fact: draft.one(fact) for fact in ("keep_small", "hpz", "mics")}
    for fact, key in keys.items():
        if key is not None and name != "zero3":
            draft.line(key, "none", "without effect: of stage 3 only")
            keys[fact] = None
    if (small := keys["keep_small"]) is not None:
        if small.auto:
            why = "transformers sets 10 x the model's hidden size: memory and speed only"
            draft.hint("strategy.keep_small", 0, f'"auto" in {small}: {why}')
            draft.line(small, "differs", f'"auto": {why}. strategy.keep_small is 0 where it is left out')
        else:
            draft.maps(small, "strategy.keep_small", draft.number(small, int, 0))
    elif name == "zero3" and (stage := draft.facts.get("stage")):
        text = "DeepSpeed keeps parameters below 1e5 elements whole; here strategy.keep_small is 0. Check the speed"
        draft.unset("zero_optimization.stage3_param_persistence_threshold", text, near=stage[0])
    if keys["hpz"] is not None:
        _hpz(draft, keys["hpz"])
    if keys["mics"] is not None:
        _mics(draft, keys["mics"], ranks)


def _hpz(draft: Draft, hpz: Key) -> None:
    size = draft.number(hpz, int, 0)
    if size is not BAD and size > 1:
        why = "gathers stay within a group; but all state is sharded within it only, not over all ranks"
        draft.hint("strategy.shard_group", size, f"{hpz}: {why}")
        draft.line(hpz, "differs", f"strategy.shard_group: {why}. Check the memory, then set it")
    elif size is not BAD:
        draft.line(hpz, "none", "1: off")


def _mics(draft: Draft, mics: Key, ranks: int | None) -> None:
    size = draft.number(mics, int)
    if size is BAD or size < 1:
        draft.line(mics, "none", "off")
    elif ranks is not None and ranks % size:
        draft.fault(mics, f"{mics.name} is {size}, and {ranks} processes do not divide into groups of it.")
    else:
        draft.maps(mics, "strategy.shard_group", size, "sharded within groups, replicated across them")


def _offload(draft: Draft) -> None:
    for fact in ("offload_optimizer", "offload_param", "offload_old", "offload_fsdp"):
        key = draft.one(fact)
        if key is None:
            continue
        off = str(key.value).lower() in ("none", "false")
        draft.line(key, "none", "off, as everything here" if off else _NO_OFFLOAD)


def _sending(draft: Draft) -> None:
    key = draft.one("reduce_dtype")
    if key is not None:
        wanted = _DTYPES.get(str(key.value).lower())
        if wanted is not None:
            draft.maps(key, "strategy.reduce_dtype", wanted, "sums are in fp32 whatever is sent")
        elif key.value is None or key.auto or key.value == "none":
            draft.line(
                key, "differs", "unset: here the dtype that gradients come in, and fp32 for sums of micro-batches"
            )
        else:
            draft.fault(key, f"{key.name} is {key.value}; it must be fp16, bf16 or fp32.")
    key = draft.one("fp32_allreduce")
    if key is not None and draft.number(key, bool) is True:
        draft.maps(key, "strategy.reduce_dtype", "float32")
    elif key is not None:
        draft.line(key, "none", "off; gradients are summed in fp32 whatever they travel in")
    key = draft.one("gradient_op")
    if key is not None and str(key.value).lower() == "sum":
        text = (
            "gradients are averaged over the ranks, never summed: multiply the loss by the number of ranks, or check lr"
        )
        draft.line(key, "differs", text)
    elif key is not None:
        draft.line(key, "maps", "gradients are averaged over the ranks")


def _compiled(draft: Draft) -> None:
    """torch.compile as accelerate asks for it."""
    regional, backend = draft.one("dynamo_regional"), draft.one("dynamo")
    blocks = regional is not None and draft.number(regional, bool) is True
    if regional is not None:
        text = (
            "strategy.compile compiles the blocks" if blocks else "here the blocks are compiled, never the whole model"
        )
        draft.line(regional, "maps" if blocks else "differs", text)
    if backend is None:
        return
    name = str(backend.value).lower()
    if name in ("no", "none", "false"):
        draft.line(backend, "none", "off, as by default here")
        return
    draft.put("strategy.compile", "blocks", backend)
    if name != "inductor":
        draft.put("strategy.compile_backend", name, backend)
    text = "each of the model's blocks is compiled, not the model as a whole. Check the speed"
    draft.line(backend, "maps" if blocks else "differs", "" if blocks else text, "strategy.compile")
