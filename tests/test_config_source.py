"""YAML and command-line text as trees with origins: scalars, duplicates, extends, merging, interpolation."""

import math

import pytest
from shardlight.framework import resolve
from shardlight.framework.faults import COMMAND_LINE, ConfigError, Fault, Origin, suggest
from shardlight.framework.resolve import interpolate, load_tree, merge
from shardlight.framework.source import BROKEN, Node, from_python, parse_override, parse_scalar, read_yaml

SCALARS = {
    "1e-5": 1e-5, "5E-5": 5e-5, "1e4": 1e4, "1.": 1.0, ".5": 0.5, "-3": -3, "+3": 3, "0": 0, "0x1F": 31, "0o17": 15,
    "true": True, "False": False, "null": None, "~": None, "": None, ".inf": math.inf, "-.inf": -math.inf,
    "on": "on", "off": "off", "yes": "yes", "no": "no", "y": "y", "12:30": "12:30", "nan": "nan", "1_000": "1_000",
    "tRUE": "tRUE", "1e": "1e", "e5": "e5", "2024-01-01": "2024-01-01", "0b1": "0b1",
}  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into a fresh working directory; paths in faults are then just their names."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "config.yaml") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write


def faults_of(call, *args) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return str(caught.value).splitlines()


@pytest.mark.case("C017")
@pytest.mark.parametrize("text", SCALARS)
def test_a_scalar_is_what_yaml_12_says(text):
    value = parse_scalar(text)
    assert value == SCALARS[text] and type(value) is type(SCALARS[text])


def test_nan_is_a_number_only_with_its_dot():
    assert math.isnan(parse_scalar(".nan")) and parse_scalar("nan") == "nan"


@pytest.mark.case("C017")
def test_a_leading_zero_is_a_fault():
    with pytest.raises(ValueError) as caught:
        parse_scalar("-010")
    assert str(caught.value) == (
        "-010 has a leading zero, which some readers take as octal. Write 10, or '-010' in quotes for text."
    )


def test_every_value_knows_its_line(write):
    tree, faults = read_yaml(write("a: 1\nb:\n  c: x\n  d: [1,\n    2]\n"))
    assert faults == []
    assert tree.plain() == {"a": 1, "b": {"c": "x", "d": [1, 2]}}
    assert str(tree.find("b.c").origin) == "config.yaml:3"
    assert str(tree.find("b").origin) == "config.yaml:2"
    assert [str(item.origin) for item in tree.find("b.d").value] == ["config.yaml:4", "config.yaml:5"]
    assert tree.find("b.x") is None and tree.find("a.x") is None


def test_quoted_text_stays_text(write):
    tree, _ = read_yaml(write("a: '1e-5'\nb: \"true\"\nc: |\n  12\n"))
    assert tree.plain() == {"a": "1e-5", "b": "true", "c": "12\n"}


def test_an_empty_file_is_an_empty_mapping(write):
    assert read_yaml(write("# nothing\n"))[0].plain() == {}


def test_faults_of_single_values_are_all_reported_and_the_rest_is_read(write):
    tree, faults = read_yaml(
        write("a: {b: 1, b: 2}\nseed: 010\nl: [007]\nx: !!python/object:os.system y\n<<: {z: 1}\n")
    )
    assert list(map(str, ConfigError(faults).faults)) == [
        "config.yaml:1: a.b is already set at config.yaml:1. Remove one of the two.",
        "config.yaml:2: seed: 010 has a leading zero, which some readers take as octal. "
        "Write 10, or '010' in quotes for text.",
        "config.yaml:3: l[0]: 007 has a leading zero, which some readers take as octal. "
        "Write 7, or '007' in quotes for text.",
        "config.yaml:4: the tag !!python/object:os.system is not allowed: a config holds plain values only. Remove it.",
        "config.yaml:5: the merge key << is not supported. Use 'extends: other.yaml', or write the keys out.",
    ]
    assert tree.find("seed").value is BROKEN and tree.plain() == {"a": {"b": 1}, "seed": None, "l": [None], "x": None}


def test_a_list_as_key_is_a_fault(write):
    _, faults = read_yaml(write("? [a, b]\n: 1\n"))
    assert list(map(str, faults)) == ["config.yaml:1: a key must be a name, not a list or mapping."]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "a: [1\nb: 2\n",
            "config.yaml:1: not valid YAML: the [ that is opened here is not closed. Put a ] behind its last item.",
        ),
        (
            "a: 1\n---\nb: 2\n",
            "config.yaml:2: not valid YAML: a config is one document. Remove the line ---, or what follows it.",
        ),
        ("a: *x\n", "config.yaml:1: not valid YAML: found undefined alias 'x'."),
        ("- 1\n", "config.yaml:1: the top level must be a mapping of keys, such as 'trainer: {...}'."),
        ("a: \x01\n", "config.yaml:1: not valid YAML: character #x0001 is not allowed."),
        ("a: &a [*a]\n", "config.yaml:1: an alias that contains itself: not a config."),
    ],
)
def test_what_is_no_config_at_all_is_refused(write, text, fault):
    assert faults_of(read_yaml, write(text)) == [fault]


