"""What a step logs on the last stage of a pipeline, micro-batch by micro-batch, logged once on all of its stages.

[Note: replayed logs] A step runs once per micro-batch, and only the last stage has its values. So `self.log` is
replaced while steps run: what the last stage logs is kept, averaged over the batch, sent to the other stages, and
logged there and here with the same arguments, as one process would have. Monitors, schedulers and progress bars see the
same on all.

A mean is weighted by samples, by the batch size that was given, or by what a weighted loss was taken over; what is
logged with `reduce_fx` sum, max or min is added up, or is the largest or smallest. Metric objects have been updated on
the last stage: the others take over their state when they are computed (`share_metrics`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.errors import PipelineError
from shardlight.strategies.logged_values import LOSS_WEIGHT
from torch import Tensor, nn
from torchmetrics import Metric

_VALUES = 56
"""How many values go with the message that is sent anyway; more take a second one."""
_LOSS_FIELDS = 4


@dataclass
class _Logged:
    """One call of `self.log` in the steps of one batch, by micro-batch."""

    keywords: dict[str, Any]
    counted: str = "samples"
    """What weighs a value: samples, the `batch_size` that was given, or the `weight` of a loss."""
    values: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    metric: str | None = None
    """The name of the Metric in the module."""
    forward_value: Any = None


@dataclass(frozen=True)
class BatchLoss:
    """The loss of one batch over its micro-batches: its mean, and the weight behind it (None: a plain loss)."""

    mean: float
    weight: float | None
    dtype: torch.dtype


class ReplayedLogs:
    """Keeps what is logged in the steps of a batch, and logs it on all stages. See [Note: replayed logs].

    Args:
        ranks: of one pipeline.
        check: refuses a value that is none on this stage, given what it is.
        source: the rank of the last stage.
        again: whether the rank of the last stage runs steps up to some block, too, as another stage.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        ranks: Collectives,
        check: Callable[[Any, str], None],
        source: int = 0,
        again: bool = False,
    ) -> None:
        self._module = module
        self._source = source
        self._again = again
        self._ranks = ranks
        self._check = check
        self._logged: dict[str, _Logged] = {}
        self._samples = 0
        self._counts_now = False
        self._calls: list[tuple[str, Any, dict[str, Any]]] = []
        """Of the step that runs."""
        self._metrics: list[Metric] = [m for m in module.modules() if isinstance(m, Metric)]
        self._before_step: list[dict[str, Any]] = []
        """What metrics held before a step that has not ended."""
        self._forms: list[tuple[Any, ...]] = []
        """What batches logged, as all stages know it: names, arguments and dtypes."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which `self.log` keeps what it is given."""
        self._logged = {}
        module = self._module
        vars(module)["log"] = self._log
        try:
            yield
        finally:
            vars(module).pop("log", None)
            self._forget_open_step()

    def begin(self, samples: int, last: bool) -> None:
        """Called before the step of a micro-batch. Args: last: on the last stage, whose values count."""
        self._samples, self._counts_now, self._calls = samples, last, []
        self._forget_open_step()
        if last and self._again:
            self._before_step = [_state_of(metric) for metric in self._metrics]

    def _forget_open_step(self) -> None:
        """Undoes what a step did to metrics that was left at another stage's block: it runs again as the last stage."""
        for metric, state in zip(self._metrics, self._before_step, strict=False):
            vars(metric).update(state)
        self._before_step = []

    def end(self, loss: Any = None, loss_weight: float = 0.0) -> None:
        """Called on the last stage when the step is done.

        Args:
            loss: what the step returned as its loss: values that are it are weighted by `loss_weight`.
        """
        self._before_step = []
        for name, value, keywords in self._calls:
            given = keywords.pop("batch_size", None)
            entry = self._logged.setdefault(name, _Logged(keywords))
            if isinstance(value, Metric):
                entry.metric, entry.forward_value = self._name_of(value, name), value._forward_cache
                continue
            weight = getattr(value, LOSS_WEIGHT, None)
            entry.counted = "weight" if weight is not None else "samples" if given is None else "batch_size"
            entry.dtype = value.dtype if isinstance(value, Tensor) else torch.float32
            entry.values.append(float(value.detach() if isinstance(value, Tensor) else value))
            if weight is None and given is None:
                weight = loss_weight if value is loss else self._samples
            entry.weights.append(float(given if weight is None else weight))

    def _log(self, name: str, value: Any, *args: Any, **keywords: Any) -> None:
        if not self._counts_now:
            return
        self._check(value, f"the value logged as '{name}'")
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        keywords |= dict(zip(names, args, strict=False))
        if isinstance(value, Mapping):
            raise PipelineError(f"self.log('{name}', ...) got a dict: use self.log_dict.")
        self._calls.append((name, value, keywords))

    def _name_of(self, metric: Metric, name: str) -> str:
        found = next((n for n, m in self._module.named_modules() if m is metric), None)
        if found is None:
            raise PipelineError(f"the metric logged as '{name}' is not an attribute of the module: make it one.")
        return found

    def replay(self, loss: BatchLoss | None) -> BatchLoss | None:
        """Sends what was kept on the last stage to all stages and logs it. Collective over the pipeline.

        Args:
            loss: of the batch, on the last stage.
        Returns: the loss of the batch.
        """
        form, values = self._summary(loss) if self._ranks.rank == self._source else ((), [])
        number = self._forms.index(form) if form in self._forms else -1
        row = torch.zeros(1 + _VALUES, dtype=torch.float64)
        row[0] = number
        row[1 : 1 + min(len(values), _VALUES)] = torch.tensor(values[:_VALUES], dtype=torch.float64)
        source = self._source
        sent = self._ranks.gather_small(row.to(self._ranks.device), "logged values").cpu()[source]
        number = int(sent[0])
        if number < 0 or 2 * len(self._forms[number][1]) + _LOSS_FIELDS > _VALUES:
            form, values = self._ranks.gather_objects((form, values), "logged values")[source]
            if number < 0:
                self._forms.append(form)
        else:
            form, values = self._forms[number], sent[1:].tolist()
        return self._log_all(form, values)

    def _summary(self, loss: BatchLoss | None) -> tuple[tuple[Any, ...], list[float]]:
        """Returns what is the same from batch to batch, and the numbers."""
        entries = tuple(
            (name, tuple(sorted(entry.keywords.items())), entry.dtype, entry.metric, entry.counted)
            for name, entry in self._logged.items()
        )
        head = [0.0] * _LOSS_FIELDS
        if loss is not None:
            head = [1.0, loss.mean, 0.0 if loss.weight is None else 1.0, loss.weight or 0.0]
        numbers = [n for entry in self._logged.values() for n in (_joined(entry), sum(entry.weights))]
        updated = tuple(metric.update_called for metric in self._metrics)
        return (None if loss is None else loss.dtype, entries, updated), head + numbers

    def _log_all(self, form: tuple[Any, ...], values: Sequence[float]) -> BatchLoss | None:
        loss_dtype, entries, updated = form
        for metric, there in zip(self._metrics, updated, strict=True):
            # It is computed here too, from the last stage's state.
            metric._update_count, metric._computed = max(int(there), metric._update_count), None
        device, numbers = self._module.device, iter(values[_LOSS_FIELDS:])
        for name, keywords, dtype, metric, counted in entries:
            value, count = next(numbers), next(numbers)
            options = dict(keywords)
            if metric is None:
                what: Any = torch.tensor(value, dtype=dtype, device=device)
            else:
                what = self._module.get_submodule(metric)
                what._forward_cache = torch.tensor(value, device=device)
            if counted == "weight":
                setattr(what, LOSS_WEIGHT, torch.tensor(count, dtype=torch.float64, device=device))
            elif counted == "batch_size":
                options["batch_size"] = int(count) if count == int(count) else torch.tensor(count, dtype=torch.float64)
            self._module.log(name, what, **options)
        there, mean, weighted, weight = values[:_LOSS_FIELDS]
        return BatchLoss(mean, weight if weighted else None, loss_dtype) if there else None


