"""Builds the optimizer and the learning-rate schedule that a config describes, with decay groups by default."""

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from shardlight.framework.optim import ADAMW_WEIGHT_DECAY, OptimizerConfig, ScheduleConfig
from shardlight.ops.lamb import Lamb
from shardlight.ops.lion import Lion
from shardlight.ops.muon_adamw import MuonAdamW
from shardlight.strategies.errors import ShardlightError
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
    "lamb": Lamb,
    "lion": Lion,
}


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds the optimizer of `config` over the trainable parameters of `module`.

    Groups: "decay" and "no_decay" (see `decay_groups`), empty ones left out; muon has two of each, see
    `hidden_matrices`. Says once, on rank 0, which class runs and what is decayed.

    Raises: ShardlightError: nothing to train, a pattern that matches no parameter, or nothing for Muon.
    """
    decay, no_decay = decay_groups(module, config)
    if not decay and not no_decay:
        raise ShardlightError(f"optimizer: {type(module).__name__} has no parameter with requires_grad=True to train")
    optimizer: torch.optim.Optimizer
    if config.name == "muon":
        optimizer = MuonAdamW(_muon_groups(hidden_matrices(module, config), config, decay, no_decay))
    else:
        options = {name: value for name, value in config.options.items() if name != "weight_decay"}
        groups = _split(decay, no_decay, config.effective_weight_decay)
        if config.name == "lamb":
            # As its authors do: what is not decayed is not scaled either.
            groups = [{**group, "adapt": group["name"] == "decay" or config.decay == "all"} for group in groups]
        optimizer = _OPTIMIZERS[config.name](groups, lr=config.lr, **options)
    rank_zero_info(_describe(module, config, optimizer, decay, no_decay))
    return optimizer


def _split(
    decay: dict[str, nn.Parameter], no_decay: dict[str, nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    halves = (("decay", decay, weight_decay), ("no_decay", no_decay, 0.0))
    return [{"params": [*params.values()], "weight_decay": w, "name": name} for name, params, w in halves if params]


def _muon_groups(
    matrices: set[nn.Parameter],
    config: OptimizerConfig,
    decay: dict[str, nn.Parameter],
    no_decay: dict[str, nn.Parameter],
) -> list[dict[str, Any]]:
    chosen, groups = config.options, []
    muon = {name: chosen[name] for name in ("momentum", "nesterov", "ns_steps")}
    muon |= {"lr": config.lr, "adjust_lr_fn": chosen["adjust_lr"]}
    adamw = {"betas": tuple(chosen["betas"]), "eps": chosen["eps"]}
    adamw["lr"] = config.lr if config.adamw_lr is None else config.adamw_lr
    rest = ADAMW_WEIGHT_DECAY if config.weight_decay is None else config.weight_decay
    for kind, options, weight_decay in (("muon", muon, chosen["weight_decay"]), ("adamw", adamw, rest)):
        own = [{n: p for n, p in half.items() if (p in matrices) == (kind == "muon")} for half in (decay, no_decay)]
        for group in _split(*own, weight_decay):
            groups.append({**group, **options, "kind": kind, "name": f"{kind}_{group['name']}"})
    return groups


def hidden_matrices(module: nn.Module, config: OptimizerConfig) -> set[nn.Parameter]:
    """Finds what Muon trains: trainable matrices (2 dims) that are not of an embedding or norm, no bias, and not named
    by `adamw_for` under any of their names.

    Raises: ShardlightError: a pattern that the config sets matches no parameter, or there is no such matrix.
    """
    patterns = config.options["adamw_for"]
    matched, found = _match(module, patterns, "adamw_for" if config.adamw_for is not None else None)
    for owner in module.modules():
        for leaf_name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            if _exempt_by_kind(owner, leaf_name):
                matched.add(param)
    matrices = {param for param in found if param.requires_grad and param.dim() == 2 and param not in matched}
    if not matrices:
        raise ShardlightError(
            f"optimizer: {type(module).__name__} has no hidden matrix for muon to train: all it has are norms, biases, "
            f"embeddings, vectors, and what adamw_for names ({', '.join(patterns)}). Use adamw, or set adamw_for."
        )
    return matrices


def _match(
    module: nn.Module, patterns: Sequence[str], option: str | None
) -> tuple[set[nn.Parameter], dict[nn.Parameter, str]]:
    """Returns the parameters with a name that matches a pattern, and all parameters with their first names.

    Args:
        option: of the config, whose patterns these are; None: they need not match anything.
    Raises: ShardlightError: a pattern matches no parameter.
    """
    first_names: dict[nn.Parameter, str] = {}
    hits: set[nn.Parameter] = set()
    matched: set[str] = set()
    for name, param in module.named_parameters(remove_duplicate=False):
        first_names.setdefault(param, name)
        found = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        matched |= found
        if found:
            hits.add(param)
    if option is not None and (unmatched := [pattern for pattern in patterns if pattern not in matched]):
        some = ", ".join(list(first_names.values())[:5])
        raise ShardlightError(f"optimizer.{option}: {unmatched} match no parameter; names look like: {some}")
    return hits, first_names


def decay_groups(module: nn.Module, config: OptimizerConfig) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Splits the trainable parameters of `module` by whether weight decay applies.

    A parameter under several names (tied weights) counts once, under its first name, and any of its names or owners
    can exempt it. By default exempt are: parameters of a module whose class name contains "Norm", parameters whose
    own name contains "bias", and the tables of embeddings.

    Returns: (decayed, exempt), each name -> parameter; disjoint, together every trainable parameter exactly once.
    Raises: ShardlightError: a `no_decay` pattern matches no parameter.
    """
    exempt, first_names = _match(module, config.no_decay, "no_decay")
    for owner in module.modules() if config.decay == "weights" else ():
        for leaf_name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            if _exempt_by_kind(owner, leaf_name):
                exempt.add(param)
    trainable = [(name, param) for param, name in first_names.items() if param.requires_grad]
    return (
        {name: param for name, param in trainable if param not in exempt},
        {name: param for name, param in trainable if param in exempt},
    )


