"""What a training project uses: the module, the config, the callbacks. Names are imported when first used.

[Note: lazy exports] Importing torch takes seconds, and `shardlight --help` needs none of it (PEP 562).
"""

from typing import TYPE_CHECKING

from shardlight.strategies.lazy_names import serve

if TYPE_CHECKING:
    from shardlight.framework.config import config_from_dict, load_config
    from shardlight.framework.constraints import DirectoryPath, FilePath
    from shardlight.framework.faults import ConfigError
    from shardlight.framework.module import TrainingModule
    from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
    from shardlight.framework.progress import Progress
    from shardlight.framework.schema import Config
    from shardlight.framework.summary import RunSummary

__all__ = [
    "Config",
    "ConfigError",
    "DirectoryPath",
    "FilePath",
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
    "DirectoryPath": "constraints",
    "FilePath": "constraints",
    "load_config": "config",
    "config_from_dict": "config",
    "Progress": "progress",
    "RunSummary": "summary",
}


__getattr__ = serve(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
