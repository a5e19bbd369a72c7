"""What is wrong with a file that is no YAML, in words, at the line where it is to be mended.

PyYAML stops where it can read no further, which is often lines behind the mistake: a ':' without a space makes text of
its line and of those behind it, and a quote that is not closed takes the rest of the file.
"""

import re

import yaml

_NO_SPACE = re.compile(r"\s*(?:- )?([A-Za-z_][\w.-]*):(?![/\\:\s])(.+)")
_EQUALS = re.compile(r"\s*(?:- )?([A-Za-z_][\w.-]*) ?= ?(.+)")
_OPENED = re.compile(r"\s*(?:- )?(?:[\w.-]+: +)?([\"'])(.*)")
_KEY = re.compile(r"( *)(?:- )?([A-Za-z_][\w.-]*):(?: +(\S.*))?$")


def explain(text: str, error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Returns the line (from 0) of the mistake, and what is to be done about it."""
    lines = [_bare(line) for line in text.splitlines()]
    found = error.problem_mark or error.context_mark
    at = min(found.line, len(lines) - 1) if found else 0
    opened = error.context_mark.line if error.context_mark else at
    problem = str(error.problem or error.context)
    if "'\\t'" in problem:
        return at, "there is a tab. Write spaces instead."
    for look in (_quote, _bracket, _space, _value, _indent):
        told = look(lines, min(opened, at), at, problem)
        if told is not None:
            return told
    return at, f"{problem}."


def _bare(line: str) -> str:
    """A line without its comment."""
    return re.sub(r"(^|\s)#.*", "", line).rstrip()


def _quote(lines: list[str], opened: int, at: int, problem: str) -> tuple[int, str] | None:
    for number in range(at + 1):
        match = _OPENED.fullmatch(lines[number])
        if match is None:
            continue
        quote, rest = match.groups()
        inner = rest.replace("''", "") if quote == "'" else re.sub(r"\\.", "", rest)
        if quote not in inner:
            return number, f"the quote {quote} that is opened here is not closed. Write {quote}{rest}{quote}."
        if number == at and inner.index(quote) < len(inner) - 1 and "expected <block end>" in problem:
            return at, "there is something behind the closing quote. Put all of the value in quotes."
    if "escape character" in problem:
        return at, f"{problem}: in double quotes a \\ begins an escape. Use single quotes, or write it twice."
    return None


def _bracket(lines: list[str], opened: int, at: int, problem: str) -> tuple[int, str] | None:
    match = re.match(r"expected ',' or '([]}])'", problem)
    if match is None:
        return None
    close = match[1]
    if opened == at and "end>" not in problem:
        return at, f"{problem}. Put a comma between two items, and a {close} behind the last."
    begin = "[" if close == "]" else "{"
    return opened, f"the {begin} that is opened here is not closed. Put a {close} behind its last item."


def _space(lines: list[str], opened: int, at: int, problem: str) -> tuple[int, str] | None:
    """A key without ': ' behind it, on one of the lines that were read as one text."""
    if not problem.startswith(
        ("could not find expected ':'", "mapping values are not allowed", "expected <block end>")
    ):
        return None
    first = max((number for number in range(at) if lines[number].strip()), default=at)
    for number in range(min(opened, first), at + 1):
        line = lines[number].strip()
        for pattern in (_NO_SPACE, _EQUALS):
            if (match := pattern.fullmatch(line)) and not line.startswith(("'", '"')):
                sign = "a space behind its ':'" if pattern is _NO_SPACE else "':' instead of '='"
                return number, f"{line!r} needs {sign}. Write '{match[1]}: {match[2].strip()}'."
        if re.fullmatch(r"[A-Za-z_][\w.-]*", line) and problem.startswith("could"):
            return number, f"{line!r} has no ':' behind it. Write '{line}:'."
    return None


def _indent(lines: list[str], opened: int, at: int, problem: str) -> tuple[int, str] | None:
    """A key that is not indented as those beside it."""
    if not problem.startswith(("mapping values are not allowed", "expected <block end>")):
        return None
    own = _KEY.fullmatch(lines[at])
    before = next((number for number in range(at - 1, -1, -1) if lines[number].strip()), None)
    above = _KEY.fullmatch(lines[before]) if before is not None else None
    if own is None or above is None or len(own[1]) == len(above[1]):
        return None
    wide, other = len(own[1]), len(above[1])
    if above[3] is None and wide > other:  # the first key of its section
        return None
    text = f"{own[2]} is indented by {wide}, and {above[2]} on line {before + 1} by {other}"
    return at, f"{text}. Indent the keys of one section alike."


def _value(lines: list[str], opened: int, at: int, problem: str) -> tuple[int, str] | None:
    """A value that has to be in quotes."""
    match = _KEY.fullmatch(lines[at])
    value = match[3] if match else None
    if not match and (item := re.fullmatch(r"\s*- ([%@`*].*)", lines[at])) and "character" in problem:
        return at, f"a value that begins with {item[1][0]} has to be in quotes. Write - '{item[1]}'."
    if problem.startswith("mapping values are not allowed") and value and ": " in value:
        return at, f"a value with ': ' in it has to be in quotes. Write {match[2]}: '{value}'."
    if value and value[0] in "%@`*&!|>" and ("character" in problem or "alphabetic" in problem):
        return at, f"a value that begins with {value[0]} has to be in quotes. Write {match[2]}: '{value}'."
    if "another document" in problem:
        return at, "a config is one document. Remove the line ---, or what follows it."
    return None
