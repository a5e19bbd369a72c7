"""What the tests of `shardlight migrate` share: the configs of others in migrate_sources/, and short ways to migrate."""

import json
import re
from pathlib import Path

import pytest
import yaml
from shardlight.framework.faults import ConfigError
from shardlight.framework.migrate.convert import migrate

SOURCES = Path(__file__).parent / "migrate_sources"
FILES = sorted(path.name for path in SOURCES.iterdir())


class FloatLoader(yaml.SafeLoader):
    """YAML 1.2 numbers, as our reader has them: 3.0e-07 without a sign or dot too."""


FloatLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def write(folder: Path, source: dict, name: str = "ds_config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(source, indent=1))
    return path


def lines(folder: Path, source: dict) -> dict:
    return {line.key: line for line in migrate(write(folder, source)).lines}


def config(folder: Path, source: dict) -> dict:
    return yaml.load(migrate(write(folder, source)).text, FloatLoader)


def fault(folder: Path, source: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        migrate(write(folder, source))
    return str(caught.value)


def leaf_names(tree: dict, prefix: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else name
        found += leaf_names(value, path) if isinstance(value, dict) and value else [path]
    return found
