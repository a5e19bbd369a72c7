"""The report of a migration: by group for a person, or as JSON."""

import json
import os
from collections.abc import Iterator
from typing import Any

from shardlight.framework.migrate.convert import Migration
from shardlight.framework.migrate.draft import GROUPS, Group, Line
from shardlight.framework.migrate.write import printable

_VALUE_CHARS = 48
_AGAIN = "as above"


def groups(migration: Migration) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Heading and rows (file and line, key = value, what becomes of it) of each group that has any."""
    for group, heading in GROUPS.items():
        lines = [line for line in migration.lines if line.group == group]
        if lines:
            texts = [line.text for line in lines]
            again = [
                before == text and len(text) > len(_AGAIN) for before, text in zip(["", *texts], texts, strict=False)
            ]
            yield f"{heading} ({len(lines)})", [_row(line, said) for line, said in zip(lines, again, strict=True)]


def _row(line: Line, again: bool) -> tuple[str, str, str]:
    value = json.dumps(line.value, ensure_ascii=False, default=str)
    value = value if len(value) <= _VALUE_CHARS else f"{value[: _VALUE_CHARS - 3]}..."
    key = line.key if line.key.endswith(" (not set)") else f"{line.key} = {value}"
    became = " | ".join(part for part in (f"-> {line.to}" if line.to else "", _AGAIN if again else line.text) if part)
    return printable(os.path.basename(line.at)), printable(key), printable(became or "as here")


def to_json(migration: Migration, source: str, out: str) -> dict[str, Any]:
    """The report as plain containers: {source, kind, out, lines: [{key, at, value, group, to, text}], fill_in}."""
    names = ("key", "at", "value", "group", "to", "text")
    lines = [{name: getattr(line, name) for name in names} for line in migration.lines]
    counts: dict[Group, int] = {group: sum(line.group == group for line in migration.lines) for group in GROUPS}
    return {
        "source": source,
        "kind": migration.kind,
        "out": out,
        "counts": counts,
        "lines": lines,
        "fill_in": list(migration.fill_in),
    }
