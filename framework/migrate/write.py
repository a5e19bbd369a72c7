"""Our YAML, with a comment on where each value comes from."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from shardlight.framework.migrate.draft import Entry
from shardlight.framework.show import flow
from shardlight.framework.source import FILL_IN

SECTIONS = ("run", "module", "data", "optimizer", "schedule", "strategy", "trainer")
"""Of our config, in the order they are written."""
_FIRST = ("class", "name", "lr", "accelerator", "devices", "num_nodes", "max_steps", "precision")
_WIDTH, _COLUMN = 118, 36
_NO_OPTIMIZER = """\
# The source has no optimizer: the script made its own. Give the module a configure_optimizers, or write one here:
# optimizer: {name: adamw, lr: ...}
"""


def to_yaml(entries: Mapping[str, Entry], source: str) -> str:
    """The config as YAML text.

    Args:
        entries: dotted path -> value and comment.
        source: name of the file that was migrated, for the first line.
    """
    sections: dict[str, dict[str, Entry]] = {name: {} for name in SECTIONS}
    for path, entry in entries.items():
        section, _, key = path.partition(".")
        sections[section][key] = entry
    head = f"# From {printable(source)}, by shardlight migrate. Replace every {FILL_IN}; what is left to mend says:"
    blocks = [f"{head}\n#   shardlight check CONFIG\n"]
    for name, items in sections.items():
        if items:
            keys = sorted(items, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
            rows = [row for key in keys for row in _rows(key, items[key])]
            blocks.append(f"{name}:\n" + "".join(f"  {row}\n" for row in rows))
        elif name == "optimizer":
            blocks.append(_NO_OPTIMIZER)
    return "\n".join(blocks)


def _rows(key: str, entry: Entry) -> Iterator[str]:
    """One key: on one line with its comment, or below it where that is long."""
    lead = f"{'# ' if entry.hint else ''}{key}: {flow(entry.value)}"
    why = printable(entry.why)
    together = f"{lead:<{_COLUMN}}  # {why}"
    if not why or len(together) + 2 <= _WIDTH:
        yield together if why else lead
        return
    yield from textwrap.wrap(why, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    yield lead


def printable(text: Any) -> str:
    """Text on one line, without characters that a terminal or a comment would obey."""
    plain = str(text)
    return plain if plain.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in plain)
