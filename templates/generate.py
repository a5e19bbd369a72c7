"""A project from a template: copier renders it beside its place, and it is moved there when it is whole."""

import importlib.util
import keyword
import os
import re
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import copier
from shardlight.strategies.errors import ShardlightError
from shardlight.templates.catalogue import RECORD, ROOT, Template

OWN_FOLDERS = ("data", "runs", "tests", "shardlight")
"""Names that mean something else in a project."""


class ProjectError(ShardlightError):
    """A project cannot be made there, or not under that name."""


def package_name(folder: Path, name: str | None = None) -> str:
    """The name of the project's package: the one that was given, else that of its folder.

    Raises: ProjectError: it is no name that a package can have.
    Example: package_name(Path("My project")) == "my_project"
    """
    made = re.sub(r"[\s.-]+", "_", folder.resolve().name).lower() if name is None else name
    whose = f"the package of {folder}" if name is None else "--name"
    mend = "Choose another name with --name." if name is None else "Choose another."
    if not made.isidentifier() or keyword.iskeyword(made) or made.startswith("__"):
        fault = f"{whose} would be called {made!r}" if name is None else f"--name is {made!r}"
        raise ProjectError(
            f"{fault}, which is no name of a Python package: letters, digits and _, no digit first. {mend}"
        )
    if made in sys.stdlib_module_names or made in OWN_FOLDERS or _is_installed(made):
        fault = f"{whose} would be called {made!r}" if name is None else f"--name is {made!r}"
        kind = "a folder of the project" if made in OWN_FOLDERS else "a package that is there already"
        raise ProjectError(f"{fault}, which is the name of {kind}. {mend}")
    return made


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # a folder without __init__.py has none


def check_place(folder: Path) -> None:
    """Raises: ProjectError: something else is there. A folder with nothing in it but a git repository is empty."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ProjectError(f"{folder} is there already, and is no folder. Name another one.")
    inside = sorted(entry.name for entry in folder.iterdir() if entry.name != ".git")
    if inside:
        some = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        raise ProjectError(f"{folder} is not empty: {some}. Nothing was written. Name a new folder, or empty this one.")


def generate(template: Template, folder: Path, name: str, root: Path = ROOT) -> None:
    """Makes the project; when that fails, nothing is left of it.

    Args:
        template: which one.
        folder: of the project; new or empty.
        name: of its package.
        root: the folder of the templates.
    Raises: ProjectError: the place is not free, or cannot be written.
    """
    check_place(folder)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    moved: list[Path] = []
    partial = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
        made = partial / "project"
        answers = {"template": template.name, "name": name, "requires": list(template.requires)}
        copier.run_copy(str(root), made, data=answers, defaults=True, quiet=True, unsafe=False)
        (made / RECORD).write_text(_record(template))
        for entry in sorted(made.iterdir()):
            moved.append(folder / entry.name)
            os.rename(entry, moved[-1])
    except BaseException as error:
        for path in moved:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        for path in new:
            if path.is_dir():
                path.rmdir()
        if isinstance(error, OSError):
            raise ProjectError(f"{error.filename or folder} cannot be written ({error.strerror}).") from None
        raise
    shutil.rmtree(partial)


def _record(template: Template) -> str:
    return (
        "# What `shardlight init` made this project from: the check says what has changed there since.\n"
        f"template: {template.name}\nversion: {template.version}\nshardlight: {version('shardlight')}\n"
    )
