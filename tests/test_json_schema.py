"""`shardlight schema`: what an editor says of a config is what the check says."""

import json
import re
from pathlib import Path

import pytest
from shardlight import cli
from shardlight.framework.json_schema import config_schema
from shardlight.framework.optim import DEFAULTS
from shardlight.framework.schema import SECTIONS, field_docs
from shardlight.framework.source import read_yaml
from shardlight.strategies.options import OPTIONS
from typer.testing import CliRunner

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install -e '.[dev]'")
ROOT = Path(__file__).parents[1]
SHIPPED = [path for folder in ("examples", "templates") for path in sorted((ROOT / folder).rglob("*.yaml"))]
BAD = sorted((ROOT / "tests" / "bad_configs").glob("*.yaml"))
STRUCTURAL = re.compile(
    r":\d+: (?!(module|data|callbacks\.\w+)\.(?!class ))"
    r".*(is not (a key|an option)|is called|is a key of|must be (a |an |one of|text|true)|(class|name) is missing:)"
)
"""What a schema can know: which keys there are, and what their values may be; arguments of classes it cannot."""


@pytest.fixture(scope="module")
def validator():
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def faults(validator, values: dict) -> list[str]:
    return [error.json_path for error in validator.iter_errors(values)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_config_has_no_faults(validator, path):
    assert SHIPPED and faults(validator, read_yaml(path)[0].plain()) == []


def test_every_structural_fault_of_the_corpus_is_one_here(validator):
    seen = 0
    for path in BAD:
        expected = re.findall(r"^# expect: (.*)", path.read_text(), re.MULTILINE)
        # Some are no YAML, and JSON knows no NaN.
        if path.stem.startswith(("yaml", "type_nan")) or not any(map(STRUCTURAL.match, expected)):
            continue
        seen += 1
        assert faults(validator, read_yaml(path)[0].plain()), path.stem
    assert seen >= 50


GOOD = {"module": {"class": "a.B", "width": 3}, "data": {"class": "a.D"}, "trainer": {"max_steps": 3}}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"strategy": "zero3"},
        {"strategy": {"name": "zero2", "keep_small": 0, "keep_gathered": "no", "shard_group": None}},
        {"trainer": {"max_steps": "${vars.n}", "devices": 2.0, "precision": "${vars.p}"}, "vars": {"n": 3, "x": [1]}},
        {"optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "momentum": None}},
        {"extends": "base.yaml", "optimizer": {"lr": 1e-3}, "strategy": {"reduce": "window"}},
        {"extends": ["a.yaml", "b.yaml"], "module": {"width": 3}, "callbacks": {"a": None}, "checkpoint": None},
        {"resume": "auto", "init_from": {"path": "x", "rename": {"a": "b"}}, "callbacks": {"a": {"class": "a.C"}}},
        {"trainer": None, "run": None, "schedule": None, "resume": {"path": "x", "skip": ["a"]}},
    ],
)
def test_what_the_check_takes_is_no_fault(validator, values):
    assert faults(validator, {**GOOD, **values}) == []


@pytest.mark.parametrize(
    ("values", "place", "said"),
    [
        ({"strategy": {"name": "zero2", "keep_small": 8}}, "$.strategy.keep_small", "8 is not one of [None, 0]"),
        ({"strategy": {"name": "ddp", "shard_group": 2}}, "$.strategy.shard_group", "2 is not of type 'null'"),
        ({"strategy": {"name": "zero3", "reduc": "window"}}, "$.strategy", "('reduc' was unexpected)"),
        ({"strategy": {"name": "zero3", "reduce": "never"}}, "$.strategy.reduce", "'never' is not valid"),
        ({"strategy": {"name": "zero9"}}, "$.strategy.name", "'zero9' is not valid"),
        ({"strategy": "zero9"}, "$.strategy", "'zero9' is not valid"),
        ({"optimizer": {"name": "adamw", "lr": 1e-3, "momentum": 0.9}}, "$.optimizer.momentum", "0.9 is not of type 'null'"),
        ({"optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, "x"]}}, "$.optimizer.betas[1]", "'x' is not valid"),
        ({"optimizer": {"name": "adamw"}}, "$.optimizer", "'lr' is a required property"),
        ({"trainer": {"max_steps": 3, "precision": "half"}}, "$.trainer.precision", "'half' is not valid"),
        ({"callbacks": {"stop": {"class": 3}}}, "$.callbacks.stop.class", "3 is not of type 'string'"),
        ({"module": {"width": 3}}, "$.module", "'class' is a required property"),
        ({"vars": 3}, "$.vars", "3 is not valid"),
    ],
)  # fmt: skip
def test_a_fault_is_told_at_its_place(validator, values, place, said):
    (error,) = validator.iter_errors({**GOOD, **values})
    assert error.json_path == place and said in error.message


def proposed(validator, name: str) -> set[str]:
    """What an editor proposes in a section with that name: the keys of the branch that holds."""
    (branch,) = (
        rule["then"]["properties"]
        for rule in validator.schema["properties"]["strategy"]["allOf"]
        if validator.evolve(schema=rule["if"]).is_valid({"name": name})
    )
    return {key for key, item in branch.items() if item is True or not item.get("doNotSuggest")}


def test_only_options_of_the_strategy_are_proposed(validator):
    assert {"reduce", "offload"} <= proposed(validator, "zero2") and "keep_gathered" not in proposed(validator, "zero2")
    assert {"keep_gathered", "keep_small", "shard_group"} <= proposed(validator, "zero3")
    assert "staging_count" in proposed(validator, "infinity") - proposed(validator, "zero3")
    assert {"shard_group", "keep_small"}.isdisjoint(proposed(validator, "ddp"))
    assert {"staging_count", "keep_gathered"} <= proposed(validator, "${vars.x}")


def test_it_says_what_the_fields_are(validator):
    schema = validator.schema
    trainer = schema["properties"]["trainer"]["properties"]
    assert trainer["devices"]["description"] == field_docs(SECTIONS["trainer"])["devices"]
    assert trainer["precision"]["default"] == "32-true"
    text = json.dumps(schema)
    assert all(f'"{name}"' in text for name in (*OPTIONS, *DEFAULTS, *SECTIONS))


def test_the_command_prints_it_or_writes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(cli.app, ["schema"])
    assert (printed.exit_code, json.loads(printed.stdout)) == (0, config_schema())
    written = CliRunner().invoke(cli.app, ["schema", "--out", "s.json"])
    assert written.stdout == "s.json: put '# yaml-language-server: $schema=s.json' at the head of a config.\n"
    assert Path("s.json").read_text() == printed.stdout
    refused = CliRunner().invoke(cli.app, ["schema", "--out", "gone/s.json"])
    assert (refused.exit_code, refused.stderr) == (
        2,
        "--out gone/s.json: cannot be written (No such file or directory).\n",
    )
