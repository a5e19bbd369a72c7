"""What a training project uses: the module, the config, the callbacks. Names are imported when first used.

[Note: lazy exports] Importing torch takes seconds, and `shardlight --help` needs none of it (PEP 562).
"""

import importlib
from typing import Any

__all__ = [
    "Config",
    "ConfigError",
    "OptimizerConfig",
    "Progress",
    "RunSummary",
    "ScheduleConfig",
    "TrainingModule",
    "config_from_dict",
    "load_config",
]

_HOMES = {
    "TrainingModule": "module",
    "OptimizerConfig": "optim",
    "ScheduleConfig": "optim",
    "Config": "schema",
    "ConfigError": "faults",
    "load_config": "config",
    "config_from_dict": "config",
    "Progress": "progress",
    "RunSummary": "summary",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
