"""Builds the optimizer and the learning-rate schedule that a config describes, with decay groups by default."""

import math
from fnmatch import fnmatchcase

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
from shardlight.strategies.errors import ShardlightError
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

_OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds the torch.optim optimizer of `config` over the trainable parameters of `module`.

    Groups: "decay" and "no_decay" (see `decay_groups`), empty ones left out. Says once, on rank 0, which class runs
    and what is decayed.

    Raises: ShardlightError: nothing to train, or a `no_decay` pattern that matches no parameter.
    """
    decay, no_decay = decay_groups(module, config)
    groups = [
        {"params": list(params.values()), "weight_decay": weight_decay, "name": name}
        for name, params, weight_decay in (
            ("decay", decay, config.effective_weight_decay),
            ("no_decay", no_decay, 0.0),
        )
        if params
    ]
    if not groups:
        raise ShardlightError(f"optimizer: {type(module).__name__} has no parameter with requires_grad=True to train")
    if config.name == "sgd":
        options = {"momentum": config.momentum, "nesterov": config.nesterov}
    else:
        options = {"betas": tuple(config.betas), "eps": config.eps}
    optimizer = _OPTIMIZERS[config.name](groups, lr=config.lr, **options)
    rank_zero_info(_describe(module, config, decay, no_decay))
    return optimizer


def decay_groups(module: nn.Module, config: OptimizerConfig) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Splits the trainable parameters of `module` by whether weight decay applies.

    A parameter under several names (tied weights) counts once, under its first name, and any of its names or owners
    can exempt it. By default exempt are: parameters of a module whose class name contains "Norm", parameters whose
    own name contains "bias", and the tables of embeddings.

    Returns: (decayed, exempt), each name -> parameter; disjoint, together every trainable parameter exactly once.
    Raises: ShardlightError: a `no_decay` pattern matches no parameter.
    """
    first_names: dict[nn.Parameter, str] = {}
    exempt: set[nn.Parameter] = set()
    matched: set[str] = set()
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        for leaf_name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{owner_name}.{leaf_name}" if owner_name else leaf_name
            first_names.setdefault(param, name)
            hits = {pattern for pattern in config.no_decay if fnmatchcase(name, pattern)}
            matched |= hits
            if hits or (config.decay == "weights" and _exempt_by_kind(owner, leaf_name)):
                exempt.add(param)
    if unmatched := [pattern for pattern in config.no_decay if pattern not in matched]:
        some = ", ".join(list(first_names.values())[:5])
        raise ShardlightError(f"optimizer.no_decay: {unmatched} match no parameter; names look like: {some}")
    trainable = [(name, param) for param, name in first_names.items() if param.requires_grad]
    return (
        {name: param for name, param in trainable if param not in exempt},
        {name: param for name, param in trainable if param in exempt},
    )


def _exempt_by_kind(owner: nn.Module, leaf_name: str) -> bool:
    return "Norm" in type(owner).__name__ or "bias" in leaf_name or isinstance(owner, nn.Embedding | nn.EmbeddingBag)


def _describe(
    module: nn.Module, config: OptimizerConfig, decay: dict[str, nn.Parameter], no_decay: dict[str, nn.Parameter]
) -> str:
    def size(params: dict[str, nn.Parameter]) -> str:
        return f"{sum(p.numel() for p in params.values()):,} parameters in {len(params)} tensors"

    kinds = ["norms, biases, embeddings"] if config.decay == "weights" else []
    reason = f" ({', '.join([*kinds, *config.no_decay])})" if no_decay else ""
    frozen = sum(not p.requires_grad for p in module.parameters())
    return (
        f"optimizer: torch.optim.{_OPTIMIZERS[config.name].__name__}, lr {config.lr:g}; "
        f"weight decay {config.effective_weight_decay:g} on {size(decay)}, none on {size(no_decay)}{reason}"
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
