"""Settles DeepSpeed's `optimizer`: the type that really ran, and defaults that are others here written out."""

import dataclasses
from typing import Any

from shardlight.framework.check import BAD
from shardlight.framework.migrate.draft import Draft, Key
from shardlight.framework.migrate.rules import IGNORED_PARAMETER
from shardlight.framework.migrate.schedules import Peak
from shardlight.framework.source import FILL_IN


@dataclasses.dataclass(frozen=True)
class Known:
    """An optimizer type of DeepSpeed.

    Attributes:
        name: ours; None: there is none.
        lr: its rate where the config sets none.
        writes: what is written where the config does not say it, since our default is another.
        text: what is not the same; empty where nothing is.
        options: parameters that have the same name here.
    """

    name: str | None
    lr: float = 1e-3
    writes: dict[str, Any] = dataclasses.field(default_factory=dict)
    text: str = ""
    options: str = "betas eps"


_PLAIN = {"weight_decay": 0.0}
_ONE_BIT = (
    "nothing is compressed here: it is the optimizer that this approximates. strategy.reduce_dtype: bfloat16 sends less"
)
_MUP = "needs the mup package: make it in your module's configure_optimizers"
OPTIMIZERS: dict[str, Known] = {
    "adam": Known("adamw", 1e-3, _PLAIN, "Adam is AdamW in DeepSpeed unless adam_w_mode is false"),
    "adamw": Known("adamw", 1e-3, _PLAIN),
    "lamb": Known(
        "lamb", 1e-3, {**_PLAIN, "eps": 1e-8}, "the ratio of norms is not clamped (max_coeff 10, min_coeff 0.01)"
    ),
    "lion": Known("lion", 1e-3, _PLAIN, "", "betas"),
    "adagrad": Known("adagrad", 1e-2, {}, "", "eps lr_decay"),
    "sgd": Known("sgd", 1e-3, {}, "", "momentum nesterov"),
    "rmsprop": Known("rmsprop", 1e-2, {}, "", "alpha eps momentum centered"),
    "adafactor": Known("adafactor", 1e-2, {}, "", "beta2_decay"),
    "muon": Known(
        "muon",
        1e-3,
        _PLAIN,
        "here a head or lm_head is AdamW's, and what adamw_for names; check the line at the start that says who "
        "trains what",
        "momentum nesterov ns_steps betas eps",
    ),
    "onebitadam": Known("adamw", 1e-3, _PLAIN, _ONE_BIT),
    "zerooneadam": Known("adamw", 1e-3, _PLAIN, _ONE_BIT),
    "onebitlamb": Known("lamb", 1e-3, {**_PLAIN, "eps": 1e-8}, _ONE_BIT),
    "muadam": Known(None, text=_MUP),
    "muadamw": Known(None, text=_MUP),
    "musgd": Known(None, text=_MUP),
}
"""DeepSpeed's optimizer type in small letters -> what it is here."""

_NEUTRAL: dict[str, tuple[Any, str]] = {
    "bias_correction": (True, "always corrected here"),
    "amsgrad": (False, "no AMSGrad here: take torch's in your module's configure_optimizers"),
    "maximize": (False, "no maximizing here: negate the loss"),
    "dampening": (0, "no dampening here"),
    "eps_inside_sqrt": (False, "eps is outside of the root here"),
    "initial_accumulator_value": (0, "the sum begins at 0 here"),
    "max_coeff": (None, "the ratio of norms is not clamped here"),
    "min_coeff": (None, "the ratio of norms is not clamped here"),
    "max_grad_norm": (
        0,
        "clipping is trainer.gradient_clip_val; DeepSpeed clips by gradient_clipping, and refuses this",
    ),
}
"""Parameter -> the only value it has here, and what to say of any other."""
_DETAILS = (
    "torch_adam fused foreach capturable differentiable set_grad_none fp32_optimizer_states "
    "freeze_step var_freeze_step var_update_scaler local_step_scaler local_step_clipper cuda_aware comm_backend_name "
    "coeff_beta factor_max factor_min factor_threshold ns_method per_head_muon"
)
_AUTO = {
    "lr": "TrainingArguments.learning_rate, 5e-5 where unset",
    "betas": "TrainingArguments.adam_beta1 and adam_beta2, 0.9 and 0.999 where unset",
    "eps": "TrainingArguments.adam_epsilon, 1e-8 where unset",
    "weight_decay": "TrainingArguments.weight_decay, 0 where unset",
}
_DECAY = "DeepSpeed decays all parameters, norms and biases too, and so does decay: all. Leave that out to spare them"


def settle_optimizer(draft: Draft, peak: Peak | None) -> None:
    """Writes `optimizer`, with a line for each of its keys.

    Args:
        peak: the highest rate, where the scheduler sets it.
    """
    keys = {
        key.name.removeprefix("optimizer.").removeprefix("params."): key for key in draft.facts.get("optimizer", [])
    }
    kind, group = keys.pop("type", None), keys.pop("params", None)
    if group is not None:
        draft.line(group, "none", "empty: DeepSpeed's defaults")
    if kind is None:
        for key in keys.values():
            draft.line(key, "none", "without effect: optimizer.type is missing")
        if "schedule.name" in draft.entries:
            draft.leave("optimizer.name", "the script made its own; a schedule needs one in the config")
            draft.put("optimizer.lr", peak.value if peak else FILL_IN, peak.why if peak else "the script's own")
        return
    known = OPTIMIZERS.get(str(kind.value).lower())
    if known is None or known.name is None:
        text = known.text if known else "no optimizer of this name here: make it in your module's configure_optimizers"
        draft.leave("optimizer.name", f"{kind} is {kind.value}: {text}")
        draft.line(kind, "none", f"{text}; left for you", "optimizer.name")
        known = Known(FILL_IN)
    else:
        _kind(draft, kind, known, keys)
    _rate(draft, keys.pop("lr", None), known, peak)
    _muon(draft, keys, known)
    torch_adam = keys.get("torch_adam")
    if torch_adam is not None and torch_adam.value is True and known.name == "adamw" and "weight_decay" not in keys:
        draft.put("optimizer.weight_decay", 0.01, "torch.optim.AdamW's own, which torch_adam takes")
        draft.put("optimizer.decay", "all", "as DeepSpeed does; weights spares norms, biases, embeddings")
    _decay(draft, keys.pop("weight_decay", None), known)
    for name, key in keys.items():
        _parameter(draft, key, name, known)
    for name, value in known.writes.items():
        draft.put(f"optimizer.{name}", value, f"DeepSpeed's own where {name} is unset")


