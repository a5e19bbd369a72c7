"""`shardlight migrate`: unknown keys, contradictions, files that cannot be read, and the command."""

import json
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from migrating import SOURCES, config, fault, lines, write
from shardlight import cli
from shardlight.framework.faults import ConfigError
from shardlight.framework.migrate.convert import MigrationError, migrate
from shardlight.framework.migrate.source import read_source
from typer.testing import CliRunner


@pytest.mark.case("C023")
@pytest.mark.parametrize(
    ("source", "key", "words"),
    [
        ({"gradient_cliping": 1.0, "fp16": {}}, "gradient_cliping", "ignores such a key without a word"),
        ({"gradient_cliping": 1.0, "fp16": {}}, "gradient_cliping", "Did you mean 'gradient_clipping'?"),
        ({"zero_optimisation": {"stage": 3}, "fp16": {}}, "zero_optimisation.stage", "in the unknown section"),
        ({"zero_optimisation": {"stage": 3}, "fp16": {}}, "zero_optimisation.stage", "'zero_optimization'?"),
        ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "refuse such a key. Did you mean 'stage'?"),
        ({"stage": 3, "fp16": {}}, "stage", "Its place is zero_optimization.stage."),
        ({"aio": {"blok_size": 1}}, "aio.blok_size", "ignores such a key without a word"),
        ({"fp16": True}, "fp16", "a section of keys is expected here"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "optimizer.params.learning_rate", "not one of adamw"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}}, "scheduler.params.total_num_steps",
         "not one of WarmupLR"),
        ({"distributed_type": "NO", "mixed_precison": "fp16"}, "mixed_precison", "accelerate refuses such a key."),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_shard": 1}}, "fsdp_config.fsdp_shard", "nothing reads it"),
    ],
)  # fmt: skip
def test_unknown_keys_are_named(source, key, words, tmp_path):
    line = lines(tmp_path, source)[key]
    assert line.group == "unknown" and words in line.text


@pytest.mark.case("C002")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
         ":2: train_batch_size is 100, but train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 4 = 32: no whole "
         "number of processes"),
        ({"train_batch_size": 15, "train_micro_batch_size_per_gpu": 4}, "train_batch_size is 15, but "
         "train_micro_batch_size_per_gpu 4: no whole number"),
        ({"train_batch_size": 0}, "train_batch_size is 0; it must be at least 1."),
        ({"train_batch_size": "many"}, "train_batch_size must be a whole number"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true. Switch one off."),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; it must be 0, 1, 2 or 3."),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}},
         "total_num_steps is 10, but the warmup has 20 steps"),
        ({"communication_data_type": "int8"}, "communication_data_type is int8; it must be fp16, bf16 or fp32."),
        ({"distributed_type": "MULTI_GPU", "num_processes": 5, "num_machines": 2}, "num_processes is 5, which does not divide "
         "into num_machines 2."),
        ({"distributed_type": "NO", "num_processes": 2}, "distributed_type is NO, but num_processes is 2."),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SOME"}}, "must be one of FULL_SHARD"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "gone.json"}}, "there is no file"),
        ({"num_processes": 2}, "distributed_type is missing"),
    ],
)  # fmt: skip
def test_a_contradiction_is_a_fault_with_its_numbers(source, words, tmp_path):
    text = fault(tmp_path, source)
    assert words in text and re.match(r".*ds_config\.json:\d+: ", text)


@pytest.mark.case("C002")
def test_accelerate_and_its_deepspeed_file_have_to_agree(tmp_path):
    source = {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "fp16"}
    source["deepspeed_config"] = {"deepspeed_config_file": "inner.json", "gradient_accumulation_steps": 4}
    write(tmp_path, {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}, "inner.json")
    text = fault(tmp_path, source)
    assert (
        "inner.json:2: gradient_accumulation_steps is 2, but deepspeed_config.gradient_accumulation_steps is 4" in text
    )
    assert "bf16.enabled is true, but mixed_precision is fp16" in text
    inner = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    write(tmp_path, inner, "inner.json")
    terms = "train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 4 x num_processes 4 = 128"
    assert f"train_batch_size is 64, but {terms.replace('gradient', 'deepspeed_config.gradient')}" in fault(
        tmp_path, source
    )
    write(tmp_path, inner | {"train_batch_size": 128}, "inner.json")
    assert config(tmp_path, source)["trainer"]["global_batch_size"] == 128


@pytest.mark.case("C002")
def test_all_faults_are_said_with_the_report_of_all_keys(tmp_path):
    batches = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    source = {**batches, "gradient_cliping": 1.0, "zero_optimization": {"stage": 4, "overlap_comm": True}}
    path = write(tmp_path, source)
    with pytest.raises(MigrationError) as caught:
        migrate(path)
    assert [fault.text.split(" is ")[0] for fault in caught.value.faults] == [
        "train_batch_size",
        "zero_optimization.stage",
    ]
    told = {line.key for line in caught.value.made.lines}
    assert {*batches, "gradient_cliping", "zero_optimization.overlap_comm"} <= told
    made = run(["migrate", str(path), "--out", str(tmp_path / "config.yaml")])
    assert made.exit_code == 2 and not (tmp_path / "config.yaml").exists()
    for words in (
        "gradient_cliping = 1.0",
        "Nothing is written: ",
        "train_batch_size is 100, but",
        "stage is 4; it must be",
    ):
        assert words in made.output


