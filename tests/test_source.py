"""Every product file says on its first line what it is for, and is short enough to hold in the head."""

import ast

import pytest
from test_layering import ROOT, SOURCES, tree_of

LINES = 500
PROJECTS = sorted((ROOT / "templates").glob("*/project/**/*.py"))
FILES = SOURCES + PROJECTS + sorted((ROOT / "examples").rglob("*.py")) + sorted((ROOT / "tests").glob("*.py"))
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers", "misc", "common"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_says_what_it_is_for_and_is_short(path):
    text = path.read_text()
    assert text.startswith('"""'), "the first line is the docstring: what the file is for"
    assert len(ast.get_docstring(tree_of(path)).splitlines()[0]) > 20
    assert len(text.splitlines()) <= LINES
    assert path.stem not in VAGUE_NAMES


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_command_line_prints(path):
    """A stream that was handed in may be written to; the terminal itself is the command line's."""
    calls = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call)]
    prints = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
    lines = [n.lineno for n in prints if not any(k.arg == "file" for k in n.keywords)]
    assert path.name == "cli.py" or not lines, f"print in lines {lines}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_fault_is_swallowed(path):
    """`except Exception` is allowed where it raises again or reports the error; a bare `except:` never."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            wide = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            reports = node.name and any(isinstance(n, ast.Name) and n.id == node.name for n in ast.walk(node))
            assert not wide or raises or reports, f"line {node.lineno}: catches everything and goes on"