def _joined(entry: _Logged) -> float:
    if entry.metric is not None:
        value = entry.forward_value
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else float("nan")
    kind = entry.keywords.get("reduce_fx", "mean")
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "mean")
    if kind in ("sum", "max", "min"):
        return {"sum": sum, "max": max, "min": min}[kind](entry.values)
    total = sum(entry.weights)
    if not total:
        return entry.values[-1]
    return sum(v * w for v, w in zip(entry.values, entry.weights, strict=True) if w) / total


def _state_of(metric: Metric) -> dict[str, Any]:
    """Returns copies of what an update of a metric changes."""
    state = {name: getattr(metric, name) for name in metric._defaults}
    copied = {name: list(value) if _is_list(value) else value.clone() for name, value in state.items()}
    return copied | {name: vars(metric)[name] for name in ("_update_count", "_computed", "_forward_cache")}


def share_metrics(module: nn.Module, ranks: Collectives, updated: Sequence[int]) -> None:
    """Has every Metric of a module count what the ranks that update it have seen, each once, on all ranks.

    Args:
        ranks: all.
        updated: the ranks that update metrics: those of the last stage.
    """
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric._sync_dist = _Sync(metric, ranks, tuple(updated))  # type: ignore[method-assign]


class _Sync:
    """Replaces a metric's state by that of the ranks which updated it."""

    def __init__(self, metric: Metric, ranks: Collectives, updated: tuple[int, ...]) -> None:
        vars(self)["metric"] = metric
        self._ranks = ranks
        self._updated = updated

    def __call__(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        """Collective; the arguments are those of torchmetrics, and not used."""
        metric: Metric = vars(self)["metric"]
        own = {name: getattr(metric, name) for name in metric._reductions}
        own = {
            name: torch.cat([v.reshape(-1, *v.shape[1:]) for v in s]) if _is_list(s) and s else s
            for name, s in own.items()
        }
        everyone = self._ranks.gather_objects(own, "state of a metric")
        for name, reduction in metric._reductions.items():
            states = [everyone[rank][name] for rank in self._updated]
            if _is_list(getattr(metric, name)):
                there = [state for state in states if isinstance(state, Tensor)]
                setattr(metric, name, [torch.cat(there)] if there else [])
            else:
                stacked = torch.stack(states)
                setattr(metric, name, reduction(stacked) if reduction is not None else stacked)

    def __deepcopy__(self, memo: Any) -> "_Sync":
        return self

    def __reduce__(self) -> Any:
        return _no_sync, ()


def _no_sync() -> None:
    """What it is once a metric was pickled."""


def _is_list(state: Any) -> bool:
    return isinstance(state, list)
