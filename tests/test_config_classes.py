"""Classes named in a config: where they may come from, and that their arguments fit."""

import os
import sys

import pytest
from lightning.pytorch import Callback, LightningModule
from shardlight.framework.check import Checker
from shardlight.framework.classes import Classes, parameters, project_root
from shardlight.framework.faults import PYTHON
from shardlight.framework.source import BROKEN, Node, from_python

MODEL = """
import os
from subprocess import Popen
from typing import TYPE_CHECKING
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
if TYPE_CHECKING:
    from nowhere import Something
class Base(LightningModule):
    def __init__(self, depth: int, *, drop: float = 0.0): super().__init__()
class Model(Base):
    def __init__(self, width: int, names: tuple[str, ...] = (), **rest): super().__init__(**rest)
class Loose(LightningModule):
    def __init__(self, thing: "Something" = None, size: int = 1): super().__init__()
class Bare(LightningModule): pass
class Other: pass
class Fake:
    class LightningModule: pass
class Foreign(type("LightningModule", (), {})): pass
def function(): pass
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder with a package; gives (package, load), where load returns (class config or None, faults)."""
    package = f"shardlight_test_{tmp_path.name.replace('-', '_')}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "model.py").write_text(MODEL)
    path, modules = list(sys.path), set(sys.modules)

    def load(name: str, base: type = LightningModule, trust: tuple[str, ...] = (), **arguments):
        faults = []
        home = from_python({"m": {"class": name.replace("PKG", package), **arguments}})
        made = Classes(tmp_path, trust, Checker(faults)).load(home.find("m"), base, "m", home)
        return made, [fault.text.replace(package, "PKG") for fault in faults]

    load.package, load.root = package, tmp_path
    yield load
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0].startswith("shardlight_test"):
            del sys.modules[name]


def test_a_class_of_the_project_is_loaded_and_made(project):
    made, faults = project("PKG.model.Model", width=3, depth=1e1, names=["a"])
    assert faults == [] and made.target.__name__ == "Model"
    assert dict(made.arguments) == {"width": 3, "depth": 10, "names": ("a",)}
    assert isinstance(made.build(), made.target)
    assert (made.argument("drop"), made.argument("none"), made.argument("width")) == (0.0, None, 3)


def test_containers_given_to_an_object_are_its_own(project):
    (project.root / "shardlight_test_keep.py").write_text(
        "from lightning.pytorch import LightningModule\n"
        "class Keep(LightningModule):\n"
        "    def __init__(self, items: list[dict]):\n"
        "        super().__init__()\n"
        "        items[0]['a'] = 2\n"
    )
    made, _ = project("shardlight_test_keep.Keep", items=[{"a": 1}])
    made.build()
    assert made.arguments["items"] == [{"a": 1}]


def test_classes_of_the_trusted_packages_are_loaded(project):
    made, faults = project("lightning.pytorch.callbacks.EarlyStopping", Callback, monitor="x")
    assert faults == [] and made.arguments["monitor"] == "x"
    assert project("PKG.model.BoringModel")[1] == []


def outside(name: str, trust: str = "") -> str:
    project = "Classes come from the project, shardlight, lightning, torchmetrics"
    return f"m.class: {name} is outside the project ROOT. {project}{trust}."


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("os.system", outside("os.system")),
        ("builtins.eval", outside("builtins.eval")),
        ("subprocess.Popen", outside("subprocess.Popen")),
        ("torch.nn.Linear", outside("torch.nn.Linear", ", or a package given with --trust torch")),
        ("no_such_package.X", outside("no_such_package.X", ", or a package given with --trust no_such_package")),
        ("PKG.model.os.system", "m.class: there is no module PKG.model.os."),
        ("PKG.model.Popen", "m.class: PKG.model.Popen is not a LightningModule."),
        ("PKG.model.function", "m.class: PKG.model.function is not a class."),
        ("PKG.model.os", "m.class: PKG.model.os is not a class."),
        ("PKG.model.Other", "m.class: PKG.model.Other is not a LightningModule."),
        ("PKG.model.Foreign", "m.class: PKG.model.Foreign is not a LightningModule. "
         "It derives from another one: import LightningModule from lightning.pytorch."),
        ("PKG.model.Modle", "m.class: PKG.model has no class Modle. Did you mean 'Model'?"),
        ("PKG.modle.Model", "m.class: there is no module PKG.modle. Did you mean 'model'?"),
        ("Model", "m.class must be an import path such as pkg.NAME, got 'Model' (text)."),
        ("lightning.pytorch.callbacks.EarlyStopping",
         "m.class: lightning.pytorch.callbacks.EarlyStopping is not a LightningModule."),
    ],
)  # fmt: skip
def test_nothing_else_can_be_named(project, name, fault):
    made, faults = project(name)
    assert made is None and faults == [fault.replace("ROOT", str(project.root))]


