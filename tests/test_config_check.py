"""Values against annotations: one rule for a file, the command line and Python; frozen dataclasses built from trees."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardlight.framework.check import BAD, Checker, words
from shardlight.framework.faults import COMMAND_LINE, PYTHON
from shardlight.framework.resolve import load_tree
from shardlight.framework.schema import RunConfig, TrainerConfig, field_docs
from shardlight.framework.source import BROKEN, Node, from_python, parse_override, read_yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float
    steps: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner = Inner(rate=1.0)
    maybe: Inner | None = None

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("name is bad; write good")


def convert(value: Any, wanted: Any) -> tuple[Any, list[str]]:
    faults = []
    node = from_python({"x": value}).find("x")
    made = Checker(faults).convert(node, wanted, "x")
    return made, [fault.text for fault in faults]


GOOD = [
    (1e-5, float, 1e-5), ("1e-5", float, 1e-5), (" 5E-5 ", float, 5e-5), (3, float, 3.0), (1e4, int, 10000),
    ("10", int, 10), (7, int, 7), (True, bool, True), ("false", bool, False), ("on", str, "on"), 
    (None, int | None, None),
    (3, int | None, 3), (1, int | float, 1), (1.0, int | float, 1.0), (0.5, int | float, 0.5), ("2", int | float, 2),
    ("a", Literal["a", "b"], "a"), (2, Literal[1, 2], 2), ([1, 2.0], tuple[int, ...], (1, 2)), ([], list[int], []),
    ([1, "2"], list[float], [1.0, 2.0]), ([0.9, "0.99"], tuple[float, float], (0.9, 0.99)), ([1], list, [1]),
    ([1], Sequence[float], [1.0]), ({"a": 1}, dict[str, float], {"a": 1.0}), ({"a": [1]}, Mapping, {"a": [1]}),
    ({"a": [1]}, Any, {"a": [1]}), ("d", Path, Path("d")), ("d", str | Path, "d"), (2, Annotated[float, "s"], 2.0),
    ({"rate": 1}, Inner, Inner(rate=1.0)), ({"rate": 1}, Inner | None, Inner(rate=1.0)), (math.inf, float, math.inf),
    (True, str | bool, True), ([1, "a"], list[int | str], [1, "a"]),
]  # fmt: skip
BAD_VALUES = [
    (1.5, int, "x must be a whole number, got 1.5 (number)."),
    ("1.5", int, "x must be a whole number, got '1.5' (text)."),
    (True, int, "x must be a whole number, got true (true or false)."),
    (None, int, "x must be a whole number, got null."),
    (math.inf, int, "x must be a whole number, got inf (number)."),
    (True, float, "x must be a number, got true (true or false)."),
    ("nan", float, "x must be a number, got 'nan' (text)."),
    (math.nan, float, "x must be a number, got nan (number)."),
    ("12:30", float, "x must be a number, got '12:30' (text)."),
    ("010", int, "x: 010 has a leading zero, which some readers take as octal. Write 10, or '010' in quotes for text."),
    ("on", bool, "x must be true or false, got 'on' (text). Write true."),
    ("No", bool, "x must be true or false, got 'No' (text). Write false."),
    (1, bool, "x must be true or false, got 1 (number)."),
    (True, str, "x must be text, got true (true or false). Write 'true' in quotes."),
    (12, str, "x must be text, got 12 (number). Write '12' in quotes."),
    (None, str, "x must be text, got null."),
    ([1], str, "x must be text, got a list."),
    ({"a": 1}, float, "x must be a number, got a mapping."),
    ("x", Path | None, None),
    (3, Path, "x must be text, got 3 (number). Write '3' in quotes."),
    ("zero", int | float, "x must be a whole number or a number, got 'zero' (text)."),
    (1.5, int | None, "x must be a whole number, got 1.5 (number)."),
    ("adan", Literal["adam", "sgd"], "x must be one of adam, sgd; got 'adan' (text). Did you mean 'adam'?"),
    (32, Literal["32-true"], "x must be one of 32-true; got 32 (number). Did you mean '32-true'?"),
    (True, Literal[1], "x must be one of 1; got true (true or false)."),
    ("A", tuple[str, ...], "x must be a list, got 'A' (text). Write [A]."),
    ({}, list[int], "x must be a list, got a mapping."),
    ([1.0], tuple[float, float], "x must be a list of 2, got 1."),
    (["b", 2.5], list[int],
     "x[0] must be a whole number, got 'b' (text).\nx[1] must be a whole number, got 2.5 (number)."),
    ([1], dict[str, int], "x must be a mapping of keys, got a list."),
    ({"a": "b"}, dict[str, int], "x.a must be a whole number, got 'b' (text)."),
    ({"rate": "b"}, Inner | None, "x.rate must be a number, got 'b' (text)."),
    ("float32", math.__class__, "x must be a module, which a config cannot give; got 'float32' (text)."),
]  # fmt: skip


@pytest.mark.case("C017")
@pytest.mark.parametrize(("value", "wanted", "expected"), GOOD)
def test_a_value_is_taken_as_the_annotation_says(value, wanted, expected):
    made, faults = convert(value, wanted)
    assert faults == [] and made == expected and type(made) is type(expected)


@pytest.mark.case("C017")
@pytest.mark.parametrize(("value", "wanted", "fault"), BAD_VALUES)
def test_a_value_of_another_type_is_named(value, wanted, fault):
    made, faults = convert(value, wanted)
    assert "\n".join(faults) == (fault or "")
    assert (made is BAD) == (fault is not None)


@pytest.mark.case("C017")
@pytest.mark.parametrize("text", ["1e-5", '"1e-5"', "5E-5", "1e4", "010", "on", "12:30", "nan", "true", "3", "1.5", ""])
@pytest.mark.parametrize("wanted", [float, int, str, bool, float | None])
def test_file_command_line_and_python_agree(tmp_path, text, wanted):
    (tmp_path / "c.yaml").write_text(f"x: {text}\n")
    file_tree, file_faults = read_yaml(tmp_path / "c.yaml")
    override, line_faults = parse_override(f"x={text}")
    outcomes = []
    for node, found in ((file_tree.find("x"), file_faults), (override.node, line_faults)):
        faults = list(found)
        made = Checker(faults).convert(node, wanted, "x")
        outcomes.append((made, [fault.text for fault in faults]))
    if not file_faults:
        outcomes.append(convert(file_tree.find("x").plain(), wanted))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@given(st.floats(allow_nan=False))
def test_every_number_survives_as_text(value):
    assert convert(repr(value) if math.isfinite(value) else value, float)[0] == value


@given(st.integers())
def test_every_whole_number_survives_as_text(value):
    assert convert(str(value), int)[0] == value


def test_a_reported_fault_is_not_reported_again():
    faults = []
    assert Checker(faults).convert(Node(BROKEN, PYTHON), int, "x") is BAD and faults == []


def section(values: Any, cls: type = Outer, path: str = "s") -> tuple[Any, list[str]]:
    faults = []
    made = Checker(faults).section(from_python({"s": values}).find("s"), cls, path)
    return made, [fault.text for fault in faults]


def test_a_section_becomes_a_frozen_dataclass():
    made, faults = section({"name": "a", "inner": {"rate": "2"}, "maybe": None})
    assert faults == [] and made == Outer(name="a", inner=Inner(rate=2.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "b"


def test_all_faults_of_a_section_are_found():
    made, faults = section({"inner": {"rat": 1}, "maybe": {"rate": "x", "steps": 1.5}, "nam": 1})
    assert made is BAD
    assert faults == [
        "s.inner.rat is not a key of s.inner. Did you mean 'rate'?",
        "s.inner.rate is missing: it has no default. It is a number.",
        "s.maybe.rate must be a number, got 'x' (text).",
        "s.maybe.steps must be a whole number, got 1.5 (number).",
        "s.nam is not a key of s. Did you mean 'name'?",
        "s.name is missing: it has no default. It is text.",
    ]


def test_the_owner_of_a_dataclass_checks_its_values():
    assert section({"name": "bad"}) == (BAD, ["s.name is bad; write good."])


def test_an_empty_section_has_its_defaults():
    assert section(None, RunConfig) == (RunConfig(), [])
    assert Checker([]).section(None, RunConfig, "run") == RunConfig()
    assert section([1], RunConfig) == (BAD, ["s must be a mapping of keys, got a list. Remove the dashes."])


def test_a_key_known_elsewhere_is_told_by_the_hook():
    faults = []
    checker = Checker(faults, lambda section, key, node: f"{key} lives elsewhere than in {section}")
    checker.section(from_python({"x": 1}), RunConfig, "run")
    assert [fault.text for fault in faults] == ["x lives elsewhere than in run"]
    Checker(faults).unknown("", "sed", Node(1, COMMAND_LINE), ["seed"], "a key of the config")
    assert str(faults[-1]) == "command line: sed is not a key of the config. Did you mean 'seed'?"


def test_annotations_in_words():
    assert words(int | None) == "a whole number or null"
    assert words(Literal["a", "b"]) == "one of a, b"
    assert (words(list[int]), words(dict), words(Any), words(Path)) == (
        "a list",
        "a mapping",
        "any plain value",
        "text",
    )
    assert (words(Inner), words("T")) == ("a Inner", "T")


def test_trainer_values_are_checked_by_their_owner():
    values = {"max_steps": 0, "limit_val_batches": 1.5, "val_check_interval": -1, "gradient_clip_val": -1.0}
    assert section(values, TrainerConfig, "trainer") == (
        BAD,
        [
            "trainer.max_steps is 0; it must be at least 1 (or left out, for no limit).",
            "trainer.gradient_clip_val is -1.0; it must be at least 0.",
            "trainer.val_check_interval is -1; it must be at least 0.",
            "trainer.limit_val_batches is 1.5; a fraction is at most 1.0, so write 1 for batches.",
        ],
    )


def test_every_field_of_the_schema_is_documented():
    from shardlight.framework import schema

    classes = [item for item in vars(schema).values() if isinstance(item, type) and dataclasses.is_dataclass(item)]
    assert len(classes) >= 8
    for cls in classes:
        documented = field_docs(cls)
        for field in dataclasses.fields(cls):
            assert documented.get(field.name, "").endswith("."), f"{cls.__name__}.{field.name}"
    assert field_docs(RunConfig)["dir"] == "Folder of all runs, relative to the working directory."


def test_load_tree_gives_what_convert_needs(tmp_path):
    (tmp_path / "c.yaml").write_text("trainer: {max_steps: 1e3}\n")
    tree, faults = load_tree(str(tmp_path / "c.yaml"), ["trainer.devices=2"])
    made = Checker(faults).section(tree.find("trainer"), TrainerConfig, "trainer")
    assert (made.max_steps, made.devices, made.world_size, faults) == (1000, 2, 2, [])
