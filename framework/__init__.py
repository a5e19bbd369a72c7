"""What a training project uses: the module, the config, the callbacks. Names are imported when first used.

[Note: lazy exports] Importing torch takes seconds, and `shardlight --help` needs none of it (PEP 562).
"""

from shardlight.strategies.lazy_names import serve

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


__getattr__ = serve(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
