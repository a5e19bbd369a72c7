"""Which values a module logs, known from its source: what a checkpoint or a callback can watch."""

import ast
from collections.abc import Iterable, Iterator

from shardlight.framework.described import CALLBACK, DATA_MODULE, MODULE, TRAINING_MODULE, Described, UnclearError
from shardlight.framework.module_source import Module, Sources
from shardlight.framework.source import Node

_ALWAYS = {"step", "epoch"}
"""What can be watched without being logged."""
_OWN = {"loss", "grad_norm"}
"""What a TrainingModule logs itself."""
_KEEP_IT = {"isinstance", "hasattr", "getattr", "type", "repr", "str", "print", "len", "id"}
"""Functions that do not log what they are given."""
_KNOWN = ("lightning", "shardlight", "torch", "typing", "abc")


def watched(tree: Node) -> Iterator[tuple[str, Node]]:
    """(path, node) of every name in a config that something watches."""
    node = tree.find("checkpoint.monitor")
    if node is not None:
        yield "checkpoint.monitor", node
    callbacks = tree.value.get("callbacks")
    for name, item in callbacks.value.items() if callbacks is not None and isinstance(callbacks.value, dict) else ():
        node = item.find("monitor")
        if node is not None:
            yield f"callbacks.{name}.monitor", node


def logged_names(sources: Sources, module: Described, others: Iterable[Described] = ()) -> set[str] | None:
    """The names that a module logs, and the callbacks that know it.

    Args:
        sources: of the project.
        module: the class of the module.
        others: classes of the callbacks and of the data.
    Returns: None: the source does not tell: a name that is computed, or code of other packages that may log.
    """
    names = set(_OWN) if module.derives_from(TRAINING_MODULE) else set()
    seen: set[str] = set()
    for target in (module, *others):
        for base in target.lineage:
            home = base.rpartition(".")[0]
            if home.partition(".")[0] in _KNOWN or base in (MODULE, DATA_MODULE, CALLBACK, TRAINING_MODULE):
                continue
            if not sources.in_project(home):
                return None
            for part, tree in sources.reachable(home):
                if part.name in seen:
                    continue
                seen.add(part.name)
                try:
                    names |= {name for node in ast.walk(tree) for name in _logged(part, node)}
                except UnclearError:
                    return None
    return names


def is_logged(name: str, names: set[str]) -> bool:
    """Whether Lightning has a value of that name when so much is logged: it adds endings of its own."""
    if name in _ALWAYS:
        return True
    first = name.partition("/dataloader_idx_")[0]
    return any(first in (known, f"{known}_step", f"{known}_epoch") for known in names)


def _logged(module: Module, node: ast.AST) -> Iterator[str]:
    """The names that a call logs. Raises: UnclearError: it may log others."""
    if module.dynamic:
        raise UnclearError
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    arguments = [*node.args, *(item.value for item in node.keywords)]
    if any(isinstance(item, ast.Name) and item.id == "self" for item in arguments) and name not in _KEEP_IT:
        raise UnclearError
    if not isinstance(node.func, ast.Attribute) or name not in ("log", "log_dict") or not arguments:
        return
    owner = node.func.value
    if isinstance(owner, ast.Name) and any(isinstance(item, ast.Import) for item in module.bound.get(owner.id, [])):
        return  # math.log
    keys = [item.value for item in node.keywords if item.arg in ("name", "dictionary")]
    given = node.args[0] if node.args else keys[0] if keys else None
    texts = given.keys if name == "log_dict" and isinstance(given, ast.Dict) else [given]
    for text in texts:
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            raise UnclearError
        yield text.value
