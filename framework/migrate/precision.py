"""Settles `trainer.precision` and what belongs to it, from all the places that speak of it."""

from shardlight.framework.check import BAD
from shardlight.framework.migrate.draft import Draft, Key
from shardlight.framework.source import FILL_IN

_CASTS = "DeepSpeed casts the whole model to fp16; here what multiplies matrices computes in fp16, the rest in fp32"
_MASTERS = "weights and arithmetic in bf16, the optimizer on fp32 masters, as in DeepSpeed"
_AUTO = "transformers: --bf16 is bf16-true here, --fp16 is 16-mixed, neither 32-true"
_MIXED = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


def _on(draft: Draft, key: Key | None) -> bool:
    return key is not None and not key.auto and key.value is not None and draft.number(key, bool) is True


def settle_precision(draft: Draft, *, deepspeed: bool) -> None:
    """Writes the precision, the loss scale and the masters.

    Args:
        deepspeed: whether the source trains through DeepSpeed: it casts the model, others use autocast.
    """
    fp16, bf16, autocast, amp, mixed, old = (
        draft.one(name) for name in ("fp16", "bf16", "autocast", "amp", "mixed", "mixed_old")
    )
    named = "no" if mixed is not None and mixed.value is False else str(mixed.value).lower() if mixed else ""
    wanted = {name: key for name, key in (("fp16", fp16), ("bf16", bf16)) if _on(draft, key)}
    if len(wanted) == 2 and bf16 is not None and fp16 is not None:
        draft.fault(bf16, f"{bf16.name} and {fp16.name} ({fp16.node.origin}) are both true. Switch one off.")
        return
    for name, key in wanted.items():
        if key is not None and mixed is not None and named not in (name, "", "none"):
            text = f"{key.name} is true, but mixed_precision is {named} ({mixed.node.origin}). Make them agree."
            draft.fault(key, text)
            return
    precision = _chosen(draft, wanted, (fp16, bf16), (mixed, named), deepspeed=deepspeed)
    draft.put("trainer.precision", precision, mixed or "no 16-bit type in the source")
    _tell(draft, (fp16, bf16), (mixed, named), (precision, wanted), deepspeed=deepspeed)
    precision = _autocast(draft, autocast, precision)
    if _on(draft, amp) and amp is not None:
        precision = "16-mixed"
        draft.entries.pop("trainer.precision", None)
        draft.put("trainer.precision", precision, amp)
        draft.line(amp, "differs", "torch's autocast instead of Apex. Check the loss", "trainer.precision")
    elif amp is not None:
        draft.line(amp, "none", "off: Apex is not needed")
    if old is not None:
        draft.line(old, "none", "an old name of mixed_precision: set that")
    _loss_scale(draft, precision, deepspeed=deepspeed)
    _masters(draft, precision)


def _chosen(
    draft: Draft,
    wanted: dict[str, Key],
    keys: tuple[Key | None, Key | None],
    mixed: tuple[Key | None, str],
    *,
    deepspeed: bool,
) -> str:
    """Writes the precision that fp16.enabled, bf16.enabled and mixed_precision make, with their lines."""
    key, named = mixed
    open_ = [item for item in keys if item is not None and item.auto]
    precision = "32-true"
    if wanted or named in ("fp16", "bf16"):
        name = next(iter(wanted), named)
        precision = _MIXED[name] if name == "fp16" or not deepspeed else "bf16-true"
        draft.put("trainer.precision", precision, wanted.get(name) or key)
    elif named not in ("", "no", "none"):
        precision = FILL_IN
        draft.leave("trainer.precision", f"{key}: {named} is not here; bf16-mixed is the nearest")
    elif open_ and not named:
        precision = FILL_IN
        draft.leave("trainer.precision", f'"auto" in {open_[0]}: {_AUTO}')
    return precision


def _tell(
    draft: Draft,
    keys: tuple[Key | None, Key | None],
    mixed: tuple[Key | None, str],
    made: tuple[str, dict[str, Key]],
    *,
    deepspeed: bool,
) -> None:
    """The lines of fp16.enabled, bf16.enabled and mixed_precision."""
    (key, named), (precision, wanted) = mixed, made
    for item, name in zip(keys, ("fp16", "bf16"), strict=True):
        if item is None:
            continue
        if item.auto:
            text = f"by mixed_precision: {named}" if named else f"{_AUTO}; left for you"
            draft.line(item, "differs", f'"auto": {text}', "trainer.precision")
        elif name in wanted:
            group, text = ("differs", f"{_CASTS}. Check the first losses") if name == "fp16" else ("maps", _MASTERS)
            draft.line(item, group, text, "trainer.precision")  # type: ignore[arg-type]
        else:
            draft.line(item, "none", "off")
    if key is not None:
        if precision == FILL_IN:
            draft.line(key, "none", f"no {named} here: bf16-mixed is the nearest; left for you", "trainer.precision")
        elif precision == "bf16-true":
            draft.line(key, "maps", _MASTERS, "trainer.precision")
        elif deepspeed and precision == "16-mixed":
            draft.line(key, "differs", f"{_CASTS}. Check the first losses", "trainer.precision")
        elif precision != "32-true" and draft.facts.get("fsdp_sharding", draft.facts.get("fsdp_reshard")):
            text = "FSDP computes norms in 16 bits too, here they stay fp32, which is more exact"
            draft.line(key, "differs", text, "trainer.precision")
        else:
            draft.line(key, "maps", "" if precision == "32-true" else "by autocast", "trainer.precision")