def test_an_untrusted_package_is_not_even_imported(project, tmp_path_factory, monkeypatch):
    away = tmp_path_factory.mktemp("away")
    (away / "shardlight_test_away.py").write_text(
        "from lightning.pytorch import LightningModule\nclass X(LightningModule): pass\n"
    )
    monkeypatch.syspath_prepend(str(away))
    assert project("shardlight_test_away.X")[0] is None and "shardlight_test_away" not in sys.modules
    (project.root / project.package / "via.py").write_text("from shardlight_test_away import X\n")
    assert project("PKG.via.X")[1] == [
        "m.class: PKG.via.X is shardlight_test_away.X, from outside the project. Classes come from the project, "
        "shardlight, lightning, torchmetrics, or a package given with --trust shardlight_test_away."
    ]
    assert project("shardlight_test_away.X", trust=("shardlight_test_away",))[1] == []


def test_a_virtual_environment_in_the_project_is_not_the_project(project, monkeypatch):
    site = project.root / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "shardlight_test_venv.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(site))
    assert project("shardlight_test_venv.X")[1][0].startswith("m.class: shardlight_test_venv.X is outside the project")


def test_a_source_folder_on_the_path_is_the_project(project, monkeypatch):
    (project.root / "src").mkdir()
    (project.root / "src" / "shardlight_test_src.py").write_text(
        "from lightning.pytorch import LightningModule\nclass X(LightningModule): pass\n"
    )
    monkeypatch.syspath_prepend(str(project.root / "src"))
    assert project("shardlight_test_src.X")[1] == []


def test_a_project_module_hidden_by_a_loaded_one_is_outside(project):
    (project.root / "json.py").write_text("")
    assert project("json.X")[1][0].startswith("m.class: json.X is outside the project")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import shardlight_test_missing",
         "ModuleNotFoundError: No module named 'shardlight_test_missing' (PKG/new.py:1)."),
        ("\nraise RuntimeError('no')", "RuntimeError: no (PKG/new.py:2)."),
        ("x = (\n", "SyntaxError: '(' was never closed (PKG/new.py:1)."),
        ("raise SystemExit(3)", "SystemExit: 3 (PKG/new.py:1)."),
        ("from PKG.model import Nothing", "ImportError: cannot import name 'Nothing' from 'PKG.model'"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_shows_its_cause(project, text, fault):
    (project.root / project.package / "new.py").write_text(text.replace("PKG", project.package))
    made, faults = project("PKG.new.Model")
    assert made is None and faults[0].startswith(f"m.class: PKG.new cannot be imported: {fault}")


def test_a_keyboard_interrupt_in_a_module_is_one(project):
    (project.root / project.package / "new.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        project("PKG.new.Model")


def test_arguments_are_checked_against_the_signature_and_its_bases(project):
    made, faults = project("PKG.model.Model", widht=3, drop="x", names="a")
    assert made is None and faults == [
        "m.widht is not a parameter of PKG.model.Model. Did you mean 'width'?",
        "m.drop must be a number, got 'x' (text).",
        "m.names must be a list, got 'a' (text). Write [a].",
        "m.width is missing: PKG.model.Model needs it. It is a whole number.",
        "m.depth is missing: PKG.model.Model needs it. It is a whole number.",
    ]
    assert project("PKG.model.Bare", anything=1)[1] == ["m.anything is not a parameter of PKG.model.Bare."]


def test_annotations_for_type_checkers_only_are_no_fault(project):
    made, faults = project("PKG.model.Loose", thing="x", size=2)
    assert faults == [] and dict(made.arguments) == {"thing": "x", "size": 2}


def test_parameters_behind_keyword_arguments(project):
    made, _ = project("PKG.model.Model", width=1, depth=1)
    assert list(parameters(made.target)) == ["width", "names", "depth", "drop"]


@pytest.mark.parametrize(
    ("block", "faults"),
    [
        (None, ["m is missing. Name a LightningModule: 'm: {class: my_project.m.NAME}'."]),
        ("x", ["m must be a mapping with the key class, got 'x' (text)."]),
        ({"a": 1}, ["m.class is missing: the import path of a LightningModule."]),
        ({"class": 3}, ["m.class must be an import path such as pkg.NAME, got 3 (number)."]),
    ],
)
def test_a_block_without_a_class_is_a_fault(tmp_path, block, faults):
    found = []
    home = from_python({"m": block})
    assert Classes(tmp_path, (), Checker(found)).load(home.find("m"), LightningModule, "m", home) is None
    assert [fault.text for fault in found] == faults


def test_a_class_whose_fault_is_reported_is_left_alone(tmp_path):
    found = []
    node = Node({"class": Node(BROKEN, PYTHON)}, PYTHON)
    assert Classes(tmp_path, (), Checker(found)).load(node, LightningModule, "m", node) is None and found == []


def test_the_project_is_the_nearest_folder_with_a_pyproject(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert project_root(inner) == tmp_path
    (inner / "pyproject.toml").touch()
    os.symlink(inner, tmp_path / "link")
    assert project_root(tmp_path / "link") == inner
