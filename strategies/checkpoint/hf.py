"""What a checkpoint has to know of transformers and peft models, so that an export of it opens with `from_pretrained`.

Neither package is imported: models are known by what they can do.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from shardlight.strategies.errors import CheckpointError
from torch import nn

_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def describe_models(module: nn.Module) -> list[dict[str, Any]] | None:
    """Returns the transformers models in a module as plain data; None: there are none.

    Of models within models (a decoder in a causal language model) the outermost counts.

    Infinity and nan may be in a config.

    Returns: of each: `prefix` of its names in the module ("model.", "" for the module itself), `config` and
        `generation_config` (or None) as transformers writes them, `tied`: its names that `from_pretrained` ties to
        others by itself, and `adapters`: None, or of a peft model each adapter's config.
    """
    found: list[dict[str, Any]] = []
    _collect(module, "", found)
    return found or None


def _collect(module: nn.Module, prefix: str, found: list[dict[str, Any]]) -> None:
    config = getattr(module, "config", None)
    if callable(getattr(config, "to_dict", None)) and callable(getattr(module, "save_pretrained", None)):
        generation = getattr(module, "generation_config", None)
        tied = getattr(module, "all_tied_weights_keys", None)
        adapters = getattr(module, "peft_config", None)
        found.append(
            {
                "prefix": prefix,
                "config": {**_plain(config.to_dict()), "architectures": [type(module).__name__]},
                "generation_config": _plain(generation.to_dict()) if hasattr(generation, "to_dict") else None,
                "tied": sorted(map(str, tied)) if isinstance(tied, Mapping) else [],
                "adapters": _adapters(adapters, config) if isinstance(adapters, Mapping) and adapters else None,
            }
        )
        return
    for name, child in module.named_children():
        _collect(child, f"{prefix}{name}.", found)


def _adapters(configs: Mapping[str, Any], model_config: Any) -> dict[str, Any]:
    found = {}
    for name, config in configs.items():
        data = _plain(config.to_dict())
        base = data.get("base_model_name_or_path") or getattr(model_config, "name_or_path", None) or None
        found[str(name)] = {**data, "base_model_name_or_path": base, "inference_mode": True}
    return found


def _plain(data: Any) -> Any:
    """Returns what JSON makes of a config: keys are text, sets are sorted lists, other objects their text."""

    def plain(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(value)
        return value.value if isinstance(value, Enum) else str(value)

    return json.loads(json.dumps(data, default=plain, skipkeys=True))


def model_names(names: Sequence[str], prefix: str, first: Mapping[str, str], tied: Iterable[str]) -> dict[str, str]:
    """Returns the names in a model's own export by those in the module.

    Args:
        names: those of the module below `prefix`.
        first: by name what it shares with the names that are tied to it.
        tied: the model's own names that it ties by itself: they are left out if another name is there.
    """
    kept = {n for n in names if n.removeprefix(prefix) not in set(tied)}
    held = {first[n] for n in kept}
    for name in names:
        if first[name] not in held:
            kept.add(name)
            held.add(first[name])
    return {n: n.removeprefix(prefix) for n in names if n in kept}


def adapter_names(names: Sequence[str], prefix: str, adapter: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names in peft's file of an adapter by those in the module.

    Raises: CheckpointError: an adapter that is more than matrices beside weights.
    """
    unusual = [k for k in ("use_dora", "trainable_token_indices") if config.get(k)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unusual:
        what = f"of type {config.get('peft_type')}" + "".join(f" with {k}" for k in unusual)
        what += f" with bias='{config['bias']}'" if config.get("bias", "none") != "none" else ""
        raise CheckpointError(
            f"adapter '{adapter}' is {what}, and only plain LoRA can be written in peft's format: export with "
            "'--to safetensors --only trainable', load that into the model and call its save_pretrained."
        )
    found = {}
    for name in names:
        parts = name.removeprefix(prefix).split(".")
        if adapter not in parts:
            continue
        at = parts.index(adapter)
        if at and parts[at - 1].startswith("lora_"):
            kept = [*parts[:at], *parts[at + 1 :]]
        elif at and parts[at - 1] == "modules_to_save":
            kept = [*parts[: at - 1], *parts[at + 1 :]]
        else:
            continue
        own = ".".join(kept)
        # peft's own class around a model has this in its names; a model that took an adapter itself has not.
        found[name] = own if own.startswith("base_model.model.") else f"base_model.model.{own}"
    if not found:
        raise CheckpointError(f"adapter '{adapter}' has no weights in the checkpoint.")
    return found


def check_folder_name(name: str) -> str:
    """Returns `name`. Raises: CheckpointError: it is not the name of one folder."""
    if not _FOLDER.fullmatch(name):
        raise CheckpointError(f"{name!r} is not a name that a folder can have.")
    return name
