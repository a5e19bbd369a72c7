"""Packages that a project imports and that are not installed: known from its source and its pyproject.toml.

What a module imports at its top level it cannot do without. What it imports elsewhere (in a function, say) may be for
uses that a run does not have: that counts where the project's pyproject.toml says that it needs the package.
"""

import ast
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from shardlight.framework.module_source import Sources

_CALLED = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""What is installed under another name than it is imported by."""


@dataclass(frozen=True)
class Missing:
    """A package that is not there, or in another version than the project asks for.

    Attributes:
        requirement: as pip takes it.
        place: file and line of the import.
        found: the version that is there, or None.
    """

    requirement: str
    place: str
    found: str | None

    def __str__(self) -> str:
        there = f"; {self.found} is there" if self.found else ""
        return f"{self.requirement} ({self.place}{there})"


def installed(requirement: str) -> bool:
    """Whether what pip would be asked for is there, by name and version."""
    wanted = Requirement(requirement)
    found = _version(wanted.name)
    return found is not None and wanted.specifier.contains(found, prereleases=True)


def told(missing: list[Missing]) -> str:
    """What is missing, and the command that mends it."""
    return f"{', '.join(map(str, missing))}. Run: pip install {shlex.join(item.requirement for item in missing)}"


def missing_packages(sources: Sources, name: str) -> list[Missing]:
    """What a module of the project, or one of the project that it imports, needs and does not find."""
    declared = _declared(sources.root)
    found: dict[str, Missing] = {}
    for module, tree in sources.reachable(name):
        for node, top in _tops(tree):
            wanted = declared.get(_normal(_CALLED.get(top, top)))
            needed = wanted is not None or node in tree.body
            if top in found or not needed or top in sys.stdlib_module_names:
                continue
            there = sources.is_there(top)
            if there and (wanted is None or installed(wanted)):
                continue
            dist = _CALLED.get(top, top)
            place = f"{os.path.relpath(module.path or '', sources.root)}:{node.lineno}"
            found[top] = Missing(wanted or dist, place, _version(dist) if there else None)
    return list(found.values())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _declared(root: Path) -> dict[str, str]:
    """The requirements of the project that hold on this machine, by their names."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        wanted = [Requirement(line) for line in project.get("dependencies", [])]
    except (OSError, ValueError, TypeError, AttributeError, InvalidRequirement):
        return {}  # pip has its say on such a file
    return {_normal(item.name): str(item) for item in wanted if item.marker is None or item.marker.evaluate()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _tops(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """The top packages that are imported; not those whose lack it is prepared for, or that only types need."""
    prepared = [node for node in ast.walk(tree) if isinstance(node, ast.Try) or _is_for_types(node)]
    left_out = {id(inner) for node in prepared for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node, str(node.module).partition(".")[0]


def _is_for_types(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    return "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))