def _kind(draft: Draft, kind: Key, known: Known, keys: dict[str, Key]) -> None:
    name, text = known.name, known.text
    mode = keys.pop("adam_w_mode", None)
    if mode is not None:
        coupled = draft.number(mode, bool) is False and str(kind.value).lower() == "adam"
        name = "adam" if coupled else name
        draft.line(mode, "maps", "decay as L2 in the gradient" if coupled else "decoupled decay")
        text = "" if coupled or str(kind.value).lower() == "adamw" else text
    draft.put("optimizer.name", name, kind)
    draft.line(kind, "differs" if text else "maps", text, "optimizer.name")


def _rate(draft: Draft, key: Key | None, known: Known, peak: Peak | None) -> None:
    value: Any = None
    if key is not None and not key.auto:
        value = draft.number(key, float, 0)
        if value is BAD:
            return
    if peak is not None:
        high = peak.value
        if peak.key is None and high == FILL_IN and value is not None and value == known.lr:
            high = value
        draft.put("optimizer.lr", high, peak.why)
        if key is not None and value is None:
            draft.line(key, "differs", f'"auto": {_AUTO["lr"]}; left for you', "optimizer.lr")
        elif key is not None and value == high:
            draft.line(key, "maps", "the same as the scheduler's highest rate", "optimizer.lr")
        elif key is not None:
            text = "without effect in DeepSpeed: the scheduler sets the rate. Check which of both you want"
            draft.line(key, "differs", text, "optimizer.lr")
    elif key is None:
        draft.put("optimizer.lr", known.lr, "DeepSpeed's own where lr is unset")
    elif value is None:
        draft.leave("optimizer.lr", f'"auto" in {key}: {_AUTO["lr"]}')
        draft.line(key, "differs", f'"auto": {_AUTO["lr"]}; left for you', "optimizer.lr")
    else:
        draft.maps(key, "optimizer.lr", value)


def _muon(draft: Draft, keys: dict[str, Key], known: Known) -> None:
    """Muon has a rate of its own, and one for what AdamW trains."""
    own, rest = keys.pop("muon_lr", None), keys.pop("adam_lr", None)
    if known.name == "muon":
        common = draft.entries.get("optimizer.lr")
        if own is not None and (value := draft.number(own, float, 0)) is not BAD:
            draft.entries.pop("optimizer.lr", None)
            draft.maps(own, "optimizer.lr", value)
        if rest is not None:
            draft.maps(rest, "optimizer.adamw_lr", draft.number(rest, float, 0))
        elif common is not None:
            draft.put("optimizer.adamw_lr", common.value, "optimizer.params.lr, where adam_lr is unset")
        return
    for key in (own, rest):
        if key is not None:
            draft.line(key, "unknown", f"{IGNORED_PARAMETER} this optimizer")


def _decay(draft: Draft, key: Key | None, known: Known) -> None:
    if key is None:
        return
    if key.auto:
        draft.leave("optimizer.weight_decay", f'"auto" in {key}: {_AUTO["weight_decay"]}')
        draft.put("optimizer.decay", "all", "as DeepSpeed does; weights spares norms, biases, embeddings")
        text = f'"auto": {_AUTO["weight_decay"]}; left for you. {_DECAY}'
        draft.line(key, "differs", text, "optimizer.weight_decay")
        return
    value = draft.number(key, float, 0)
    if value is BAD:
        return
    draft.put("optimizer.weight_decay", value, key)
    if value == 0 or known.name == FILL_IN:
        draft.line(key, "maps", "", "optimizer.weight_decay")
        return
    draft.put("optimizer.decay", "all", "as DeepSpeed does; weights spares norms, biases, embeddings")
    draft.line(key, "differs", _DECAY, "optimizer.weight_decay")


def _parameter(draft: Draft, key: Key, name: str, known: Known) -> None:
    if known.name == FILL_IN:
        draft.line(key, "none", "goes with the optimizer, which is left for you")
    elif name in known.options.split():
        path = f"optimizer.{name}"
        if key.auto:
            draft.leave(path, f'"auto" in {key}: {_AUTO.get(name, "set by the script")}')
            draft.line(key, "differs", f'"auto": {_AUTO.get(name, "set by the script")}; left for you', path)
            return
        kinds = {"betas": tuple[float, float], "nesterov": bool, "centered": bool, "ns_steps": int}
        value = draft.number(key, kinds.get(name, float))
        draft.maps(key, path, list(value) if isinstance(value, tuple) else value)
    elif name in _NEUTRAL:
        neutral, text = _NEUTRAL[name]
        same = key.value == neutral or key.auto
        draft.line(key, "none" if not same else "maps", "as always here" if same else text)
    elif name in _DETAILS.split():
        draft.line(key, "none", "not needed: a detail of DeepSpeed's own optimizers")
    else:
        draft.line(key, "unknown", f"{IGNORED_PARAMETER} {known.name}")
