"""No config or checkpoint that shardlight reads can run code: the calls that would allow it are not in the source."""

import ast
from pathlib import Path

import pytest
from test_layering import ROOT, SOURCES

PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "torch.hub.load"}
UNSAFE = {"UnsafeLoader", "FullLoader", "add_safe_globals", "safe_globals", "pickle_module", "find_class"}
IMPORTS = {"framework/classes.py", "framework/described.py", "framework/bench/worker.py"}
IMPORTS |= {"strategies/lazy_names.py", "strategies/registration.py"}
"""Files that import by name: what the user trusts in a config, and names of our own."""
FILES = SOURCES + sorted((ROOT / "examples").rglob("*.py"))


def faults(source: str, imports: bool = False) -> list[str]:
    """The lines of `source` that could run code found in data, each with the reason; `imports`: by name, are allowed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in PICKLING]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING:
            found.append(f"{node.lineno}: import from {node.module}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "yaml", "os"):
            # Under a name of its own it would not be seen below.
            names = {a.name for a in node.names} & {"load", "unsafe_load", "full_load", "system", "popen"}
            found += [f"{node.lineno}: from {node.module} import {name}" for name in sorted(names)]
        elif isinstance(node, ast.Attribute) and node.attr in UNSAFE:
            found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.Call):
            found += [f"{node.lineno}: {reason}" for reason in call_faults(node, imports)]
    return found


def call_faults(node: ast.Call, imports: bool) -> list[str]:
    name = ast.unparse(node.func)
    options = {k.arg: ast.unparse(k.value) for k in node.keywords}
    reasons = []
    if name in BUILTINS | METHODS:
        reasons.append(name)
    if name in ("torch.load", "jit.load", "torch.jit.load") and options.get("weights_only") != "True":
        reasons.append("torch.load without weights_only=True")
    loads = name.rsplit(".", 1)[-1] == "import_module" and not isinstance(node.args[0], ast.Constant)
    if loads and not imports:
        reasons.append("an import by a name that is not in the source")
    if UNSAFE & options.keys():
        reasons.append("a pickle's options")
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
    assert faults(path.read_text(), str(Path(path).relative_to(ROOT)) in IMPORTS) == []


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
        "importlib.import_module(data['class'])",
        "import_module(name)",
        "torch.serialization.add_safe_globals([Thing])",
        "yaml.compose(text, Loader=yaml.UnsafeLoader)",
        "torch.load(f, weights_only=True, pickle_module=mine)",
        "torch.jit.load(f)",
        "from torch import load",
    ],
)
def test_the_check_itself_sees(source):
    assert faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f, weights_only=True)",
        "model.eval()",
        "import_module('torch._inductor')",
        "from os import path",
        "re.compile('a')",
        "json.load(f)",
    ],
)
def test_the_check_lets_pass(source):
    assert not faults(source)