def test_aliases_are_copies(write):
    assert read_yaml(write("a: &a {x: 1}\nb: *a\n"))[0].plain() == {"a": {"x": 1}, "b": {"x": 1}}


def test_nested_aliases_cannot_fill_the_memory(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    (fault,) = faults_of(read_yaml, write("\n".join(lines)))
    assert fault.endswith("more than 100000 values: not a config.")


def test_unreadable_files_are_named(write, tmp_path):
    assert faults_of(read_yaml, "no.yaml") == ["no.yaml: cannot be read: No such file or directory."]
    (tmp_path / "l1.yaml").write_bytes(b"a: \xff\n")
    write("")
    assert faults_of(read_yaml, "l1.yaml") == ["l1.yaml: not UTF-8 text (byte 3)."]


def test_an_override_is_read_as_yaml():
    override, faults = parse_override("strategy.units=[A, {b: 1e-5}]")
    assert faults == [] and override.path == "strategy.units"
    assert override.node.plain() == ["A", {"b": 1e-5}] and override.node.origin is not None
    assert str(override.node.origin) == "command line"
    assert parse_override("a=b=c")[0].node.plain() == "b=c"
    assert parse_override("a=")[0].node.plain() is None
    for text in ("*.txt", "@home", "%d", "`x`"):
        assert parse_override(f"data.pattern={text}")[0].node.plain() == text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("strategy", "strategy is not key.path=value. Write strategy=VALUE."),
        ("a..b=1", "'a..b' is not a dotted key. Write key.path=value, without spaces."),
        ("a =1", "'a ' is not a dotted key. Write key.path=value, without spaces."),
        ("+a.b=1", "+a.b starts with '+', which overrides here do not have. Write a.b=1."),
        ("x=08", "x: 08 has a leading zero, which some readers take as octal. Write 8, or '08' in quotes for text."),
        ("a=[1", "a: not valid YAML: the [ that is opened here is not closed. Put a ] behind its last item."),
    ],
)  # fmt: skip
def test_a_bad_override_says_how_to_write_it(text, fault):
    assert list(map(str, parse_override(text)[1])) == [f"command line: {fault}"]


def test_python_values_become_a_tree(tmp_path):
    tree = from_python({"a": (1, None), "b": {"c": tmp_path}})
    assert tree.plain() == {"a": [1, None], "b": {"c": str(tmp_path)}}
    assert str(tree.find("b.c").origin) == "Python"
    assert faults_of(from_python, {"a": {"b": [object()]}}) == [
        "Python: a.b[0] is a object; a config holds plain values only."
    ]


def test_faults_come_by_file_and_line_once_and_the_command_line_last():
    places = [COMMAND_LINE, Origin("b.yaml", 2), Origin("b.yaml", 10), Origin("a.yaml", 3), Origin("b.yaml", 2)]
    error = ConfigError(Fault(place, "x") for place in places)
    assert str(error) == "a.yaml:3: x\nb.yaml:2: x\nb.yaml:10: x\ncommand line: x"
    assert len(error.faults) == 4


def test_suggestions_name_the_nearest_else_the_few():
    assert suggest("adamv", ["adam", "sgd"]) == " Did you mean 'adam'?"
    assert suggest("x", ["b", "a"]) == " Choose from: a, b."
    assert suggest("x", ["b", "a"], many=1) == suggest("x", []) == ""


def test_extends_is_below_the_file_and_the_command_line_above(write):
    write("a: 1\nb: {x: 1, y: 1}\nl: [1, 2]\n", "base.yaml")
    write("b: {y: 2}\n", "second.yaml")
    path = write("extends: [base.yaml, second.yaml]\nb: {z: 3}\nl: [9]\n")
    tree, faults = load_tree(path, ["b.x=7", "l.0=8", "c.d=5"])
    assert faults == []
    assert tree.plain() == {
        "extends": ["base.yaml", "second.yaml"], "a": 1, "b": {"x": 7, "y": 2, "z": 3}, "l": [8], "c": {"d": 5}
    }  # fmt: skip
    origins = {key: str(tree.find(key).origin) for key in ("a", "b.x", "b.y", "b.z", "c.d")}
    assert origins == {
        "a": "base.yaml:1", "b.x": "command line", "b.y": "second.yaml:1", "b.z": "config.yaml:2", "c.d": "command line"
    }  # fmt: skip


def test_extends_is_relative_to_its_file(write):
    write("extends: more/base.yaml\n", "config.yaml")
    write("extends: other.yaml\na: 1\n", "more/base.yaml")
    write("a: 0\nb: 2\n", "more/other.yaml")
    tree, _ = load_tree("config.yaml")
    assert tree.plain() == {"extends": "more/base.yaml", "a": 1, "b": 2}
    assert str(tree.find("b").origin) == "more/other.yaml:2"


