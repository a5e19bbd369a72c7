"""Which class names `strategy.units` can mean, known from the source of the project."""

import ast
import sys
from pathlib import Path

from shardlight.framework.described import UnclearError
from shardlight.framework.module_source import Module, Sources, find_spec

_WITHOUT_MODULES = ("torch", "numpy", "lightning", "shardlight", "torchmetrics", "typing_extensions")
"""Packages that bring no blocks of models, beside those of torch.nn."""


def class_names(sources: Sources, name: str) -> set[str] | None:
    """The names of all classes that parts of a model can be of: those of the project's files, and of torch.nn.

    Args:
        name: of the module that makes the model; all of the project that it imports is looked at.
    Returns: None: other packages are imported too, or classes are made while it runs: nothing can be said.
    """
    names = _torch_modules()
    waiting, seen = [name], set()
    while waiting:
        module = sources.module(waiting.pop())
        if module.name in seen or module.tree is None:
            continue
        seen.add(module.name)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for target in _targets(sources, module, node):
                    if sources.in_project(target):
                        waiting.append(target)
                    elif not _brings_nothing(target):
                        return None
        if module.dynamic or any(map(_makes_a_class, ast.walk(module.tree))):
            return None
    return names


def _targets(sources: Sources, module: Module, node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    home = sources.absolute(module, node)
    inner = [f"{home}.{alias.name}" for alias in node.names]
    return [home, *filter(sources.in_project, inner)]


def _brings_nothing(target: str) -> bool:
    top = target.partition(".")[0]
    return top in _WITHOUT_MODULES or (top in sys.stdlib_module_names and top != "importlib")


def _makes_a_class(node: ast.AST) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"
    return named and len(node.args) > 1


def _torch_modules() -> set[str]:
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        raise UnclearError
    listed = ast.parse(Path(spec.origin).parent.joinpath("nn", "modules", "__init__.py").read_bytes())
    imports = [node for node in listed.body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}
