"""From files and overrides to one tree: `extends`, merging, and interpolation.

The order is: `extends` < the file < `key=value`; the defaults of the dataclasses come below all of them, in
check.py. `${vars.x}` is resolved once, after the merge, by OmegaConf; of its resolvers only `oc.env` is allowed,
since a config may not call anything.
"""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from shardlight.framework.faults import ConfigError, Fault
from shardlight.framework.source import BROKEN, FILL_IN, Node, Override, parse_override, read_yaml

SHORT = {"strategy": "name", "init_from": "path", "resume": "path"}
"""Sections that may be one text, and the key that it then is the value of."""


def load_tree(path: str, overrides: Iterable[str] = ()) -> tuple[Node, list[Fault]]:
    """Reads a config file with everything it extends, the overrides merged and interpolation resolved.

    Returns: the tree, and the faults found so far, so that the rest can still be checked.
    Raises: ConfigError: a file cannot be read or is not in the YAML subset.
    """
    faults: list[Fault] = []
    tree = _read_extended(path, (), faults)
    seen: dict[str, Override] = {}
    for text in overrides:
        override, found = parse_override(text)
        faults += found
        if override is None:
            continue
        earlier = seen.setdefault(override.path, override)
        if earlier.node.plain() != override.node.plain():
            values = f"{earlier.node.plain()!r} and {override.node.plain()!r}"
            faults.append(Fault(override.node.origin, f"{override.path} is given twice: {values}. Keep one."))
        tree = _apply(tree, override, faults)
    return interpolate(_filled_in(tree, faults), faults), faults


def _filled_in(node: Node, faults: list[Fault], path: tuple[Any, ...] = ()) -> Node:
    """Returns the tree with a fault for each value that is still FILL_IN, as `shardlight migrate` leaves them."""
    if isinstance(node.value, dict):
        return Node({key: _filled_in(item, faults, (*path, key)) for key, item in node.value.items()}, node.origin)
    if node.value != FILL_IN:
        return node
    text = f"{_dotted(path)} is still {FILL_IN}: write its value; the comment beside it says where that comes from."
    faults.append(Fault(node.origin, text))
    return Node(BROKEN, node.origin)


def _read_extended(path: str, chain: tuple[str, ...], faults: list[Fault]) -> Node:
    chain = (*chain, os.path.realpath(path))
    tree, found = read_yaml(path)
    faults += found
    tree = named_strategy(tree)
    base: Node | None = None
    for name, node in _extended(tree):
        child = os.path.join(os.path.dirname(path), name)
        if os.path.realpath(child) in chain:
            raise ConfigError([Fault(node.origin, f"extends {name}: the files extend each other in a circle.")])
        if not os.path.isfile(child):
            raise ConfigError([Fault(node.origin, f"extends {name}: there is no file {child}.")])
        read = _read_extended(child, chain, faults)
        base = read if base is None else merge(base, read)
    return tree if base is None else merge(Node({**base.value, "extends": tree.value["extends"]}, base.origin), tree)


def _extended(tree: Node) -> Iterator[tuple[str, Node]]:
    node = tree.value.get("extends")
    if node is None or node.value is None:
        return
    for item in node.value if isinstance(node.value, list) else [node]:
        if not isinstance(item.value, str):
            text = f"extends must be a file name or a list of them, got {item.plain()!r}."
            raise ConfigError([Fault(item.origin, text)])
        yield item.value, item


def named_strategy(tree: Node) -> Node:
    """`strategy: zero3` as `strategy: {name: zero3}`, so that both kinds merge; so with all of SHORT."""
    values = dict(tree.value)
    for section, key in SHORT.items():
        node = values.get(section)
        if node is not None and isinstance(node.value, str):
            values[section] = Node({key: node}, node.origin)
    return Node(values, tree.origin)


