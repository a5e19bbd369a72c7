"""A config as YAML text that reads back to the same values, optionally with the origin of each."""

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from shardlight.framework.source import parse_scalar

_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*")


def dump(values: dict[str, Any], origin: Callable[[str], str] | None = None) -> str:
    """Writes plain containers as YAML.

    Args:
        values: mappings, lists, text, numbers, true, false, null.
        origin: dotted path -> where the value was written, put behind it as a comment.
    """
    rows = list(_rows(values, "", 0))
    if origin is None:
        return "".join(f"{text}\n" for text, _ in rows)
    width = min(60, max((len(text) for text, path in rows if path), default=0))
    return "".join(f"{text:<{width}}  # {origin(path)}\n" if path else f"{text}\n" for text, path in rows)


def _rows(values: dict[str, Any], prefix: str, indent: int) -> Iterator[tuple[str, str | None]]:
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else key
        lead = f"{' ' * indent}{scalar(key)}:"
        if isinstance(value, dict) and value:
            yield lead, None
            yield from _rows(value, path, indent + 2)
        else:
            yield f"{lead} {flow(value)}", path


def flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return scalar(value)


def scalar(value: Any) -> str:
    """A scalar that any YAML reader, 1.1 or 1.2, reads as what it is; text is quoted where it must be."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}" if e else mantissa
    ambiguous = value.lower() in ("on", "off", "yes", "no", "y", "n") or re.match(r"[-+.0-9]", value) is not None
    if _PLAIN_TEXT.fullmatch(value) and not ambiguous and parse_scalar(value) == value:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)
