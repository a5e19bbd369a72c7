"""What a table says of a key, and the walk over all keys of a source."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from shardlight.framework.check import BAD
from shardlight.framework.migrate.draft import Draft, Key
from shardlight.framework.source import Node


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of a key.

    Attributes:
        what: the group of its line; or "fact": it is settled together with others.
        text: what to know; for a fact its name.
        to: our key that takes the value, for "maps".
        kind: annotation that the value must fit, for "maps".
        auto: where transformers takes the value from that "auto" stands for.
    """

    what: Literal["maps", "differs", "none", "fact"]
    text: str
    to: str = ""
    kind: Any = None
    auto: str = ""


IGNORED_PARAMETER = "the source's tool refuses or ignores such a parameter: not one of"
Table = Mapping[str, Rule]
"""Dotted key -> rule; "section.*" is for all keys below a section."""


def maps(to: str, kind: Any, text: str = "", auto: str = "") -> Rule:
    """The value goes to our key `to` as it is."""
    return Rule("maps", text, to, kind, auto)


def fact(name: str) -> Rule:
    """Settled together with others."""
    return Rule("fact", name)


def differs(text: str) -> Rule:
    """Something like it is here, with another default or meaning."""
    return Rule("differs", text)


def none(text: str) -> Rule:
    """Nothing here, and why or what to do instead."""
    return Rule("none", text)


def section(name: str, rule: Rule, keys: str) -> dict[str, Rule]:
    """The same rule for all keys of a section, given as words."""
    return {f"{name}.{key}" if name else key: rule for key in keys.split()}


def find(table: Table, name: str) -> Rule | None:
    """The rule of a dotted key; None: unknown."""
    rule = table.get(name)
    while rule is None and name:
        name = name.rpartition(".")[0]
        rule = table.get(f"{name}.*") if name else None
    return rule


def leaves(tree: Node, draft: Draft, prefix: str = "") -> Iterator[Key]:
    """All keys of a source that hold no further keys, in order."""
    for name, node in tree.value.items():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(node.value, dict) and node.value:
            yield from leaves(node, draft, path)
        else:
            draft.count += 1
            yield Key(path, node, draft.count)


def walk(tree: Node, table: Table, draft: Draft, refusing: Mapping[str, str]) -> None:
    """Gives every key its line, or adds it to the facts.

    Args:
        refusing: section -> what the source's tool does with an unknown key in it; "" for all others.
    """
    parts = [name.split(".") for name in table if "." in name]
    sections = {".".join(words[:n]) for words in parts for n in range(1, len(words))}
    for key in leaves(tree, draft):
        rule = find(table, key.name)
        if rule is None and key.name in sections and not key.node.value:
            draft.line(key, "none", "empty: nothing is asked for")
        elif rule is None:
            _unknown(key, table, sections, draft, refusing)
        elif rule.what == "fact":
            draft.facts.setdefault(rule.text, []).append(key)
        elif rule.what == "maps":
            _maps(key, rule, draft)
        else:
            draft.line(key, rule.what, rule.text)


def _maps(key: Key, rule: Rule, draft: Draft) -> None:
    if key.value is None:
        draft.line(key, "none", "null: nothing is asked for")
    elif key.auto:
        draft.leave(rule.to, f'"auto" in {key}: {rule.auto or "set by the script"}')
        draft.line(key, "differs", f'"auto": {rule.auto or "set by the script"}; left for you', rule.to)
    else:
        value = draft.number(key, rule.kind)
        if value is not BAD:
            draft.maps(key, rule.to, value, rule.text)


def _unknown(key: Key, table: Table, sections: set[str], draft: Draft, refusing: Mapping[str, str]) -> None:
    if key.name in sections:
        draft.line(
            key, "unknown", f"a section of keys is expected here, not {key.value!r}: it had no effect or was refused"
        )
        return
    parts = key.name.split(".")
    depth = next((n for n in range(1, len(parts)) if ".".join(parts[:n]) not in sections), len(parts))
    home, word = ".".join(parts[: depth - 1]), parts[depth - 1]
    known = {name.removeprefix(f"{home}.").split(".")[0] for name in table if not home or name.startswith(f"{home}.")}
    near = difflib.get_close_matches(word.lower(), sorted(known), n=1, cutoff=0.75)
    everywhere = sorted(name for name in table if name.rpartition(".")[2] == word)
    mend = f" Did you mean '{near[0]}'?" if near else ""
    if not near and everywhere:
        mend = f" Its place is {everywhere[0]}."
    within = f"in the unknown section {'.'.join(parts[:depth])}: " if depth < len(parts) else ""
    does = refusing.get(home) or refusing.get(home.split(".")[0]) or refusing[""]
    draft.line(key, "unknown", f"{within}{does}.{mend}")
