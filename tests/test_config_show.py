"""Configs written as YAML: they read back, by our reader and by PyYAML's, and show where each value came from."""

import math

import yaml
from hypothesis import given
from hypothesis import strategies as st
from shardlight.framework.show import dump, flow, scalar
from shardlight.framework.source import read_yaml

texts = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(texts, values, max_size=4))
def test_what_is_dumped_reads_back(tmp_path_factory, plain):
    path = tmp_path_factory.mktemp("show") / "c.yaml"
    path.write_text(dump(plain), encoding="utf-8")
    tree, faults = read_yaml(path)
    assert faults == [] and tree.plain() == plain


@given(scalars)
def test_other_readers_read_the_same_scalars(value):
    assert yaml.safe_load(scalar(value)) == value


def test_text_that_looks_like_something_else_is_quoted():
    assert [scalar(text) for text in ("on", "1e-5", "12:30", "", "a b", "a: b", "null", "zero3", "runs/a.b")] == [
        '"on"', '"1e-5"', '"12:30"', '""', '"a b"', '"a: b"', '"null"', "zero3", "runs/a.b"
    ]  # fmt: skip
    assert [scalar(value) for value in (1e-5, 3.0, True, None, -math.inf, 1e22)] == [
        "1.0e-05", "3.0", "true", "null", "-.inf", "1.0e+22"
    ]  # fmt: skip
    assert flow({"a": [1, {"b": None}]}) == "{a: [1, {b: null}]}"


def test_origins_stand_behind_the_values():
    shown = dump({"seed": 1, "trainer": {"devices": 2}, "vars": {}}, lambda path: f"from {path}")
    assert shown == (
        "seed: 1       # from seed\ntrainer:\n  devices: 2  # from trainer.devices\nvars: {}      # from vars\n"
    )
