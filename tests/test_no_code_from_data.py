"""No config or checkpoint that shardlight reads can run code: the calls that would allow it are not in the source."""

import ast
from pathlib import Path

import pytest
from test_layering import ROOT, SOURCES

PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "torch.hub.load"}
FILES = SOURCES + sorted((ROOT / "examples").rglob("*.py"))


def faults(source: str) -> list[str]:
    """The lines of `source` that could run code found in data, each with the reason."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in PICKLING]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING:
            found.append(f"{node.lineno}: import from {node.module}")
        elif isinstance(node, ast.Call):
            found += [f"{node.lineno}: {reason}" for reason in call_faults(node)]
    return found


def call_faults(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    options = {k.arg: ast.unparse(k.value) for k in node.keywords}
    reasons = []
    if name in BUILTINS | METHODS:
        reasons.append(name)
    if name == "torch.load" and options.get("weights_only") != "True":
        reasons.append("torch.load without weights_only=True")
    if options.get("allow_pickle", "False") != "False":
        reasons.append("allow_pickle")
    if options.get("shell", "False") != "False":
        reasons.append("a shell")
    if options.get("weights_only") == "False":
        reasons.append("weights_only=False")
    if options.get("trust_remote_code", "False") != "False":
        reasons.append("trust_remote_code")
    return reasons


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(Path(p).relative_to(ROOT)))
def test_no_code_from_data(path):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "yaml.load(stream)",
    ],
)
def test_the_check_itself_sees(source):
    assert faults(source)


@pytest.mark.parametrize(
    "source", ["torch.load(f, weights_only=True)", "model.eval()", "re.compile('a')", "json.load(f)"]
)
def test_the_check_lets_pass(source):
    assert not faults(source)
