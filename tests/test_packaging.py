"""The wheel holds what the tree holds: an editable install hides a package missing from pyproject.toml."""

import compileall
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "shardlight"
ROOT = Path(__file__).resolve().parents[1]
SOURCES = "ops/csrc"  # no package, but data of one where `shardlight ops build` needs it; as are the templates' folders
PACKAGE_FOLDERS = ("commands", "framework", "strategies", "ops", "templates")
TOP_LEVEL = {"pyproject.toml", "README.md", "ARCHITECTURE.md", "LICENSE", ".ci", ".gitignore", "cli.py"}
TOP_LEVEL |= {*PACKAGE_FOLDERS, "tests", "examples"}
WHEEL_EXTRAS = (".py", ".yaml", ".toml", ".md", ".txt")  # what may lie in a package folder and has to be shipped


def tracked() -> list[str]:
    """Paths under version control, or, in an unpacked archive, all files that are no build product."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        run = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        return [p for p in run.stdout.splitlines() if (ROOT / p).is_file()]
    parts = {"__pycache__", "build", "dist", ".venv"}
    return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and not parts & set(p.parts)]


def test_every_folder_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {str(Path(p).parent) for p in tracked() if p.split("/")[0] in PACKAGE_FOLDERS}
    folders = {folder for folder in folders if not folder.startswith((SOURCES, "templates/"))}
    found = {NAME} | {f"{NAME}." + folder.replace("/", ".") for folder in folders}
    assert found == listed, f"pyproject.toml packages: add {sorted(found - listed)}, drop {sorted(listed - found)}"


def test_the_root_holds_only_cli():
    found = [p for p in tracked() if p.endswith(".py") and "/" not in p]
    assert found == ["cli.py"], "a .py file at the root would ship inside the package"


def test_the_top_level_is_fixed():
    assert {p.split("/")[0] for p in tracked()} <= TOP_LEVEL


def test_the_root_and_the_package_folders_need_no_foreign_path():
    """No `__init__.py` or `setup.py` at the root, which would make the checkout itself a package."""
    assert not (ROOT / "__init__.py").exists() and not (ROOT / "setup.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[zipfile.ZipFile]:
    """A wheel built, without network and without a C++ compiler, from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked():
        if path.split("/")[0] not in ("tests", "examples"):
            (folder / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / "tree" / path)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    command += ["--disable-pip-version-check", "-w", str(folder / "out"), str(folder / "tree")]
    env = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}  # which takes half a minute less
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = (folder / "out").glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def wheel_names(wheel) -> set[str]:
    return set(wheel.namelist())


def test_the_wheel_holds_every_tracked_file_of_the_package(wheel_names):
    expected = {
        f"{NAME}/{p}"
        for p in tracked()
        if p == "cli.py" or (p.split("/")[0] in PACKAGE_FOLDERS and p.endswith(WHEEL_EXTRAS))
    }
    expected |= {f"{NAME}/{p}" for p in tracked() if Path(p).parent in (Path(SOURCES), Path(SOURCES, "cuda"))}
    expected |= {f"{NAME}/{p}" for p in tracked() if p.startswith("templates/")}
    assert expected - wheel_names == set(), "in the tree, not in the wheel"


def test_the_wheel_holds_nothing_else(wheel_names):
    outside = {n for n in wheel_names if not n.startswith(f"{NAME}/") and ".dist-info/" not in n}
    unwanted = {n for n in wheel_names if n.startswith((f"{NAME}/tests", f"{NAME}/examples", f"{NAME}/__init__.py"))}
    assert outside | unwanted == set()
    assert any(n.endswith("licenses/LICENSE") for n in wheel_names)


def test_a_wheel_makes_projects_without_git(wheel, tmp_path):
    """As pip installs it: with compiled files, which are no part of a project."""
    wheel.extractall(tmp_path / "site")
    compileall.compile_dir(tmp_path / "site" / NAME / "templates", quiet=1)
    code = "from shardlight import cli; from shardlight.templates.catalogue import ROOT; print(ROOT); cli.main()"
    command = [sys.executable, "-P", "-c", code, "init", "tabular", "new"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PATH": "/nonexistent"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert Path(run.stdout.splitlines()[0]) == tmp_path / "site" / NAME / "templates"
    made = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert {".gitignore", "config.yaml", "data/wine.csv", "new/model.py", "tests/test_project.py"} <= made
    assert not any("__pycache__" in name for name in made)