def _autocast(draft: Draft, autocast: Key | None, precision: str) -> str:
    """torch_autocast: what is precision otherwise comes back where it is off."""
    dtype = draft.one("autocast_dtype")
    if autocast is None or not _on(draft, autocast):
        for key in (autocast, dtype):
            if key is not None:
                draft.line(key, "none", "off")
        return precision
    named = "bfloat16" if dtype is None else str(dtype.value).removeprefix("torch.").lower()
    chosen = {"bfloat16": "bf16-mixed", "bf16": "bf16-mixed", "float16": "16-mixed", "fp16": "16-mixed"}.get(named)
    if chosen is None or precision not in ("32-true", FILL_IN):
        text = f"{dtype or autocast} is {named}" if chosen is None else f"{autocast} is true beside {precision}"
        draft.fault(autocast, f"{text}: autocast takes bfloat16 or float16, and neither fp16 nor bf16 beside it.")
        return precision
    draft.entries.pop("trainer.precision", None)
    draft.put("trainer.precision", chosen, autocast)
    for key in (autocast, dtype):
        if key is not None:
            draft.line(key, "maps", "", "trainer.precision")
    return chosen


def _loss_scale(draft: Draft, precision: str, *, deepspeed: bool) -> None:
    """fp16's scale: fixed or moving."""
    scale, power, window = draft.one("loss_scale"), draft.one("scale_power"), draft.one("scale_window")
    if precision != "16-mixed":
        left = precision == FILL_IN
        text = "of 16-mixed only: strategy.loss_scale, loss_scale_growth_steps" if left else "of fp16 only"
        for key in (scale, power, window):
            if key is not None:
                draft.line(key, "differs" if left else "none", text)
        return
    fixed = 0.0 if scale is None or scale.auto else draft.number(scale, float, 0)
    if fixed is BAD:
        return
    if fixed:
        draft.put("strategy.loss_scale", fixed, scale)
        draft.put("strategy.loss_scale_growth_steps", 0, f"{scale}: fixed")
    if scale is not None:
        text = "a fixed scale; still, an inf or NaN halves it" if fixed else "the scale moves, as by default here"
        draft.line(scale, "maps", text, "strategy.loss_scale" if fixed else "")
    for key in (power, window):
        if key is not None and fixed:
            draft.line(key, "none", "without effect: loss_scale is fixed")
        elif key is not None and key.auto:
            draft.line(key, "differs", '"auto": left out, so ours')
    if not fixed:
        _moving_scale(draft, power, window)
        if window is None and deepspeed:
            _growth(draft)


def _moving_scale(draft: Draft, power: Key | None, window: Key | None) -> None:
    if power is not None and not power.auto and (exponent := draft.number(power, int, 0)) is not BAD:
        if exponent > 126:
            draft.fault(power, f"{power.name} is {exponent}; 2 to that power is no finite fp32 number.")
        else:
            draft.maps(power, "strategy.loss_scale", float(2**exponent), f"2 to the power of {exponent}")
    if window is not None and not window.auto:
        draft.maps(window, "strategy.loss_scale_growth_steps", draft.number(window, int, 1))


def _growth(draft: Draft) -> None:
    """DeepSpeed's own, which is another here; accelerate's own is ours."""
    draft.put("strategy.loss_scale_growth_steps", 1000, "DeepSpeed's own, where fp16.loss_scale_window is unset")
    near = (draft.facts.get("fp16") or draft.facts.get("mixed") or [None])[0]
    text = "DeepSpeed doubles the scale after 1000 good steps; 2000 here where it is unset. Written as there"
    draft.unset("fp16.loss_scale_window", text, "strategy.loss_scale_growth_steps", near=near)


def _masters(draft: Draft, precision: str) -> None:
    key, states, sums = draft.one("bf16_masters"), draft.one("bf16_states"), draft.one("grad_accum_dtype")
    if key is not None:
        if not _on(draft, key):
            draft.line(key, "none", "off: the optimizer works on fp32 masters")
        elif precision == "bf16-true":
            draft.put("strategy.master", False, key)
            draft.line(
                key, "maps", "the optimizer works on the bf16 weights, and loses small updates", "strategy.master"
            )
        else:
            draft.line(key, "differs", "strategy.master: false, with trainer.precision bf16-true. Check that")
    if states is not None:
        text = "of bf16_master_weights_and_grads: with strategy.master: false the optimizer's state is bf16 too"
        draft.line(states, "maps" if _on(draft, states) else "none", text if _on(draft, states) else "off")
    if sums is not None:
        fp32 = str(sums.value).lower() in ("fp32", "float32", "none") or sums.auto
        text = "sums over micro-batches are always in fp32" + ("" if fp32 else ", which takes more memory")
        draft.line(sums, "maps" if fp32 else "differs", text)