def test_extends_faults(write):
    write("a: 1\n\nextends: config.yaml\n", "base.yaml")
    write("extends: base.yaml\n")
    assert faults_of(load_tree, "config.yaml") == [
        "base.yaml:3: extends config.yaml: the files extend each other in a circle."
    ]
    write("extends: [3]\n")
    assert faults_of(load_tree, "config.yaml") == [
        "config.yaml:1: extends must be a file name or a list of them, got 3."
    ]
    write("\nextends: none.yaml\n")
    assert faults_of(load_tree, "config.yaml") == ["config.yaml:2: extends none.yaml: there is no file none.yaml."]
    write("extends:\n")
    assert [str(fault) for fault in load_tree("config.yaml", ["extends=a.yaml"])[1]] == [
        "command line: extends can only be set in a file."
    ]


def test_a_strategy_name_and_a_mapping_merge(write):
    write("strategy: {name: zero3, reduce: window}\n", "base.yaml")
    write("extends: base.yaml\nstrategy: zero2\n")
    assert load_tree("config.yaml")[0].find("strategy").plain() == {"name": "zero2", "reduce": "window"}
    tree, _ = load_tree("config.yaml", ["strategy=ddp", "strategy.units=[A]"])
    assert tree.find("strategy").plain() == {"name": "ddp", "reduce": "window", "units": ["A"]}


def test_null_replaces_a_mapping():
    assert merge(from_python({"a": {"b": 1}}), from_python({"a": None})).plain() == {"a": None}


def test_the_same_override_twice_must_agree(write):
    write("a: 1\n")
    assert load_tree("config.yaml", ["a=2", "a=2"])[1] == []
    assert [str(fault) for fault in load_tree("config.yaml", ["a=2", "a=3"])[1]] == [
        "command line: a is given twice: 2 and 3. Keep one."
    ]


def test_a_list_index_out_of_range_replaces_the_list_by_what_was_written(write):
    write("l: [1]\n")
    assert load_tree("config.yaml", ["l.3=2"])[0].plain() == {"l": {"3": 2}}


def test_interpolation_keeps_types_and_the_place_of_the_key(write, monkeypatch):
    monkeypatch.setenv("SHARDLIGHT_TEST_WIDTH", "64")
    write("vars: {n: 3, block: {a: [1, 2]}}\nx: ${vars.n}\ny: ${vars.block}\nz: run-${vars.n}\nw: ${oc.env:SHARDLIGHT_TEST_WIDTH}\nl: ['${x}']\n")  # fmt: skip
    tree, faults = load_tree("config.yaml", ["vars.n=5"])
    assert faults == []
    expected = {"x": 5, "y": {"a": [1, 2]}, "z": "run-5", "w": "64", "l": [5]}
    assert {key: tree.find(key).plain() for key in expected} == expected
    assert str(tree.find("y.a").origin) == "config.yaml:3"


def test_interpolation_faults_name_the_key(write):
    write("a: ${vars.no}\nb: {c: ['${']}\nd: ${e}\ne: ${d}\nf: ${oc.env:SHARDLIGHT_TEST_UNSET}\nvars: {n: 1}\n")
    tree, faults = load_tree("config.yaml")
    assert list(map(str, ConfigError(faults).faults)) == [
        "config.yaml:1: a: '${vars.no}' cannot be resolved: Interpolation key 'vars.no' not found.",
        "config.yaml:2: b.c[0]: '${' is not a valid interpolation. Write ${vars.NAME}.",
        "config.yaml:3: d: '${e}' cannot be resolved: Recursive interpolation detected.",
        "config.yaml:4: e: '${d}' cannot be resolved: Recursive interpolation detected.",
        "config.yaml:5: f: '${oc.env:SHARDLIGHT_TEST_UNSET}' cannot be resolved: "
        "Environment variable 'SHARDLIGHT_TEST_UNSET' not found.",
    ]
    assert tree.find("a").value is BROKEN


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("${oc.create:1}", "oc.create"),
        ("${oc.decode:'1'}", "oc.decode"),
        ("x ${ mine : 1}", "mine"),
        ("${${vars.r}:1}", "${vars.r}"),
        ("${oc.env:${oc.select:a}}", "oc.select"),
    ],
)
def test_no_resolver_but_the_environment_is_called(text, name):
    faults = []
    interpolate(from_python({"vars": {"r": "oc.create"}, "x": text}), faults)
    assert [str(fault) for fault in faults] == [
        f"Python: x: {text!r} calls the resolver {name}; only ${{key.path}} and ${{oc.env:NAME}} are allowed."
    ]


def test_a_registered_resolver_is_not_called_either():
    resolve.OmegaConf.register_resolver("shardlight_test", lambda: 1 / 0)
    try:
        faults = []
        interpolate(from_python({"x": "${shardlight_test:}"}), faults)
        assert len(faults) == 1
    finally:
        resolve.OmegaConf.clear_resolver("shardlight_test")


def test_a_tree_without_interpolation_is_left_alone():
    tree = Node({"a": Node("$", COMMAND_LINE)}, COMMAND_LINE)
    assert interpolate(tree, []) is tree