def merge(below: Node, above: Node) -> Node:
    """Mappings are merged key by key; anything else, null too, replaces what is below it."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    value = dict(below.value)
    for key, node in above.value.items():
        value[key] = merge(value[key], node) if key in value else node
    return Node(value, above.origin)


def _apply(tree: Node, override: Override, faults: list[Fault]) -> Node:
    if override.parts[0] == "extends":
        faults.append(Fault(override.node.origin, "extends can only be set in a file."))
        return tree
    node = override.node
    for part in reversed(override.parts[1:]):
        node = Node({part: node}, override.node.origin)
    key = override.parts[0]
    if override.parts == (key,) and key in SHORT and isinstance(node.value, str):
        node = Node({SHORT[key]: node}, node.origin)
    return Node({**tree.value, key: _set(tree.value.get(key), node)}, tree.origin)


def _set(below: Node | None, above: Node) -> Node:
    """As `merge`, and a mapping {index: value} on a list replaces those items; origins below are kept."""
    if below is None:
        return above
    if isinstance(below.value, list) and isinstance(above.value, dict):
        items = list(below.value)
        if above.value and all(key.isdigit() and int(key) < len(items) for key in above.value):
            for key, node in above.value.items():
                items[int(key)] = _set(items[int(key)], node)
            return Node(items, below.origin)
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    value = dict(below.value)
    for key, node in above.value.items():
        value[key] = _set(value.get(key), node)
    return Node(value, below.origin)


def interpolate(tree: Node, faults: list[Fault]) -> Node:
    """Returns the tree with every `${...}` resolved; faults name the key and what could not be resolved."""
    texts = dict(_texts(tree, ()))
    if not texts:
        return tree
    broken = {}
    for path, node in texts.items():
        fault = _forbidden(node.value) or _syntax(node.value)
        if fault is not None:
            broken[path] = Fault(node.origin, f"{_dotted(path)}: {node.value!r} {fault}")
    config = OmegaConf.create(_without(tree.plain(), broken))

    def resolve(node: Node, path: tuple[Any, ...]) -> Node:
        if isinstance(node.value, dict):
            return Node({key: resolve(item, (*path, key)) for key, item in node.value.items()}, node.origin)
        if isinstance(node.value, list):
            return Node([resolve(item, (*path, index)) for index, item in enumerate(node.value)], node.origin)
        if path in broken or path not in texts:
            return Node(BROKEN, node.origin) if path in broken else node
        return _resolved(config, path, node, faults)

    faults += broken.values()
    return resolve(tree, ())


def _resolved(config: Any, path: tuple[Any, ...], node: Node, faults: list[Fault]) -> Node:
    try:
        value = config
        for part in path:
            value = value[part]
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0]).strip('".')
        faults.append(Fault(node.origin, f"{_dotted(path)}: {node.value!r} cannot be resolved: {reason}."))
        return Node(BROKEN, node.origin)
    return _at(value, node)


def _at(value: Any, node: Node) -> Node:
    if isinstance(value, dict):
        return Node({str(key): _at(item, node) for key, item in value.items()}, node.origin)
    if isinstance(value, list):
        return Node([_at(item, node) for item in value], node.origin)
    return Node(value, node.origin)


def _texts(node: Node, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Node]]:
    if isinstance(node.value, dict):
        for key, item in node.value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(node.value, list):
        for index, item in enumerate(node.value):
            yield from _texts(item, (*path, index))
    elif isinstance(node.value, str) and "${" in node.value:
        yield path, node


def _without(plain: Any, broken: Iterable[tuple[Any, ...]]) -> Any:
    for path in broken:
        value = plain
        for part in path[:-1]:
            value = value[part]
        value[path[-1]] = None
    return plain


def _dotted(path: tuple[Any, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _syntax(text: str) -> str | None:
    try:
        OmegaConf.create({"x": text})
    except GrammarParseError:
        return "is not a valid interpolation. Write ${vars.NAME}."
    return None


def _forbidden(text: str) -> str | None:
    """The fault of a resolver other than oc.env in `text`; a name that is itself an interpolation is one too."""
    start = text.find("${")
    while start >= 0:
        depth, end = 0, start + 2
        while end < len(text) and not (depth == 0 and text[end] in ":}"):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        name = text[start + 2 : end].strip()
        if text[end : end + 1] == ":" and name != "oc.env":
            return f"calls the resolver {name}; only ${{key.path}} and ${{oc.env:NAME}} are allowed."
        start = text.find("${", start + 2)
    return None
