"""Settles DeepSpeed's `scheduler`: to our schedule where it is the same function, with what is not the same in words.

Of optimizer step s, counted from 0, DeepSpeed uses its function at s - 1, and its lowest rate at s = 0.
"""

import dataclasses
from typing import Any

from shardlight.framework.check import BAD
from shardlight.framework.migrate.draft import Draft, Key
from shardlight.framework.migrate.rules import IGNORED_PARAMETER
from shardlight.framework.source import FILL_IN

_WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
_CYCLE = (
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
    "last_batch_iteration"
)
_RANGE = (
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase last_batch_iteration"
)
SCHEDULERS: dict[str, tuple[str | None, str, str]] = {
    "WarmupLR": ("constant", "constant after the warmup", _WARMUP),
    "WarmupDecayLR": ("linear", "falls in a line to warmup_min_lr", f"{_WARMUP} total_num_steps"),
    "WarmupCosineLR": (
        "cosine",
        "the same half cosine",
        "warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration total_num_steps",
    ),
    "OneCycle": ("linear", "one cycle is a warmup and a fall in a line", _CYCLE),
    "LRRangeTest": (None, "a search for a rate: Lightning's learning-rate finder works under every strategy", _RANGE),
}
"""DeepSpeed's scheduler -> our schedule, what it is, and its parameters."""
_LINEAR = "the rise is the same line up to two steps: lr x (s + 1) / (W + 1) here, lr x (s - 1) / W there"
_LOG = "DeepSpeed's rise is log(s) / log(W), fast at first; here it is a line. Check the first W steps"
_AUTO = {
    "warmup_num_steps": "TrainingArguments.warmup_steps (or warmup_ratio x steps), 0 where unset",
    "warmup_max_lr": "TrainingArguments.learning_rate, 5e-5 where unset",
    "total_num_steps": "the steps of the whole training, as here where schedule.total_steps is unset",
    "warmup_min_lr": "0",
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The highest rate, where the scheduler and not the optimizer sets it; FILL_IN: left to the user."""

    value: Any
    why: str
    key: Key | None


def settle_schedule(draft: Draft) -> Peak | None:
    """Writes `schedule`; returns the highest rate where the scheduler sets it."""
    keys = {
        key.name.removeprefix("scheduler.").removeprefix("params."): key for key in draft.facts.get("scheduler", [])
    }
    kind, group = keys.pop("type", None), keys.pop("params", None)
    if group is not None:
        draft.line(group, "none", "empty: DeepSpeed's defaults")
    if kind is None:
        for key in keys.values():
            draft.line(key, "none", "without effect: scheduler.type is missing")
        return None
    name = str(kind.value)
    if name not in SCHEDULERS or SCHEDULERS[name][0] is None:
        text = f"{SCHEDULERS[name][1]}" if name in SCHEDULERS else "no such schedule here: constant, linear, cosine"
        draft.line(kind, "none", f"{text}. A module's own configure_optimizers may return any of torch's")
        for key in keys.values():
            draft.line(key, "none", f"goes with {name}")
        return None
    return _Schedule(draft, kind, keys, name).settle()


def _ratio(low: float, high: float) -> float:
    """As a person would write it: 1e-6 / 1e-4 is 0.01."""
    return float(f"{low / high:.12g}")


class _Schedule:
    """One scheduler on its way to ours; `keys` are its parameters by name."""

    def __init__(self, draft: Draft, kind: Key, keys: dict[str, Key], name: str):
        self.draft = draft
        self.kind = kind
        self.keys = keys
        self.name = name
        self.ours, self.what, known = SCHEDULERS[name]
        self.known = known.split()

    def settle(self) -> Peak | None:
        """Writes everything, with a line for each key."""
        self.draft.put("schedule.name", self.ours, self.kind)
        for name in [name for name in self.keys if name not in self.known]:
            if name.split(".")[0] not in self.known:
                self.draft.line(self.keys.pop(name), "unknown", f"{IGNORED_PARAMETER} {self.name}")
        if (key := self.keys.pop("last_batch_iteration", None)) is not None:
            self.draft.line(key, "none", "not needed: a checkpoint knows its step")
        peak = self._cycle() if self.name == "OneCycle" else self._warmup()
        return None if self.name == "WarmupCosineLR" else peak

    def number(self, name: str, default: Any, kind: Any = float) -> Any:
        """A parameter's value: the default where it is unset, FILL_IN where transformers sets it."""
        key = self.keys.get(name)
        if key is None or key.value is None:
            return default
        if key.auto or isinstance(key.node.value, list):
            return FILL_IN
        return self.draft.number(key, kind, 0)

    def tell(self, name: str, text: str = "", to: str = "", group: Any = None) -> None:
        """Adds the line of a parameter, if it is there."""
        key = self.keys.get(name)
        if key is None:
            return
        if key.auto:
            text = f'"auto": {_AUTO.get(name, "set by the script")}' + ("" if to == "" else "; left for you")
            group = "differs"
        elif isinstance(key.node.value, list):
            text, group = "one for each group of parameters: write your own configure_optimizers for that", "none"
        self.draft.line(key, group or "maps", text, to)

    def put(self, path: str, value: Any, name: str) -> None:
        """Writes a value that a parameter states, or its default."""
        key = self.keys.get(name)
        if value is BAD:
            return
        if value == FILL_IN:
            self.draft.leave(path, f'"auto" in {key}: {_AUTO.get(name, "set by the script")}')
        else:
            self.draft.put(path, value, key or f"DeepSpeed's own where {name} is unset")

    def ends(self, warmup: Any, total: Any, home: Key | None) -> None:
        """A schedule has to be longer than its warmup."""
        if isinstance(warmup, int) and isinstance(total, int) and total <= warmup and home is not None:
            names = f"{home.name} is {total}, but the warmup has {warmup} steps"
            self.draft.fault(home, f"{names}: nothing is left for the rest. Make them agree.")

    def _warmup(self) -> Peak | None:
        warmup = self.number("warmup_num_steps", 1000, int)
        self.put("schedule.warmup_steps", warmup, "warmup_num_steps")
        self.tell("warmup_num_steps", to="schedule.warmup_steps")
        if self.ours != "constant":
            total = self.number("total_num_steps", FILL_IN, int)
            if total != FILL_IN and total is not BAD:
                self.put("schedule.total_steps", total, "total_num_steps")
            elif "total_num_steps" not in self.keys:
                self.draft.leave("schedule.total_steps", "total_num_steps, which DeepSpeed asks for")
            self.tell("total_num_steps", to="schedule.total_steps" if total != FILL_IN else "")
            self.ends(warmup, total, self.keys.get("total_num_steps"))
        linear = "warmup_type" in self.keys and str(self.keys["warmup_type"].value) == "linear"
        self.draft.line(
            self.kind, "maps" if linear else "differs", self.what + ("" if linear else f". {_LOG}"), "schedule.name"
        )
        self.tell("warmup_type", _LINEAR if linear else _LOG, group="maps" if linear else "differs")
        if "warmup_type" not in self.keys:
            self.draft.unset("scheduler.params.warmup_type", f"log is DeepSpeed's own. {_LOG}", near=self.kind)
        if self.name == "WarmupCosineLR":
            self.put("schedule.min_lr_ratio", self.number("cos_min_ratio", 0.0001), "cos_min_ratio")
            self.tell("cos_min_ratio", to="schedule.min_lr_ratio")
            self._start("warmup_min_ratio", self.number("warmup_min_ratio", 0.0))
            return None
        return self._rates()

    def _rates(self) -> Peak:
        """warmup_min_lr and warmup_max_lr: the scheduler sets the rates, whatever the optimizer's is."""
        low, high = self.number("warmup_min_lr", 0.0), self.number("warmup_max_lr", None)
        low = 0.0 if "warmup_min_lr" in self.keys and self.keys["warmup_min_lr"].auto else low
        key = self.keys.get("warmup_max_lr")
        self.tell("warmup_max_lr", "the scheduler sets the rate, not optimizer.params.lr", group="maps")
        if self.ours == "linear" and low not in (0.0, BAD):
            ratio = _ratio(low, high) if isinstance(low, float) and isinstance(high, float) and high > 0 else FILL_IN
            self.draft.put("schedule.min_lr_ratio", ratio, f"{self.keys['warmup_min_lr']} / warmup_max_lr")
            text = "the end of the fall; the warmup begins at 0 here"
            self.tell("warmup_min_lr", text, "schedule.min_lr_ratio", "differs")
        else:
            self._start("warmup_min_lr", low)
        if key is not None and high is not None:
            why = f'"auto" in {key}: {_AUTO["warmup_max_lr"]}' if high == FILL_IN else str(key)
            return Peak(high, why, key)
        if self.name == "WarmupDecayLR":
            return Peak(0.001, "DeepSpeed's own where warmup_max_lr is unset", None)
        why = "warmup_max_lr is unset: 0.001 in DeepSpeed's older versions, the optimizer's lr in newer ones"
        self.draft.unset("scheduler.params.warmup_max_lr", f"{why}; left for you", near=self.kind)
        return Peak(FILL_IN, why, None)

    def _start(self, name: str, low: Any) -> None:
        if low in (0.0, BAD):
            self.tell(name, "the warmup begins at 0 here too")
        else:
            self.tell(name, f"the warmup begins at 0 here, not at {low}. Check the first steps", group="differs")

    def _cycle(self) -> Peak:
        first = self.number("cycle_first_step_size", 2000, int)
        second = self.number("cycle_second_step_size", first, int)
        low, high = self.number("cycle_min_lr", None), self.number("cycle_max_lr", None)
        self.put("schedule.warmup_steps", first, "cycle_first_step_size")
        self.tell("cycle_first_step_size", to="schedule.warmup_steps")
        if isinstance(first, int) and isinstance(second, int):
            self.draft.put("schedule.total_steps", first + second, f"{self.kind}: both halves of the cycle")
            self.ends(first, first + second, self.keys.get("cycle_second_step_size", self.kind))
        self.tell("cycle_second_step_size", to="schedule.total_steps")
        if isinstance(low, float) and isinstance(high, float) and high > 0:
            if low > high:
                self.draft.fault(
                    self.keys["cycle_min_lr"], f"cycle_min_lr is {low}, above cycle_max_lr {high}. Swap them."
                )
            elif low > 0:
                self.draft.put(
                    "schedule.min_lr_ratio", _ratio(low, high), f"{self.keys['cycle_min_lr']} / cycle_max_lr"
                )
        text = f"{self.what}; the warmup begins at 0, momentum stays, and after the cycle the lowest rate is kept"
        self.draft.line(self.kind, "differs", f"{text}. Check the rates you had", "schedule.name")
        self.tell(
            "cycle_min_lr", "the end of the fall; the warmup begins at 0 here", "schedule.min_lr_ratio", "differs"
        )
        self.tell("cycle_max_lr", "the scheduler sets the rate, not optimizer.params.lr")
        for name in ("cycle_first_stair_count", "cycle_second_stair_count"):
            self.tell(name, "no stairs here", group="none")
        for name in ("decay_lr_rate", "decay_step_size"):
            self.tell(name, "no fall after the cycle: the lowest rate is kept", group="none")
        for name in ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"):
            self.tell(name, "betas do not move: optimizer.betas is what they are", group="none")
        if isinstance(high, float):
            return Peak(high, str(self.keys["cycle_max_lr"]), self.keys["cycle_max_lr"])
        return Peak(FILL_IN, "cycle_max_lr, which DeepSpeed asks for", self.keys.get("cycle_max_lr"))
