"""The wheel holds what the tree holds: an editable install hides a package missing from pyproject.toml."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

NAME = "shardlight"
ROOT = Path(__file__).resolve().parents[1]
SOURCES = "ops/csrc"  # no package, but data of one where `shardlight ops build` needs it
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
    folders = {folder for folder in folders if not folder.startswith(SOURCES)}
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
def wheel_names(tmp_path_factory) -> set[str]:
    """Names inside a wheel built, without network, from a copy of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked():
        if path.split("/")[0] not in ("tests", "examples"):
            (folder / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / "tree" / path)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    command += ["--disable-pip-version-check", "-w", str(folder / "out"), str(folder / "tree")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = (folder / "out").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_tracked_file_of_the_package(wheel_names):
    expected = {
        f"{NAME}/{p}"
        for p in tracked()
        if p == "cli.py" or (p.split("/")[0] in PACKAGE_FOLDERS and p.endswith(WHEEL_EXTRAS))
    }
    expected |= {f"{NAME}/{p}" for p in tracked() if Path(p).parent in (Path(SOURCES), Path(SOURCES, "cuda"))}
    assert expected - wheel_names == set(), "in the tree, not in the wheel"


def test_the_wheel_holds_nothing_else(wheel_names):
    outside = {n for n in wheel_names if not n.startswith(f"{NAME}/") and ".dist-info/" not in n}
    unwanted = {n for n in wheel_names if n.startswith((f"{NAME}/tests", f"{NAME}/examples", f"{NAME}/__init__.py"))}
    assert outside | unwanted == set()
    assert any(n.endswith("licenses/LICENSE") for n in wheel_names)
