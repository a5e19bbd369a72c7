"""What a project needs of packages is known before it runs: from its imports, and its pyproject.toml."""

from importlib.metadata import version
from pathlib import Path

import pytest
from shardlight.framework.module_source import Sources
from shardlight.framework.packages import installed, missing_packages

SOURCE = """
import numpy
import yaml
def use():
    from shardlight_gone.deep import x
    import sklearn_gone
def read():
    import pluggy
"""


@pytest.mark.parametrize(
    ("dependencies", "said"),
    [
        ("", []),
        ('dependencies = ["Shardlight.Gone>=2"]', ["Shardlight.Gone>=2 (model.py:5)"]),
        ('dependencies = ["numpy>=99"]', [f"numpy>=99 (model.py:2; {version('numpy')} is there)"]),
        ('dependencies = ["pyyaml>=99"]', [f"pyyaml>=99 (model.py:3; {version('pyyaml')} is there)"]),
        ('dependencies = ["pluggy<1"]', [f"pluggy<1 (model.py:8; {version('pluggy')} is there)"]),
        ('dependencies = ["shardlight-gone>=2; python_version < \'3\'", "numpy", "unused-gone"]', []),
        ('dependencies = ["not a requirement!"]', []),
        ("dependencies = 3", []),
        ("dependencies = [", []),
    ],
)
def test_what_the_project_asks_for_counts_where_it_is_imported(tmp_path, dependencies, said):
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\n{dependencies}\n')
    (tmp_path / "model.py").write_text(SOURCE)
    assert [str(item) for item in missing_packages(Sources(tmp_path), "model")] == said


def test_a_package_is_there_by_name_and_version():
    assert installed("torch") and installed("PyYAML>=1")
    assert not installed("numpy>=99") and not installed("shardlight-gone")


def test_this_package_is_not_read_for_a_project_that_lies_in_its_repository():
    root = Path(__file__).resolve().parents[1]
    read = [module.name for module, _ in Sources(root).reachable("examples.language_model.model")]
    assert read == ["examples.language_model.model"]