TEXTS = st.text('ab"\\\\\n\t/#*é😀{}[],: ', max_size=6)
JSON = st.recursive(
    st.sampled_from([None, True, False, 0, -1, 1e-5, 2.5e9, 10**12]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(value=st.dictionaries(TEXTS, JSON, max_size=4), indent=st.sampled_from([None, 2, "\t"]))
def test_json_reads_as_json(value, indent, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert read_source(path).plain() == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"a": 1\n"b": 2}', ":3: not valid JSON: a comma is missing before this."),
        ('{\n"a": }', ":2: not valid JSON: expecting value."),
        ('{\n\n"a": 1, "a": 2}', ':3: "a" is already set at'),
        ("{\na: 1}", ":2: not valid JSON: a key must be in double quotes."),
        ('{"a" 1}', ':1: not valid JSON: a colon is missing after "a".'),
        ('{"a": 1', "not valid JSON: the file ends before this."),
        ('{"a": 1}\n}', ":2: not valid JSON: there is something behind"),
        ('{"a": /* 1}', "the comment /* has no end"),
        ('{"a": "x\n"}', ":1: not valid JSON: "),
        ("[1]", ":1: the top level must be a mapping"),
        ("", ":1: not valid JSON"),
        ('{"a":' + "[" * 60 + "]" * 60 + "}", "more than 50 levels"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON: "),
        ('{"learning": 1, "rate": 2}', ":1: neither a DeepSpeed config"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_fault_with_its_line(text, words, tmp_path):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        migrate(tmp_path / "ds.json")
    assert words in str(caught.value) and str(caught.value).startswith(str(tmp_path / "ds.json"))


def test_broken_yaml_is_a_fault_with_its_line(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: NO\nmixed_precision: [\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:\d+: not valid YAML"):
        migrate(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate(tmp_path / "none.json")


def test_no_text_of_the_source_gets_out_of_a_comment(tmp_path):
    source = {"tensorboard": {"enabled": True, "output_path": 'x"\nseed: 1'}, "bad\x1b[31m\nrun": 1}
    (tmp_path / "ds\nseed: 3.json").write_text(json.dumps(source))
    made = migrate(tmp_path / "ds\nseed: 3.json")
    assert set(yaml.safe_load(made.text)) == {"run", "module", "data", "strategy", "trainer"}
    assert yaml.safe_load(made.text)["run"]["dir"] == 'x"\nseed: 1'
    ran = run(["migrate", str(tmp_path / "ds\nseed: 3.json"), "--out", str(tmp_path / "c.yaml")])
    assert "\x1b" not in ran.output and "\\x1b[31m\\x0arun" in ran.output


def run(arguments: list[str]):
    return CliRunner().invoke(cli.app, arguments)


def test_the_command_writes_the_config_and_the_report(tmp_path):
    out, report = tmp_path / "new" / "config.yaml", tmp_path / "report.json"
    ran = run(["migrate", str(SOURCES / "ds_lora_mics.json"), "--out", str(out), "--json", str(report)])
    assert ran.exit_code == 0, ran.output
    assert out.read_text() == migrate(SOURCES / "ds_lora_mics.json").text
    (tmp_path / "plain").touch()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (
        "Unknown: not a key of the source's own tool (1)\n  ds_lora_mics.json:15  gradient_cliping = 1.0  "
        in ran.output
    )
    assert f"{out}: written. To fill in: module.class, data.class, trainer.max_steps." in ran.output
    data = json.loads(report.read_text())
    assert sum(data["counts"].values()) == len(data["lines"]) and data["kind"] == "deepspeed"
    assert data["fill_in"] == ["module.class", "data.class", "trainer.max_steps"]
    row = next(row for row in data["lines"] if row["key"] == "zero_optimization.mics_shard_size")
    assert (row["group"], row["to"], row["value"]) == ("maps", "strategy.shard_group: 2", 2)


def test_nothing_is_written_over_unless_it_is_asked_for(tmp_path):
    source = write(tmp_path, {"bf16": {"enabled": True}})
    out = tmp_path / "config.yaml"
    out.write_text("mine\n")
    ran = run(["migrate", str(source), "--out", str(out)])
    assert ran.exit_code == 2 and "is there already" in ran.output and out.read_text() == "mine\n"
    assert run(["migrate", str(source), "--out", str(out), "--force"]).exit_code == 0
    assert "bf16-true" in out.read_text()
    before = source.read_text()
    ran = run(["migrate", str(source), "--out", str(source), "--force"])
    assert ran.exit_code == 2 and "is the source" in ran.output and source.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "ds_config.json"]


def test_a_fault_writes_nothing_and_shows_no_traceback(tmp_path):
    source = write(tmp_path, {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2})
    ran = run(["migrate", str(source), "--out", str(tmp_path / "c.yaml")])
    assert ran.exit_code == 2 and "Traceback" not in ran.output and not (tmp_path / "c.yaml").exists()
