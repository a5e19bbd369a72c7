"""Classes named in a config: where they may come from, and that their arguments fit."""

import os
import sys
from typing import Literal

import pytest
from shardlight.framework.check import Checker
from shardlight.framework.class_source import FromSource
from shardlight.framework.classes import Classes, project_root
from shardlight.framework.constraints import DirectoryPath, FilePath
from shardlight.framework.described import (
    CALLBACK,
    DATA_MODULE,
    MODULE,
    TRAINING_MODULE,
    UNREADABLE,
    FromImport,
    UnclearError,
)
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


class OnlySource(FromSource):
    """Says what it cannot tell, instead of leaving it to an import."""

    def describe(self, module_path, name):
        try:
            return super().describe(module_path, name)
        except UnclearError:
            raise AssertionError(f"{module_path}.{name} is unclear") from None


def readers(how: str, root) -> tuple:
    return {"import": (FromImport(root),), "source": (OnlySource(root),), "both": ()}[how]


@pytest.fixture(params=["import", "both"])
def project(request, tmp_path, monkeypatch):
    """A project folder with a package; gives (package, load), where load returns (class config or None, faults)."""
    package = f"shardlight_test_{tmp_path.name.replace('-', '_')}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "model.py").write_text(MODEL)
    path, modules = list(sys.path), set(sys.modules)

    def load(name: str, base: str = MODULE, trust: tuple[str, ...] = (), how: str = request.param, **arguments):
        faults = []
        home = from_python({"m": {"class": name.replace("PKG", package), **arguments}})
        made = Classes(tmp_path, trust, Checker(faults), readers(how, tmp_path)).load(home.find("m"), base, "m", home)
        return made, [fault.text.replace(package, "PKG") for fault in faults]

    load.package, load.root = package, tmp_path
    yield load
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0].startswith("shardlight_test"):
            del sys.modules[name]


def test_a_class_of_the_project_is_loaded_and_made(project):
    made, faults = project("PKG.model.Model", width=3, depth=1e1, names=["a"])
    assert faults == [] and made.described.name == f"{project.package}.model.Model"
    assert dict(made.arguments) == {"width": 3, "depth": 10, "names": ("a",)}
    assert (made.argument("drop"), made.argument("none"), made.argument("width")) == (0.0, None, 3)


def test_containers_given_to_an_object_are_its_own(project):
    (project.root / "shardlight_test_keep.py").write_text(
        "from lightning.pytorch import LightningModule\n"
        "class Keep(LightningModule):\n"
        "    def __init__(self, items: list[dict]):\n"
        "        super().__init__()\n"
        "        items[0]['a'] = 2\n"
    )
    made, _ = project("shardlight_test_keep.Keep", how="import", items=[{"a": 1}])
    assert isinstance(made.build(), made.target)
    assert made.arguments["items"] == [{"a": 1}]


def test_classes_of_the_trusted_packages_are_loaded(project):
    made, faults = project("lightning.pytorch.callbacks.EarlyStopping", CALLBACK, monitor="x")
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
        ("no_such_package.X", "m.class: there is no module no_such_package."),
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
    made, faults = project("PKG.new.Model", how="import")
    assert made is None and faults[0].startswith(f"m.class: PKG.new cannot be imported: {fault}")