def _exempt_by_kind(owner: nn.Module, leaf_name: str) -> bool:
    return "Norm" in type(owner).__name__ or "bias" in leaf_name or isinstance(owner, nn.Embedding | nn.EmbeddingBag)


def _describe(
    module: nn.Module,
    config: OptimizerConfig,
    optimizer: torch.optim.Optimizer,
    decay: dict[str, nn.Parameter],
    no_decay: dict[str, nn.Parameter],
) -> str:
    def size(params: Iterable[nn.Parameter]) -> str:
        held = list(params)
        return f"{sum(p.numel() for p in held):,} parameters in {len(held)} tensors"

    kinds = ["norms, biases, embeddings"] if config.decay == "weights" else []
    reason = f" ({', '.join([*kinds, *config.no_decay])})" if no_decay else ""
    frozen = sum(not p.requires_grad for p in module.parameters())
    amount = f"{config.effective_weight_decay:g}"
    if isinstance(optimizer, MuonAdamW):
        rest = [g for g in optimizer.param_groups if g["kind"] == "adamw"]
        muon = [p for g in optimizer.param_groups if g["kind"] == "muon" for p in g["params"]]
        runs = f"torch.optim.Muon, lr {config.lr:g}, for {size(muon)}"
        if rest:
            runs += f", torch.optim.AdamW, lr {rest[0]['lr']:g}, for {size(p for g in rest for p in g['params'])}"
            amount += f" (AdamW {ADAMW_WEIGHT_DECAY:g})" if config.weight_decay is None else ""
    else:
        where = "torch.optim" if type(optimizer).__module__.startswith("torch.") else type(optimizer).__module__
        runs = f"{where}.{type(optimizer).__name__}, lr {config.lr:g}"
    return (
        f"optimizer: {runs}; weight decay {amount} on {size(decay.values())}, none on {size(no_decay.values())}{reason}"
        + (f"; {frozen} frozen tensors left out" if frozen else "")
    )


def learning_rate_factor(config: ScheduleConfig, total_steps: int | float, step: int) -> float:
    """The factor on the learning rate of optimizer step `step`, counted from 0.

    Example: cosine, warmup_steps 1, total_steps 5, min_lr_ratio 0: steps 0 to 5 give 0.5, 1, 0.854, 0.5, 0.146, 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.name == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
    fall = 1 - progress if config.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall


def build_schedule(optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int | float) -> LambdaLR:
    """Builds the schedule of `config`; its `step()` is to be called once per optimizer step.

    Args:
        total_steps: optimizer steps of the whole training, used where `config.total_steps` is unset;
            `constant` does not use it.
    Raises: ShardlightError: the end is unknown (infinite), or the warmup does not fit before it.
    """
    total_steps = total_steps if config.total_steps is None else config.total_steps
    if config.name != "constant":
        if not math.isfinite(total_steps):
            raise ShardlightError(
                f"schedule: {config.name} needs an end, and the length of the training is unknown. "
                "Set schedule.total_steps or trainer.max_steps."
            )
        if total_steps <= config.warmup_steps:
            raise ShardlightError(
                f"schedule: warmup_steps {config.warmup_steps} does not fit into {total_steps} optimizer steps. "
                "Lower warmup_steps, or train longer."
            )
    # A plain function on purpose: LambdaLR saves nothing of it, so that a resumed run follows its own config.
    return LambdaLR(optimizer, lambda step: learning_rate_factor(config, total_steps, step))
