"""Imports point one way: a folder may import only what stands before it, absolutely, at the top of the file."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from shardlight import strategies

NAME = "shardlight"
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["ops", "strategies", "framework", "templates", "commands", "cli"]  # lowest first; some may not exist yet
HEAVY = (
    "torch",
    "lightning",
    "torchmetrics",
    "matplotlib",
    "tensorboard",
    "copier",
)  # not for a command that only answers
# Packages that a file may import late, inside a function: those a user may not have, and those too slow for --help.
LATE_PACKAGES = {"deepspeed", "matplotlib", "tensorboard", "rich", "pynvml"}


def sources() -> list[Path]:
    """Every product file: the folders that exist, and cli.py."""
    files = [p for folder in FOLDERS[:-1] for p in sorted((ROOT / folder).rglob("*.py"))]
    files = [
        p for p in files if "project" not in p.parts[:-1]
    ]  # a template's project is data, see templates/catalogue.py
    return files + [p for p in [ROOT / "cli.py"] if p.exists()]


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file; several tests look at each."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[int, str, bool, bool]]:
    """Returns (line, dotted target, inside a function, for the type checker only) of each import in a file."""
    return list(found_imports(tree_of(path)))


def found_imports(tree: ast.Module):
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(n) for f in functions for n in ast.walk(f)}
    guarded = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for n in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            targets = {f"{module}.{a.name}" if f"{module}.{a.name}" in MODULES else module for a in node.names}
        else:
            continue
        for target in targets:
            yield node.lineno, target, id(node) in inside, id(node) in guarded


def ours(target: str) -> bool:
    """Whether an import names our code, in whatever form."""
    return target.startswith(".") or target.split(".")[0] in (NAME, *FOLDERS)


def module_name(path: Path) -> str:
    """The dotted name a file is imported by."""
    return ".".join([NAME, *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


SOURCES = sources()
MODULES = {module_name(path) for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    here = str(path.relative_to(ROOT))
    folder = here.split("/")[0].removesuffix(".py")
    for line, target, late, _ in imports(path):
        if ours(target):
            assert target.startswith(NAME + "."), f"{here}:{line}: write 'from {NAME}.… import …', not '{target}'"
            other = target.split(".")[1]
            assert FOLDERS.index(other) <= FOLDERS.index(folder), f"{here}:{line}: {folder} may not import {other}"
        if late and folder not in ("commands", "cli"):
            assert target.split(".")[0] in LATE_PACKAGES, f"{here}:{line}: import {target} at the top of the file"


def test_no_import_cycle():
    """A package's `__init__` counts as importing what it names; that `import a.b` runs `a` too is no cycle here."""
    edges = {}
    for path in SOURCES:
        found = {target for _, target, late, guarded in imports(path) if not late and not guarded}
        edges[module_name(path)] = (found & MODULES) - {module_name(path)}
    while leaves := [m for m, out in edges.items() if not out]:
        for module in leaves:
            del edges[module]
        for out in edges.values():
            out.difference_update(leaves)
    assert not edges, f"import cycle among {sorted(edges)}"


@pytest.mark.parametrize(
    "module",
    [
        "framework",
        "framework.bench.zero",
        "framework.bench.collectives",
        "framework.bench.pipeline",
        "commands.checkpoint",
        "framework.migrate.report",
        "templates.catalogue",
        "cli",
    ],
)
def test_a_light_module_does_not_import_torch(module):
    """`shardlight --help` answers in 0.3 s: neither the command line nor the bare framework package imports torch."""
    script = f"import sys, {NAME}.{module}\nprint([m for m in {HEAVY} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]", f"import {NAME}.{module} brings in {run.stdout}"


LAZY = """
import sys
import shardlight.strategies.engine.engine
assert not {"lightning", "torchmetrics", "matplotlib"} & {m.split(".")[0] for m in sys.modules}, "the engine needs them"

import lightning.pytorch as pl
from shardlight.strategies import registration
registry = pl.strategies.StrategyRegistry
assert {*registration.CLASSES} <= {*registry}, "Lightning came later than shardlight"
assert not any(isinstance(finder, registration._Watch) for finder in sys.meta_path)
assert "shardlight.strategies.base" not in sys.modules, "no strategy was used yet"
made = {name: registry.get(name) for name in registration.CLASSES}

import shardlight.framework, shardlight.strategies
assert {name: type(strategy) for name, strategy in made.items()} == shardlight.strategies.STRATEGIES
for package in (shardlight.framework, shardlight.strategies):
    print(len([getattr(package, name) for name in package.__all__]), set(package.__all__) <= set(dir(package)))
"""


def test_the_engine_needs_no_lightning_and_every_lazy_name_is_there():
    """PEP 562. The other order, Lightning first, is that of `test_a_plain_script_trains...` in test_lifecycle.py."""
    run = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines()[-2:]:
        assert int(line.split()[0]) > 0 and line.split()[1] == "True", run.stdout


def test_a_lazy_name_has_the_home_that_the_type_checker_is_told():
    tree = ast.parse((ROOT / "strategies" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == {name: f"{strategies.__name__}.{home}" for name, home in strategies._HOMES.items()}
    assert set(told) == set(strategies.__all__)