def test_a_keyboard_interrupt_in_a_module_is_one(project):
    (project.root / project.package / "new.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        project("PKG.new.Model", how="import")


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
    assert list(made.described.parameters) == ["width", "names", "depth", "drop"]


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
    assert Classes(tmp_path, (), Checker(found)).load(home.find("m"), MODULE, "m", home) is None
    assert [fault.text for fault in found] == faults


def test_a_class_whose_fault_is_reported_is_left_alone(tmp_path):
    found = []
    node = Node({"class": Node(BROKEN, PYTHON)}, PYTHON)
    assert Classes(tmp_path, (), Checker(found)).load(node, MODULE, "m", node) is None and found == []


def test_the_project_is_the_nearest_folder_with_a_pyproject(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert project_root(inner) == tmp_path
    (inner / "pyproject.toml").touch()
    os.symlink(inner, tmp_path / "link")
    assert project_root(tmp_path / "link") == inner


AWKWARD = """
import dataclasses
import enum
import os.path as osp
import torch
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Generic, Literal, Optional, TypeVar
import lightning.pytorch as pl
import lightning as L
from PKG import model as first
from . import model
from .model import *
from .model import Base as Renamed
from shardlight.framework import DirectoryPath, FilePath
from shardlight.framework import constraints as rules
T = TypeVar("T")
Mode = Literal["fast", "slow"]
WIDTH = 12
class Parts:
    def __init__(self, left: int = 1, *, right: "str | None" = None): super().__init__()
class Whole(Parts, Renamed):
    def __init__(self, mode: Mode, rate: Optional[float] = None, size=WIDTH, path: Path = Path("."), **rest): super().__init__(**rest)
class Through(model.Base): pass
class Again(first.Base): pass
class Aliased(pl.LightningModule, Generic[T]):
    def __init__(self, sizes: "list[int]", pair: tuple[float, float] = (0.1, 0.2), many: dict[str, list[int]] | None = None, kind: Annotated[int, "unit"] = 1): super().__init__()
class Short(L.LightningModule):
    def __init__(self, *sizes, keep: bool, anything): super().__init__()
class Typed(pl.LightningModule):
    def __init__(self, dtype: torch.dtype = torch.float32, wait: timedelta = timedelta(), plain: int = 1): super().__init__()
    def configure_optimizers(self): return None
class Diamond(Through, Renamed): pass
class Stated(Renamed):
    constraints = ("size >= 1", "depth >= 1")
    def __init__(self, file: FilePath, folder: "rules.DirectoryPath | None" = None, size: int = 1, **rest): super().__init__(**rest)
class StatedAgain(Stated):
    constraints: list[str] = ["size < 9", "size >= 1"]
class Unrelated(Renamed):
    constraints = {"kind": 1}
Other = Short
if T:
    class Twice(pl.LightningModule): pass
else:
    class Twice(pl.LightningModule): pass
@dataclasses.dataclass
class Made(pl.LightningModule):
    size: int = 1
class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = WIDTH): super().__init__()
"""
CLEAR = ["Whole", "Through", "Again", "Aliased", "Short", "Typed", "Diamond", "Other", "Data", "Model"]
CLEAR += ["Stated", "StatedAgain", "Unrelated"]


def test_the_source_says_what_the_class_says(tmp_path, monkeypatch):
    """Each difference would be a fault that is none, or one that only the run finds."""
    package = f"shardlight_test_{tmp_path.name.replace('-', '_')}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "model.py").write_text(MODEL)
    (tmp_path / package / "awkward.py").write_text(AWKWARD.replace("PKG", package))
    monkeypatch.syspath_prepend(tmp_path)
    read, imported = FromSource(tmp_path), FromImport(tmp_path)
    names = [(f"{package}.awkward", name) for name in CLEAR]
    names += [
        ("lightning.pytorch.callbacks", name)
        for name in (
            "EarlyStopping",
            "ModelCheckpoint",
            "Timer",
            "ModelSummary",
            "LearningRateMonitor",
            "StochasticWeightAveraging",
            "EMAWeightAveraging",
        )
    ]
    names += [("shardlight.framework", name) for name in ("TrainingModule", "Progress", "RunSummary")]
    names += [("shardlight.strategies", "ShardedEMA")]
    try:
        for module, name in names:
            by_source, by_import = read.describe(module, name), imported.describe(module, name)
            assert by_source.name == by_import.name
            ours = [item for item in by_source.lineage if not item.startswith(("typing.", "abc."))]
            assert ours == [item for item in by_import.lineage if item in ours], name
            for base in (MODULE, CALLBACK, DATA_MODULE, TRAINING_MODULE):
                assert by_source.derives_from(base) == by_import.derives_from(base), (name, base)
            assert by_source.defines == by_import.defines, name
            assert by_source.constraints == by_import.constraints, name
            assert list(by_source.parameters) == list(by_import.parameters), name
            for key, parameter in by_source.parameters.items():
                other = by_import.parameters[key]
                assert parameter.annotation in (UNREADABLE, other.annotation), (name, key)
                assert parameter.default is UNREADABLE or parameter.default == other.default, (name, key)
        for name in ("Twice", "Made"):
            with pytest.raises(UnclearError):
                read.describe(f"{package}.awkward", name)
        whole = read.describe(f"{package}.awkward", "Whole").parameters
        assert [whole[name].annotation for name in ("mode", "rate", "right")] == [
            Literal["fast", "slow"],
            float | None,
            str | None,
        ]
        assert whole["size"].default == 12 and whole["path"].default is UNREADABLE
        stated = read.describe(f"{package}.awkward", "StatedAgain")
        assert stated.constraints == ("size < 9", "size >= 1", "depth >= 1")
        assert [stated.parameters[key].annotation for key in ("file", "folder")] == [FilePath, DirectoryPath | None]
        typed = read.describe(f"{package}.awkward", "Typed").parameters
        assert typed["dtype"].annotation is UNREADABLE and typed["plain"].annotation is int
    finally:
        for name in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[name]


def test_nothing_of_a_class_that_is_read_runs(tmp_path):
    (tmp_path / "shardlight_test_read.py").write_text(
        "from lightning.pytorch import LightningModule\nraise SystemExit\nclass X(LightningModule):\n    def __init__(self, n: int): pass\n"
    )
    faults = []
    home = from_python({"m": {"class": "shardlight_test_read.X", "n": "a"}})
    assert (
        Classes(tmp_path, (), Checker(faults), (OnlySource(tmp_path),)).load(home.find("m"), MODULE, "m", home) is None
    )
    assert [fault.text for fault in faults] == ["m.n must be a whole number, got 'a' (text)."]
    assert "shardlight_test_read" not in sys.modules


def test_what_the_source_leaves_open_is_imported(project):
    (project.root / project.package / "open.py").write_text(
        "import torch\nfrom lightning.pytorch import LightningModule\n"
        "class X(LightningModule):\n    def __init__(self, dtype: torch.dtype = None, n: int = 1): super().__init__()\n"
        "globals()['Y'] = X\n"
    )
    assert project("PKG.open.X", dtype="float32")[1] == [
        "m.dtype must be a dtype, which a config cannot give; got 'float32' (text)."
    ]
    assert project("PKG.open.Y", n=2)[1] == []
