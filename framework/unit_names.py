"""Which class names `strategy.units` can mean, known from the source of the project."""

import ast
import sys
from pathlib import Path

from shardlight.framework.described import UnclearError
from shardlight.framework.module_source import Sources, find_spec

_WITHOUT_MODULES = ("torch", "numpy", "lightning", "shardlight", "torchmetrics", "typing_extensions")
"""Packages that bring no blocks of models, beside those of torch.nn."""


def class_names(sources: Sources, name: str) -> set[str] | None:
    """The names of all classes that parts of a model can be of: those of the project's files, and of torch.nn.

    Args:
        name: of the module that makes the model; all of the project that it imports is looked at.
    Returns: None: other packages are imported too, or classes are made while it runs: nothing can be said.
    """
    names = _torch_modules()
    for module, tree in sources.reachable(name):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            others = [target for target in sources.targets(module, node) if not sources.in_project(target)]
            if not all(map(_brings_nothing, others)):
                return None
        if module.dynamic or any(map(_makes_a_class, ast.walk(tree))):
            return None
    return names


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
