"""Which templates there are, and what changed in one since a project was made from it. Knows neither torch nor copier.

[Note: templates] A template is a folder in here with a `template.yml` (what it is for, its version) and a `project/`,
which copier renders: files that end in .jinja with what is in braces replaced, all others as they are. What several
templates say alike is in `shared/`, which they include. Nothing in a template runs.
"""

from dataclasses import dataclass
from pathlib import Path

from shardlight.framework.classes import project_root
from shardlight.framework.faults import ConfigError
from shardlight.framework.source import read_yaml

ROOT = Path(__file__).resolve().parent
RECORD = ".shardlight.yaml"
"""File of a project that says what it was made from."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """What `template.yml` says of a template."""

    name: str
    """Name of its folder."""
    about: str
    """What it is for, in one line."""
    version: int
    """Counted up with every change that a project of an older version should know of."""
    requires: tuple[str, ...] = ()
    """Requirements of its projects beyond shardlight, as pip takes them."""
    changes: dict[int, str] | None = None
    """For a version what it changed, and how to mend a project of the version before."""


def find_templates(root: Path = ROOT) -> dict[str, Template]:
    """The templates in a folder by name."""
    found = {}
    for path in sorted(root.glob("*/template.yml")):
        values = read_yaml(path)[0].plain()
        values["requires"] = tuple(values.get("requires") or ())
        values["changes"] = {int(version): text for version, text in (values.get("changes") or {}).items()}
        found[path.parent.name] = Template(name=path.parent.name, **values)
    return found


def what_changed(config: Path, root: Path = ROOT) -> list[str]:
    """What a project should know of later versions of its template; nothing where nothing changed, or nothing is known.

    Args:
        config: a config file of the project.
    """
    record = project_root(config.parent) / RECORD
    if not record.is_file():
        return []
    try:
        values = read_yaml(record)[0].plain()
    except ConfigError:  # somebody wrote into it
        return []
    template, made_by = find_templates(root).get(str(values.get("template"))), values.get("version")
    if template is None or not isinstance(made_by, int):
        return []
    newer = {version: text for version, text in sorted((template.changes or {}).items()) if version > made_by}
    return [f"{record}: template {template.name} {version}: {text}" for version, text in newer.items()]
